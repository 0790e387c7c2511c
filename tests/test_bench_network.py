"""The network benchmark runs across hosts, reports what it promises and leaves nothing. No test looks at a time."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from launch import interruptible

from hvd_onebit import bench, bench_network, netlab
from hvd_onebit._bench_network_worker import EXCHANGE_METHODS, HIERARCHICAL, LOOP_METHODS, Observed, Task
from hvd_onebit._processes import CommandError
from hvd_onebit.netlab import UNSHAPED, parse_rate

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
WHY_NOT = netlab.why_impossible() or (f"not installed: {', '.join(MISSING)}" if MISSING else None)
needs_network = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TASK = Task(1000, 2, 400, "auto", 2000, 0.0, ("exchange", "loop"))


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(["network", *arguments]))


def observed(factor: float = 1.0, *, sent: int = 250) -> dict[str, Observed]:
    """What a rank might have seen: Horovod's float32 takes 4 and 6 seconds, others less, in proportion to `factor`."""
    exchange = {"horovod_float32": [4.0, 6.0], "horovod_float16": [8.0, 12.0], "onebit": [0.5 * factor, 1.5 * factor]}
    loop = {method: [1.0, 3.0] for method in LOOP_METHODS} | {
        "horovod_float32": [4.0, 4.0],
        "onebit": [2.0, 2.0 * factor],
    }
    split = {"onebit": {"compress": [0.25, 0.75], "wait": [0.25, 0.25]}}
    return {
        "exchange": Observed(exchange, {method: [sent, sent] for method in exchange}, split, 1000),
        "loop": Observed(loop, {method: [sent, sent] for method in loop}, {}, 2000, 5),
    }


def assert_nothing_left(pid: int) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"hvdlab-{pid}-" not in listed
    for folder in (Path("/etc/netns"), Path(tempfile.gettempdir())):
        assert list(folder.glob(f"hvdlab-{pid}-*")) == []


# across hosts


@needs_network
@pytest.mark.timeout(240)
def test_it_measures_across_the_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    size = ["--num-elements", "50000", "--bucket-elements", "30000", "--model-elements", "20000"]
    status = run(*size, "--repeats", "1", "--step-seconds", "0", "--json", str(figures), "--out", str(tmp_path / "out"))
    assert status == 0, (tmp_path / "out" / "network.log").read_text()[-5000:]
    report = json.loads(figures.read_text())
    assert (report["hosts"], report["ranks_per_host"], report["repeats"]) == (2, 1, 1)
    assert (report["exchange"], report["bucket_elements"]) == ("one_shot", 30000)
    (rate,) = report["rates"]
    assert (rate["rate"], rate["bits_per_second"], rate["num_elements"]) == ("1gbit", 1e9, 50000)
    assert rate["horovod_float32_bytes_on_link"] > 4 * 50000
    assert rate["horovod_float16_bytes_on_link"] > 2 * 50000
    assert 50000 / 8 < rate["onebit_bytes_on_link"] < 2 * 50000
    for method in EXCHANGE_METHODS:
        assert (rate[f"{method}_seconds"] or 0) > 0 or method == HIERARCHICAL
    assert rate["onebit_hierarchical_seconds"] is None
    assert set(rate["onebit_split"]) == {"compress", "wait", "reduce", "decode", "other"}
    assert rate["onebit_split"]["compress"] > 0
    assert rate["onebit_split"]["reduce"] == 0
    loop = rate["loop"]
    assert 16000 < loop["model_elements"] < 24000
    assert set(loop["samples_per_second"]) == set(loop["bytes_on_link"]) == {*LOOP_METHODS} - {HIERARCHICAL}
    assert loop["bytes_on_link"]["horovod_float32"] > 4 * loop["model_elements"]
    assert loop["bytes_on_link"]["onebit"] < 2 * loop["model_elements"]
    printed = capsys.readouterr().out
    for title in ("Horovod float32", "1-bit, overlap", "no communication", "link busy"):
        assert title in printed
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "network.png").read_bytes().startswith(b"\x89PNG")
    assert_nothing_left(os.getpid())


@needs_network
def test_interrupting_it_leaves_nothing() -> None:
    command = [sys.executable, "-m", "hvd_onebit", "bench", "network", "--what", "exchange"]
    owner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=interruptible)
    launched = _wait_for_launch(owner)
    owner.send_signal(signal.SIGINT)
    assert owner.wait(timeout=60) == 130
    assert_nothing_left(owner.pid)
    assert [pid for pid in launched if Path(f"/proc/{pid}").exists()] == []


def _wait_for_launch(owner: subprocess.Popen[bytes]) -> list[int]:
    """The processes on the first host, once there are any."""
    for _ in range(600):
        for namespace in Path("/run/netns").glob(f"hvdlab-{owner.pid}-*-host0"):
            listed = subprocess.run(
                ["ip", "netns", "pids", namespace.name], capture_output=True, text=True, check=False
            )
            if listed.stdout:
                return [int(pid) for pid in listed.stdout.split()]
        assert owner.poll() is None
        time.sleep(0.05)
    raise AssertionError("nothing was ever launched")


# without hosts


