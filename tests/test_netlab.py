"""Networks of namespaces: made, shaped, met in, and always removed, whatever ends the process that made them."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import interruptible

from hvd_onebit import netlab
from hvd_onebit.netlab import Host, LabError, NetworkLab, parse_rate

needs_network = pytest.mark.skipif(netlab.why_impossible() is not None, reason=str(netlab.why_impossible()))

# both print a line when they are ready; the second ignores what would end it gently
SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
STUBBORN = [*SLEEP[:2], "import signal; signal.signal(15, signal.SIG_IGN); " + SLEEP[2]]


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"hvdlab-{pid}-")]


def files_of(pid: int) -> list[Path]:
    return [
        path for folder in (Path("/etc/netns"), Path(tempfile.gettempdir())) for path in folder.glob(f"hvdlab-{pid}-*")
    ]


def assert_nothing_left(pid: int) -> None:
    assert namespaces_of(pid) == []
    assert files_of(pid) == []


def assert_gone(pid: int) -> None:
    """The process ends within seconds; one that nobody has waited for yet counts as ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    links = interfaces()
    yield
    assert_nothing_left(os.getpid())
    assert interfaces() == links


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else []


# without a network


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 1e8),
        ("1gbit", 1e9),
        ("2.5 Gbit/s", 2.5e9),
        ("64kbit", 64e3),
        ("10GBIT", 1e10),
        ("10Gbps", 1e10),
        ("unshaped", None),
    ],
)
def test_rates(text: str, bits: float | None) -> None:
    assert parse_rate(text).bits_per_second == bits
    assert parse_rate(text).name == text


@pytest.mark.parametrize("text", ["", "fast", "1g", "1000", "0gbit", "-1gbit", "63kbit", "1gbyte", "nangbit", "1GB/s"])
def test_rates_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate of at least 64kbit"):
        parse_rate(text)


@pytest.mark.parametrize("num_hosts", [0, -1, 251])
def test_numbers_of_hosts_that_make_no_sense_are_refused(num_hosts: int) -> None:
    with pytest.raises(ValueError, match="num_hosts must be 1 to 250"):
        NetworkLab(num_hosts)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda command: f"/sbin/{command}")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(LabError, match="needs root"), NetworkLab(2):
        raise AssertionError("the network was made")


def test_without_its_commands_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert netlab.why_impossible() == "ip and tc not found: install iproute2"


