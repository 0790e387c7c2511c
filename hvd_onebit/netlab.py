"""A network of hosts on one machine: network namespaces, joined by links that are shaped to a rate.

    with NetworkLab(2, rate=parse_rate("1gbit")) as lab:
        lab.horovodrun([sys.executable, "train.py"], ranks_per_host=1, log=Path("train.log"), cwd=Path.cwd())

Each host has its own interface eth0 and address; a bridge in one more namespace joins them, so that nothing appears on
the machine's own network. horovodrun reaches the other hosts by a stand-in for ssh that is first on PATH. All hosts
share the machine's processors, memory and files: what is real is what happens between sockets.

It needs Linux, root, and the commands ip and tc. A lab's namespaces, files and processes are named after the process
that made it, and removed when the lab closes: on exceptions, Ctrl-C and SIGTERM too. What a killed process left is
removed when the next lab opens, or by `remove_leftovers`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hvd_onebit._processes import launch_environment, run_logged, sigterm_unwinds, which

__all__ = ["UNSHAPED", "Host", "LabError", "NetworkLab", "Rate", "parse_rate", "remove_leftovers", "why_impossible"]

INTERFACE = "eth0"
"""The interface of every host."""

_PREFIX = "hvdlab"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+-(?:switch|host\d+|files)")  # the owner's pid and the time it started
_NAMESPACES = Path("/run/netns")
_NETNS_FILES = Path("/etc/netns")
_MAX_HOSTS = 250
_GRACE_SECONDS = 2.0
_GIVE_UP_SECONDS = 10.0
_TIMEOUT_SECONDS = 30.0  # of one ip or tc command
# Segments of up to 64 kB leave a host at once: a burst below that never lets one pass. The rest covers the time between
# two looks of the scheduler at a fast link.
_LEAST_BURST_BYTES = 256 * 1024
_BURST_SECONDS = 0.0005
_QUEUE_SECONDS = 0.05

_lab_numbers = itertools.count()


class LabError(RuntimeError):
    """The network cannot be made here, or a command for it failed."""


@dataclass(frozen=True)
class Rate:
    """A link's speed.

    Attributes:
        name: as a user writes it.
        bits_per_second: None: as fast as the machine moves bytes.
    """

    name: str
    bits_per_second: float | None


UNSHAPED = Rate("unshaped", None)


@dataclass(frozen=True)
class Host:
    """One host of the network.

    Attributes:
        namespace: its network namespace's name, for `ip netns exec`.
        address: its IPv4 address.
    """

    namespace: str
    address: str


def parse_rate(text: str) -> Rate:
    """The rate that `text` names: "unshaped", or a number with a unit such as "100mbit", "2.5 Gbit/s" or "10Gbps".

    Raises:
        ValueError: it's neither, or slower than 64 kbit/s.
    """
    if text.strip().lower() == UNSHAPED.name:
        return UNSHAPED
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG])(?:(?i:bit(?:/s|ps)?)|bps|b/s)", text.strip())
    bits = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()] if match else 0.0
    if bits < 64e3:
        raise ValueError(
            f'expected a rate of at least 64kbit, such as "100mbit" or "1gbit", or "unshaped", not {text!r}'
        )
    return Rate(text.strip(), bits)


def why_impossible() -> str | None:
    """What keeps this process from making a network, with the remedy; None when nothing is known to."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run this as root, for example with sudo"
    return None