def test_figures_are_medians_of_the_slowest_rank() -> None:
    report = bench_network._report(parse_rate("1mbit"), TASK, [observed(sent=1000), observed(2.0)])
    assert report.exchange_seconds["onebit"] == [1.0, 3.0]
    assert (report.horovod_float32_seconds, report.horovod_float16_seconds, report.onebit_seconds) == (5.0, 10.0, 2.0)
    assert report.onebit_split == {"compress": 0.5, "wait": 0.25}
    assert report.onebit_bytes_on_link == report.horovod_float32_bytes_on_link == 1000
    assert report.onebit_link_busy == pytest.approx(8 * 1000 / 1e6 / 2.0)
    assert report.speedup == 2.5
    assert report.loop is not None
    assert (report.loop.model_elements, report.loop.batch) == (2000, 5)
    assert report.loop.samples_per_second["no_communication"] == 2 * 5 / 2.0
    assert report.loop.samples_per_second["onebit"] == 2 * 5 / 3.0
    json.dumps(asdict(report))


def test_the_hierarchical_exchange_has_a_share_of_the_link_of_its_own() -> None:
    seen = [observed(sent=1000), observed(2.0)]
    for rank in seen:
        exchange = rank["exchange"]
        exchange.seconds[HIERARCHICAL], exchange.bytes_sent[HIERARCHICAL] = [4.0, 4.0], [500, 500]
        exchange.split[HIERARCHICAL] = exchange.split["onebit"]
    report = bench_network._report(parse_rate("1mbit"), TASK, seen)
    assert report.onebit_link_busy == pytest.approx(8 * 1000 / 1e6 / 2.0)
    assert report.onebit_hierarchical_link_busy == pytest.approx(8 * 500 / 1e6 / 4.0)


def test_an_unshaped_link_has_no_share_of_time() -> None:
    report = bench_network._report(UNSHAPED, TASK, [observed(), observed()])
    assert report.bits_per_second is None
    assert report.onebit_link_busy is None


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1.0, "1gbit: 1-bit is 5.0 times as fast as Horovod's float32 and 10.0 times as fast as Horovod's float16"),
        (10.0, "1gbit: compression does not pay: it takes 2.00 times as long as Horovod's float32, 5000.0 ms more"),
    ],
)
def test_it_says_whether_an_exchange_pays(factor: float, said: str) -> None:
    report = bench_network._report(parse_rate("1gbit"), TASK, [observed(factor), observed(factor)])
    assert bench_network._exchange_verdict(report) == said


def test_it_says_whether_training_pays() -> None:
    speeds = {"no_communication": 10.0, "horovod_float32": 2.0, "horovod_float16": 4.0, "onebit": 3.0}
    loop = bench_network.LoopReport(1, 1, speeds, {}, {})
    loses = "1gbit: compression does not pay: 1-bit trains at 75 % of the speed of Horovod float16; it reaches 30 % of"
    assert bench_network._loop_verdict("1gbit", loop).startswith(loses)
    speeds["onebit_overlap"] = 8.0
    wins = "1gbit: 1-bit, overlap trains 2.00 times as fast as Horovod float16; it reaches 80 % of"
    assert bench_network._loop_verdict("1gbit", loop).startswith(wins)


def test_the_task_reaches_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text(json.dumps(asdict(TASK)))
    assert Task.load(tmp_path / "task.json") == TASK


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda command: f"/sbin/{command}")
    monkeypatch.setattr(sys, "platform", "linux")
    assert run() == 1
    assert "needs root" in capsys.readouterr().err


def test_a_failed_run_shows_what_the_ranks_said_and_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*args: object, log: Path, **kwargs: object) -> Iterator[bench_network.RateReport]:
        yield bench_network._report(parse_rate("1mbit"), TASK, [observed(), observed()])
        log.write_text("[0]<stderr>:RuntimeError: no luck\n")
        raise CommandError("horovodrun failed with exit status 1", log=log, returncode=1)

    monkeypatch.setattr(bench_network, "bench_network", fail)
    assert run("--json", str(tmp_path / "figures.json")) == 1
    shown = capsys.readouterr()
    assert "horovodrun failed with exit status 1" in shown.err
    assert "[0]<stderr>:RuntimeError: no luck" in shown.err
    assert "1mbit: 1-bit is 5.0 times as fast" in shown.out
    assert [each["rate"] for each in json.loads((tmp_path / "figures.json").read_text())["rates"]] == ["1mbit"]


def test_without_matplotlib_there_is_no_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = bench_network.NetworkReport(bench.this_machine(), 2, 1, 5, 100, "one_shot")
    assert "matplotlib is not installed" in bench_network._plot(report, tmp_path / "network.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "0"], "expected a whole number of at least 1, got '0'"),
        (["--num-elements", "1.5"], "expected a whole number of at least 1, got '1.5'"),
        (["--rate", "fast"], "expected a rate of at least 64kbit"),
        (["--step-seconds", "-1"], "expected a number of at least 0, got '-1'"),
        (["--timeout", "nan"], "expected a number of at least 0, got 'nan'"),
        (["--what", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run(*arguments)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