@pytest.mark.parametrize(
    "arguments",
    [
        ["10.0.0.2", "echo", "here: $0"],
        ["-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no", "10.0.0.2", "echo 'here:' $0"],
        ["-x", "-p", "22", "-oBatchMode=yes", "root@10.0.0.2", "-p", "2222", "-i", "key", "echo here: $0"],
    ],
)
def test_the_stand_in_takes_ssh_s_command_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "ip").write_text('#!/bin/sh\necho "$1 $2 $3"; shift 3; exec "$@"\n')
    (tmp_path / "ssh").write_text(netlab._ssh_stand_in([Host("one", "10.0.0.1"), Host("two", "10.0.0.2")]))
    for script in tmp_path.iterdir():
        script.chmod(0o700)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    done = subprocess.run([tmp_path / "ssh", *arguments], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "netns exec two\nhere: /bin/sh\n"


def test_the_stand_in_refuses_hosts_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(netlab._ssh_stand_in([Host("one", "10.0.0.1")]))
    (tmp_path / "ssh").chmod(0o700)
    done = subprocess.run([tmp_path / "ssh", "example.org", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert "there is no host example.org" in done.stderr


# with one


@needs_network
def test_hosts_meet_over_the_link_and_its_counters_tell() -> None:
    serve = """
import socket
server = socket.create_server(("10.77.0.1", 5000))
print("listening", flush=True)
with server.accept()[0] as connection:
    received = 0
    while data := connection.recv(65536):
        received += len(data)
    connection.sendall(str(received).encode())
"""
    send = """
import socket
with socket.create_connection(("10.77.0.1", 5000), timeout=20) as connection:
    connection.sendall(bytes(300000))
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(100).decode())
"""
    with NetworkLab(2, rate=parse_rate("100mbit")) as lab:
        server, client = lab.hosts
        serving = lab.popen(server, [sys.executable, "-c", serve], stdout=subprocess.PIPE)
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"listening\n"
        before = lab.bytes_sent(client)
        sending = lab.popen(client, [sys.executable, "-c", send], stdout=subprocess.PIPE)
        received, _ = sending.communicate(timeout=30)
        assert int(received) == 300000
        assert 300000 < lab.bytes_sent(client) - before < 330000
        assert serving.wait(timeout=30) == 0
        serving.stdout.close()


@needs_network
def test_every_host_knows_its_own_address_and_the_rate_can_change() -> None:
    find = "import socket; print(socket.gethostbyname(socket.gethostname()))"

    def shape(host: Host) -> str:
        show = ["tc", "-n", host.namespace, "qdisc", "show", "dev", "eth0"]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout

    with NetworkLab(3) as lab:
        for number, host in enumerate(lab.hosts, start=1):
            finding = lab.popen(host, [sys.executable, "-c", find], stdout=subprocess.PIPE)
            assert finding.communicate(timeout=30)[0].decode().strip() == host.address == f"10.77.0.{number}"
            assert "tbf" not in shape(host)
        lab.set_rate(parse_rate("10gbit"))
        assert all("rate 10Gbit" in shape(host) for host in lab.hosts)
        lab.set_rate(parse_rate("2mbit"))
        assert all("rate 2Mbit" in shape(host) for host in lab.hosts)
        lab.set_rate(netlab.UNSHAPED)
        assert all("tbf" not in shape(host) for host in lab.hosts)
        assert lab.rate is netlab.UNSHAPED


@needs_network
def test_labs_do_not_see_each_other() -> None:
    with NetworkLab(1) as one, NetworkLab(1) as other:
        assert one.hosts[0].address == other.hosts[0].address
        sleeping = one.popen(one.hosts[0], SLEEP)
        other.close()
        assert netlab.remove_leftovers() == []
        assert sleeping.poll() is None
    assert sleeping.wait(timeout=30) != 0


@needs_network
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), NetworkLab(2) as lab:  # noqa: PT012 - what happens inside matters
        left = [lab.popen(lab.hosts[0], SLEEP), lab.popen(lab.hosts[1], STUBBORN, stdout=subprocess.PIPE)]
        assert left[1].stdout is not None
        with left[1].stdout as stdout:
            stdout.readline()
        assert len(namespaces_of(os.getpid())) == 3
        assert stat.S_IMODE(lab._folder.stat().st_mode) == 0o700
        raise ZeroDivisionError
    assert [process.wait(timeout=30) for process in left] == [-signal.SIGTERM, -signal.SIGKILL]
    lab.close()  # again: nothing to do


@needs_network
def test_nothing_is_left_when_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "_ssh_stand_in", lambda hosts: 1 / 0)
    with pytest.raises(ZeroDivisionError), NetworkLab(2):
        raise AssertionError("the network was made")


OWNER = """
import subprocess, sys, time
from hvd_onebit.netlab import NetworkLab
with NetworkLab(2) as lab:
    process = lab.popen(lab.hosts[1], {command}, start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, flush=True)
    time.sleep(600)
"""


@needs_network
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [SLEEP, STUBBORN], ids=["gentle", "stubborn"])
def test_nothing_is_left_after_a_signal(signum: signal.Signals, command: list[str]) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(command=command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=interruptible,
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    assert len(namespaces_of(owner.pid)) == 3
    for _ in range(8):  # impatience changes nothing
        owner.send_signal(signum)
        time.sleep(0.1)
    assert owner.wait(timeout=30) != 0
    owner.stdout.close()
    assert_nothing_left(owner.pid)
    assert_gone(child)


@needs_network
def test_what_a_killed_process_left_is_found_and_removed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(command=SLEEP)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait(timeout=30)
    owner.stdout.close()
    left = namespaces_of(owner.pid)
    assert len(left) == 3
    assert len(files_of(owner.pid)) == 3
    assert Path(f"/proc/{child}").exists()
    assert sorted(netlab.remove_leftovers()) == sorted(left)
    assert_nothing_left(owner.pid)
    assert_gone(child)
    assert netlab.remove_leftovers() == []


@needs_network
def test_files_of_others_stay() -> None:
    others = Path("/etc/netns") / f"hvd-onebit-test-{os.getpid()}"
    others.mkdir(parents=True)
    try:
        with NetworkLab(1):
            pass
        assert others.is_dir()
    finally:
        others.rmdir()
        netlab.remove_leftovers()
