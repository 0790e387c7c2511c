"""What becomes of the others when a rank dies, stalls or cannot go on; what becomes of files when a run is ended."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import rank_environment, run_horovod

from hvd_onebit.checkpoint import save_atomically

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "scripts"
GLOO_SECONDS = 5  # after which Horovod gives up waiting for another rank's message


class World:
    """Starts ranks as horovodrun does, but leaves them alone: horovodrun would end the others itself."""

    def __init__(self, script: Path, folder: Path) -> None:
        from horovod.runner.http.http_server import RendezvousServer

        self.script = script
        self._server = RendezvousServer()
        self._port = self._server.start()
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=rank_environment({"PYTHONPATH": str(TESTS), "TF_CPP_MIN_LOG_LEVEL": "3"}),
        )
        self.pid = self._process.pid

    def run(
        self, name: str, *, size: int = 2, timeout: float = 60.0, never_ends: tuple[int, ...] = ()
    ) -> list[dict[str, Any]]:
        """What became of each rank: "status", what it "said", and after how many "seconds".

        Ranks that never end are ended once the others have.
        """
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

        plan = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
        self._server.init(plan)
        environments = [
            {
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_SECONDS),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
            }
            for slot in plan
        ]
        order: dict[str, Any] = {"name": name, "size": size, "timeout": timeout, "environment": environments}
        order["never_ends"] = never_ends
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("RESULT "):
                results: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT "))
                return results
        raise AssertionError("the ranks' parent has ended")

    def close(self) -> None:
        self._process.communicate(timeout=30)
        self._server.stop()
        self._server._httpd.server_close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    pytest.importorskip("horovod.torch")
    world = World(SCRIPTS / "fault_ranks.py", tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def tf_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    pytest.importorskip("horovod.tensorflow")
    world = World(SCRIPTS / "tf_fault_ranks.py", tmp_path_factory.mktemp("tf_world"))
    yield world
    world.close()


# a rank dies or stalls: the others end with Horovod's error, and none hangs


KILLED = pytest.mark.parametrize(
    ("name", "where", "size"),
    [
        ("killed_in_warm_up", "1 of warm-up", 2),
        ("killed_at_the_freeze", "3 of warm-up", 2),
        ("killed_mid_exchange", "5 of compression", 3),
    ],
)


@KILLED
def test_a_rank_is_killed(world: World, name: str, where: str, size: int) -> None:
    results = world.run(name, size=size)
    assert results[1]["status"] == -signal.SIGKILL
    for rank in range(0, size, 2):
        assert results[rank]["status"] == 0, results[rank]
        assert results[rank]["said"].startswith(f"HorovodInternalError in step {where}: "), results[rank]


@KILLED
def test_a_rank_of_keras_is_killed(tf_world: World, name: str, where: str, size: int) -> None:
    """Under model.fit."""
    results = tf_world.run(name, size=size)
    assert results[1]["status"] == -signal.SIGKILL
    for rank in range(0, size, 2):
        assert results[rank]["status"] == 0, results[rank]
        assert re.match(rf"\w+Error in step {where}: ", results[rank]["said"]), results[rank]
        assert "Horovod" in results[rank]["said"], results[rank]


def test_a_rank_that_stands_still_for_a_while_is_waited_for(world: World) -> None:
    for result in world.run("stopped_for_a_while"):
        assert (result["status"], result["said"]) == (0, "waited, and went on")


def test_a_rank_that_stands_still_for_good_is_given_up(world: World) -> None:
    results = world.run("stopped_for_good", size=3, never_ends=(1,))
    assert results[1]["status"] is None, "it stood still until it was ended"
    for rank in (0, 2):
        assert results[rank]["said"].startswith("HorovodInternalError in step 5"), results[rank]


# a rank stands still while its Horovod thread lives


@pytest.mark.parametrize(
    ("name", "size", "where"),
    [
        ("asleep_in_warm_up", 3, r"in step 2 at '(agreement.digest|the gradient of p\d)'"),
        ("asleep_before_a_group", 2, "in step 2 at 'the gradients of the group of p1'"),
        ("asleep_mid_exchange", 3, "in step 6 at 'group0.step3.cpu.0.allgather'"),
    ],
)
def test_a_rank_that_sleeps_for_ever_ends_the_wait_of_the_others(
    world: World, name: str, size: int, where: str
) -> None:
    results = world.run(name, size=size, never_ends=(1,))
    assert results[1]["status"] is None, "it slept until it was ended"
    said = {rank: results[rank]["said"] for rank in range(0, size, 2)}
    for rank, each in said.items():
        assert results[rank]["status"] == 0, each
        # Horovod's own error on one that began to wait later, since the first has ended by now
        assert re.match(f"(hvd_onebit: )?rank {rank} (has|had) waited [012] s for other ranks {where}", each), each
    assert any("raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in each for each in said.values())


def test_a_long_wait_without_a_limit_is_told_and_goes_on(world: World) -> None:
    results = world.run("late_for_a_second")
    assert [result["status"] for result in results] == [0, 0], results
    assert "rank 0 has waited 1 s for other ranks in step 6" in results[0]["said"]
    assert results[1]["said"] == ""


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_under_horovodrun_the_run_ends_and_says_what_was_waited_for(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(f"horovod.{framework}")
    completed = run_horovod(
        TESTS / "scripts" / "stalled_rank.py",
        2,
        framework,
        cwd=tmp_path,
        timeout=150.0,
        env={"PYTHONPATH": str(TESTS)},
        # ranks of a busy machine start seconds apart
        options=("--stall-check-warning-time-seconds", "2", "--stall-check-shutdown-time-seconds", "12"),
    )
    assert not completed.timed_out, completed.output
    assert completed.returncode != 0
    assert "asleep" in completed.ranks[1]
    assert re.search(r"rank 0 ha[sd] waited 1[0-4] s for other ranks in step 4", completed.ranks[0]), completed.output
    assert re.search(r"Missing ranks:\s+\S*\s*1: \[\S*agreement\.digest", completed.ranks[0]), completed.output
    assert "not reached" not in completed.output


# memory and disk


def test_no_memory_at_the_freeze_on_one_rank_is_the_same_error_on_all(world: World) -> None:
    results = world.run("no_memory_at_the_freeze_on_one_rank", size=3)
    assert [result["status"] for result in results] == [0, 0, 0], results
    said = {result["said"] for result in results}
    assert len(said) == 1
    assert "(rank 1: MemoryError: injected)" in said.pop()


def test_no_memory_at_the_freeze_on_one_rank_of_keras(tf_world: World) -> None:
    """Under model.fit; it goes on, and so does what was saved then."""
    results = tf_world.run("no_memory_at_the_freeze_on_one_rank", size=3)
    assert [result["status"] for result in results] == [0, 0, 0], results
    said = {result["said"] for result in results}
    assert len(said) == 1
    assert "(rank 1: MemoryError: injected)" in said.pop()


def test_a_rank_that_gets_no_memory_from_the_system_at_the_freeze_is_the_same_error_on_all(world: World) -> None:
    """And the state of the warm-up can be saved, on that rank too."""
    results = world.run("too_little_memory_at_the_freeze_on_one_rank")
    assert [result["status"] for result in results] == [0, 0], results
    said = {result["said"] for result in results}
    assert len(said) == 1
    assert re.search(r"the variance could not be frozen on some rank.*\(rank 1: \w*Error: .*alloc", said.pop())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_costs_the_new_checkpoint_only(world: World) -> None:
    for result in world.run("full_disk"):
        assert result["status"] == 0, result
        assert "No space left on device: the checkpoint was not saved" in result["said"]


@pytest.mark.parametrize("name", ["world", "tf_world"])
def test_ranks_leave_nothing_behind(name: str, request: pytest.FixtureRequest) -> None:
    """Stopped ranks included."""
    world: World = request.getfixturevalue(name)
    running = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != world.pid:
            try:
                if str(world.script).encode() in (entry / "cmdline").read_bytes():
                    running.append(entry.name)
            except OSError:
                continue
    assert not running


# a file is the old or the new


def _content(number: int) -> bytes:
    return bytes([number % 256]) * 200_000


WRITER = """
import sys
from hvd_onebit.checkpoint import save_atomically
print("ready", flush=True)
number = 0
while True:
    number += 1
    def write(file):
        for _ in range(20):
            file.write(bytes([number % 256]) * 10_000)
    save_atomically(write, sys.argv[1])
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_while_it_saves_leaves_the_old_file_or_the_new(
    tmp_path: Path, signum: signal.Signals
) -> None:
    path = tmp_path / "checkpoint"
    save_atomically(lambda file: file.write(_content(0)), path)
    for round_number in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + 0.0037 * round_number)
        process.send_signal(signum)
        assert process.wait(timeout=20) == -signum
        process.stdout.close()
        data = path.read_bytes()
        assert data == _content(data[0]), "half of one, half of another"
        assert {each.name for each in tmp_path.iterdir()} <= {"checkpoint", "checkpoint.partial"}
    save_atomically(lambda file: file.write(_content(1)), path)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"], "the next save clears up"


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_run_that_dies_at_any_moment_before_the_rename_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "checkpoint"
    save_atomically(lambda file: file.write(_content(7)), path)
    script = f"""
import os, signal, sys
from hvd_onebit import checkpoint
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} != "write": setattr(os, {moment!r}, die)
def write(file):
    file.write(b"half")
    if {moment!r} == "write": die()
checkpoint.save_atomically(write, sys.argv[1])
"""
    completed = subprocess.run([sys.executable, "-c", script, str(path)], timeout=30)
    assert completed.returncode == -signal.SIGKILL
    assert path.read_bytes() == _content(7)


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_atomically(lambda file: file.write(b"old"), path)

    def write(file: Any) -> None:
        file.write(b"half")
        raise ZeroDivisionError("the user's own fault")

    with pytest.raises(ZeroDivisionError):
        save_atomically(write, path)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_that_the_system_does_not_let_grow_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_atomically(lambda file: file.write(b"old"), path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint was not saved") as caught:
            save_atomically(lambda file: file.write(_content(1)), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file or directory.*nowhere"):
        save_atomically(lambda file: None, tmp_path / "nowhere" / "checkpoint")
