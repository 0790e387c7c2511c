"""The kernel benchmark runs, reports what it promises, and says on what it was measured. No test looks at a time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import numpy as np
import pytest
from triton_path import with_triton

from hvd_onebit import bench, bench_device, kernels

KERNELS = ["compress", "compress, momentum", "reduce, 8 ranks", "average, 2 ranks", "apply, 2 ranks"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-elements", "5000", "--repeats", "2", "--block", "100", "--threads", "3", "--json"]
    assert run("kernels", *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    found = [(each["kernel"], each["threads"]) for each in report["timings"]]
    assert found == [(name, threads) for threads in (1, 3) for name in ["memcpy", "triad", *KERNELS]][:7] + [
        (name, 3) for name in ["triad", *KERNELS]
    ]
    assert [each["kernel"] for each in report["numpy_timings"]] == ["memcpy", "triad", *KERNELS]
    for each in report["timings"] + report["numpy_timings"]:
        assert min(each["seconds"], each["num_bytes"], each["triad_share"], each["speed_up"]) > 0
        if each["kernel"] == "triad":
            assert each["triad_share"] == 1
    num_bytes = {each["kernel"]: each["num_bytes"] for each in report["timings"]}
    message = 5000 // 8 + 4 * 50
    assert num_bytes["memcpy"] == 40_000
    assert num_bytes["triad"] == 60_000
    assert num_bytes["compress"] == 60_000 + message
    assert num_bytes["compress, momentum"] == 80_000 + message
    assert num_bytes["reduce, 8 ranks"] == 40_000 + 9 * message
    assert num_bytes["average, 2 ranks"] == 20_000 + 2 * message
    assert num_bytes["apply, 2 ranks"] == 80_000 + 2 * message
    assert report["num_elements"] == report["numpy_num_elements"] == 5000
    assert report["block"] == 100
    assert report["repeats"] == 2
    assert report["machine"]["kernels"] == list(kernels.implementations())[-1]
    assert report["machine"]["numpy"] == np.__version__
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu"]


def test_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", "--num-elements", "3000", "--repeats", "1", "--threads", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"NumPy {np.__version__}")
    assert lines[1].startswith("3000 float32 elements in blocks of 2048")
    assert "scaled" not in "".join(lines)
    assert lines[2].split() == ["kernel", "threads", "ms", "GB/s", "of", "triad", "x", "1", "thread"]
    names = ["memcpy", "triad", *KERNELS, "triad", *KERNELS]
    names += [f"NumPy {name}" for name in ["memcpy", "triad", *KERNELS]]
    assert [line.rsplit(maxsplit=5)[0] for line in lines[3:]] == names
    assert lines[4].split()[-2:] == ["1.00", "1.00"]


def test_one_thread_is_timed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", "--num-elements", "100", "--repeats", "1", "--threads", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["kernel"] for each in report["timings"]] == ["memcpy", "triad", *KERNELS]


def test_shares_and_speed_ups_are_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("triad", 1): 3.0, ("triad", 2): 2.0, ("compress, momentum", 1): 8.0, ("compress, momentum", 2): 5.0}
    monkeypatch.setattr(
        bench, "_interleaved_medians", lambda tasks, repeats: {key: seconds.get(key[1:], 1.0) for key in tasks}
    )
    report = bench.bench_kernels(2048 * 100, repeats=1, threads=2)
    one, two = (each for each in report.timings if each.kernel == "compress, momentum")
    work = (16 + 1 / 8 + 4 / 2048) / 12
    assert one.triad_share == pytest.approx(work * 3 / 8)
    assert two.triad_share == pytest.approx(work * 2 / 5)
    assert (one.speed_up, two.speed_up) == (1.0, 1.6)


def test_fallback_is_measured_on_fewer_elements_and_scaled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_NUMPY_NUM_ELEMENTS", 1000)
    monkeypatch.setattr(bench, "_interleaved_medians", lambda tasks, repeats: dict.fromkeys(tasks, 2.0))
    report = bench.bench_kernels(5000, repeats=1)
    assert report.numpy_num_elements == 1000
    assert {each.seconds for each in report.timings} == {2.0}
    assert {each.seconds for each in report.numpy_timings} == {10.0}
    assert run("kernels", "--num-elements", "5000", "--repeats", "1") == 0
    assert "NumPy fallback: measured on 1000 elements and scaled up" in capsys.readouterr().out


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_gets_a_table_even_without_rich(
    has_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("kernels", "--num-elements", "100", "--repeats", "1") == 0
    out = capsys.readouterr().out
    assert "reduce, 8 ranks" in out
    assert ("┃" in out) == has_rich


def test_rounds_are_interleaved_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = iter([0, 100, 0, 100, 0, 1, 0, 2, 0, 3, 0, 5, 0, 1, 0, 9])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    tasks = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    assert bench._interleaved_medians(tasks, 3) == {"a": 1, "b": 5}
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize("option", ["--num-elements", "--repeats", "--block", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_counts_that_make_no_sense_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run("kernels", option, value)
    assert refused.value.code == 2
    assert f"expected a whole number of at least 1, got '{value}'" in capsys.readouterr().err


def test_a_benchmark_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run()
    assert refused.value.code == 2
    assert "BENCHMARK" in capsys.readouterr().err


def test_no_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0, 9 and 1"):
        bench.bench_kernels(0)


def test_a_device_that_is_not_there_is_said() -> None:
    torch = pytest.importorskip("torch")
    environment = with_triton()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    # in a process of its own: Triton and TensorFlow in one abort it
    command = [sys.executable, "-m", "hvd_onebit", "bench", "kernels", "--device", "cuda"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 1
    expected = "hvd-onebit: cuda cannot be measured: torch finds no GPU (torch.cuda.is_available() is False)\n"
    assert found.stderr == expected


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("differing", [(), ("reduce, 9 elements",)])
def test_a_device_with_other_bits_is_a_failure(
    as_json: bool, differing: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (
        bench_device.KernelTime("copy", 1e-3, 8 * 10**6, 1.0),
        bench_device.KernelTime("apply", 1e-3, 10**6, 0.125),
    )
    report = bench_device.DeviceReport("a GPU", "2", "3.9", "avx2", 100, 8, 1, 8, 20, differing, times)
    monkeypatch.setattr(bench_device, "bench_device", lambda *_, **__: report)
    assert run("kernels", "--device", "cuda:1", *(["--json"] if as_json else [])) == len(differing)
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["differing"] == list(differing)
        return
    assert f"{20 - len(differing)} of 20 checks gave the host's bits" in out
    assert ("NOT the host's bits: reduce, 9 elements" in out) == bool(differing)
    assert out.splitlines()[-1].split() == ["apply", "1.000", "1.0", "0.12"]