class NetworkLab:
    """`num_hosts` hosts in one network, as a context manager.

    Entering makes the network; leaving ends every process on its hosts and removes it. While it is open in the main
    thread, SIGTERM raises SystemExit there.

    Args:
        num_hosts: 1 to 250.
        rate: of each host's link, in each direction.

    Attributes:
        hosts: the hosts, with addresses 10.77.0.1, 10.77.0.2, ... in a network of their own.

    Raises:
        LabError: on entering: the network cannot be made here.
        ValueError: a number of hosts out of range.
    """

    def __init__(self, num_hosts: int, *, rate: Rate = UNSHAPED) -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts must be 1 to {_MAX_HOSTS}, not {num_hosts}")
        self._pid = os.getpid()
        name = f"{_PREFIX}-{self._pid}-{_start_time(self._pid)}-{next(_lab_numbers)}"
        self._switch = f"{name}-switch"
        self._folder = Path(tempfile.gettempdir()) / f"{name}-files"
        self._rate = rate
        self._open = contextlib.ExitStack()
        self.hosts = tuple(Host(f"{name}-host{i}", f"10.77.0.{i + 1}") for i in range(num_hosts))

    @property
    def rate(self) -> Rate:
        """The rate of every link."""
        return self._rate

    def __enter__(self) -> NetworkLab:
        impossible = why_impossible()
        if impossible is not None:
            raise LabError(impossible)
        remove_leftovers()
        atexit.register(self.close)
        self._open.enter_context(sigterm_unwinds())
        try:
            self._make_namespaces()
            self._make_files()
            self.set_rate(self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process on the hosts and removes the network; also when some of it isn't there."""
        if os.getpid() != self._pid:
            return
        with _signals_held():
            _remove(self._namespaces, [self._folder])
        self._open.close()
        atexit.unregister(self.close)

    def set_rate(self, rate: Rate) -> None:
        """Shapes what every host sends, and by that what every host can receive from another."""
        for host in self.hosts:
            if rate.bits_per_second is None:
                # there is nothing to delete on a link that was never shaped
                with contextlib.suppress(LabError):
                    _run("tc", "-n", host.namespace, "qdisc", "delete", "dev", INTERFACE, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, int(rate.bits_per_second / 8 * _BURST_SECONDS))
            shape = f"tbf rate {int(rate.bits_per_second)}bit burst {burst}b latency {_QUEUE_SECONDS * 1000:.0f}ms"
            _run("tc", "-n", host.namespace, *f"qdisc replace dev {INTERFACE} root {shape}".split())
        self._rate = rate

    def bytes_sent(self, host: Host) -> int:
        """Bytes that have left the host, as its interface counts them."""
        return int(_run("ip", "netns", "exec", host.namespace, "cat", _counter_file("tx_bytes")))

    def popen(self, host: Host, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Starts a command on a host; `options` are those of subprocess.Popen."""
        return subprocess.Popen(self._on(host, command), **options)  # type: ignore[call-overload,no-any-return]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment in which horovodrun works here and reaches the other hosts; from os.environ if None."""
        environment = launch_environment(base)
        environment["PATH"] = os.pathsep.join([str(self._folder), environment["PATH"]])
        return environment

    def horovodrun(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        on_line: Callable[[str], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """Runs a command on all ranks, with Horovod's own launcher on the first host, to its end.

        Args:
            command: what every rank runs.
            ranks_per_host: ranks on each host.
            log: file that the output is appended to.
            cwd: folder to run in.
            environment: variables on top of this process's own.
            timeout_seconds: limit, or None for none.
            on_line: called with each line of output.
            on_tick: called about once a second.

        Raises:
            LabError: horovodrun is not installed.
            CommandError: a rank failed, or the limit was passed. Nothing is left running.
        """
        variables = self.environment({**os.environ, **(environment or {})})
        launcher = which("horovodrun", variables)
        if launcher is None:
            raise LabError("horovodrun not found: install Horovod with hvd-onebit install-horovod")
        slots = ",".join(f"{host.address}:{ranks_per_host}" for host in self.hosts)
        # what it remembers between runs, in the user's home, would be about hosts that are gone
        launch = [str(launcher), "--gloo", "--disable-cache", "-np", str(len(self.hosts) * ranks_per_host), "-H", slots]
        try:
            run_logged(
                self._on(self.hosts[0], [*launch, "--network-interface", INTERFACE, *command]),
                log=log,
                environment=variables,
                cwd=cwd,
                timeout_seconds=timeout_seconds,
                on_line=on_line,
                on_tick=on_tick,
            )
        finally:
            self.end_processes()

    def end_processes(self) -> None:
        """Ends every process on the hosts, gently first."""
        with _signals_held():
            _end_processes(self._namespaces)

    @property
    def _namespaces(self) -> list[str]:
        return [*(host.namespace for host in self.hosts), self._switch]

    def _on(self, host: Host, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", host.namespace, *command]

    def _make_namespaces(self) -> None:
        try:
            _batch([f"netns add {namespace}" for namespace in self._namespaces])
        except LabError as error:
            raise LabError(f"{error}\nIn a container it must be allowed to make namespaces (CAP_SYS_ADMIN).") from None
        cables = [
            f"link add {INTERFACE} netns {host.namespace} type veth peer name port{i} netns {self._switch}"
            for i, host in enumerate(self.hosts)
        ]
        _batch(cables)
        ports = [f"link set port{i} master bridge up" for i in range(len(self.hosts))]
        _batch(["link add bridge type bridge", "link set bridge up", *ports], self._switch)
        for host in self.hosts:
            # without a link-local IPv6 address the counters count what the ranks send and nothing else
            up = [f"link set {INTERFACE} addrgenmode none", f"address add {host.address}/24 dev {INTERFACE}"]
            _batch([*up, f"link set {INTERFACE} up", "link set lo up"], host.namespace)

    def _make_files(self) -> None:
        for host in self.hosts:
            folder = _NETNS_FILES / host.namespace
            folder.mkdir(parents=True)
            # Gloo binds the address that the machine's own name has
            names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names, encoding="utf-8")
        self._folder.mkdir(mode=0o700)
        ssh = self._folder / "ssh"
        ssh.write_text(_ssh_stand_in(self.hosts), encoding="utf-8")
        ssh.chmod(0o700)


def remove_leftovers() -> list[str]:
    """Removes the networks of processes that no longer live, and what still runs in them; returns their namespaces."""
    if why_impossible() is not None:
        return []
    namespaces = [name for name in _names_in(_NAMESPACES) if _is_orphan(name)]
    files = [name for name in _names_in(_NETNS_FILES) if _is_orphan(name)]
    temporary = Path(tempfile.gettempdir())
    folders = [temporary / name for name in _names_in(temporary) if _is_orphan(name)]
    ours = [folder for folder in folders if folder.lstat().st_uid == os.geteuid()]
    with _signals_held():
        _remove(sorted({*namespaces, *files}), ours)
    return namespaces


def _ssh_stand_in(hosts: Iterable[Host]) -> str:
    """A shell script that takes ssh's command line and runs the command on the host, as root."""
    cases = "\n".join(f"  {host.address}) namespace={host.namespace} ;;" for host in hosts)
    return f"""#!/bin/sh
host=
while [ $# -gt 0 ]; do
  case $1 in
    -[46AaCfGgKkMNnqsTtVvXxYy]*) shift ;;
    -?) shift 2 ;;
    -*) shift ;;
    *) [ -z "$host" ] || break; host=${{1#*@}}; shift ;;
  esac
done
case $host in
{cases}
  *) echo "ssh: there is no host $host in this network" >&2; exit 255 ;;
esac
exec ip netns exec "$namespace" /bin/sh -c "$*"
"""


def _counter_file(name: str) -> str:
    return f"/sys/class/net/{INTERFACE}/statistics/{name}"


def _run(*command: str, given: str | None = None) -> str:
    """The command's output; LabError with what it wrote if it fails."""
    try:
        done = subprocess.run(
            command, input=given or "", capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command)} did not finish within {_TIMEOUT_SECONDS:g} s") from None
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()}{_input_note(given)}")
    return done.stdout


def _input_note(given: str | None) -> str:
    return f"\nIt was given:\n{given}" if given else ""


def _batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs ip's commands, in a namespace, in one process."""
    _run("ip", *(["-n", namespace] if namespace else []), "-batch", "-", given="\n".join([*lines, ""]))


def _remove(namespaces: Sequence[str], folders: Sequence[Path]) -> None:
    present = [name for name in namespaces if (_NAMESPACES / name).exists()]
    _end_processes(present)
    for name in present:
        # another process may be removing the same leftovers
        with contextlib.suppress(LabError):
            _run("ip", "netns", "delete", name)
    for folder in [*(_NETNS_FILES / name for name in namespaces), *folders]:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        _NETNS_FILES.rmdir()  # refused while anybody else's files are in it
    left = [name for name in namespaces if (_NAMESPACES / name).exists()]
    if left:
        raise LabError(f"these network namespaces could not be removed: {', '.join(left)}")


def _end_processes(namespaces: Sequence[str]) -> None:
    """SIGTERM to every process in the namespaces, then SIGKILL to what is left, until none is."""
    start = time.monotonic()
    told: set[int] = set()
    while time.monotonic() - start < _GIVE_UP_SECONDS:
        pids = {pid for name in namespaces for pid in _processes_in(name)}
        if not pids:
            return
        late = time.monotonic() - start > _GRACE_SECONDS
        for pid in pids if late else pids - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= pids
        time.sleep(0.05)


def _processes_in(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split() if int(pid) != os.getpid()]
    except LabError:
        return []


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _is_orphan(name: str) -> bool:
    """True for the name of a lab's namespace or folder whose process is gone."""
    match = _NAME.fullmatch(name)
    return match is not None and _start_time(int(match[1])) != int(match[2])


def _start_time(pid: int) -> int:
    """When the process started, in the kernel's ticks: a number is used again, but not with this; 0 if there's none."""
    try:
        # the second field is the program's name in brackets, which may hold spaces and brackets
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """While open, Ctrl-C and SIGTERM wait: an impatient user's second Ctrl-C must not stop the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
