"""The kernel benchmark runs, reports what it promises, and says on what it was measured. No test looks at a time."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest

from hvd_onebit import bench, kernels

SECONDS = ["memcpy_seconds", "compress_seconds", "reduce_seconds", "apply_seconds"]
NUMPY_SECONDS = ["numpy_compress_seconds", "numpy_reduce_seconds", "numpy_apply_seconds"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", "--num-elements", "5000", "--repeats", "2", "--block", "100", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    for name in SECONDS + NUMPY_SECONDS:
        assert report[name] > 0
    assert report["num_elements"] == report["numpy_num_elements"] == 5000
    assert report["block"] == 100
    assert report["repeats"] == 2
    assert report["machine"]["kernels"] == list(kernels.implementations())[-1]
    assert report["machine"]["numpy"] == np.__version__
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu"]


def test_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", "--num-elements", "3000", "--repeats", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"NumPy {np.__version__}")
    assert lines[1].startswith("3000 float32 elements in blocks of 2048")
    assert "scaled" not in "".join(lines)
    assert lines[2].split() == ["kernel", "seconds", "GB/s", "x", "memcpy"]
    names = ["memcpy", "compress", "reduce, 8 ranks", "apply"]
    names += ["NumPy compress", "NumPy reduce, 8 ranks", "NumPy apply"]
    assert [line.rsplit(maxsplit=3)[0] for line in lines[3:]] == names
    assert lines[3].split()[-1] == "1.00"


def test_fallback_is_measured_on_fewer_elements_and_scaled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_NUMPY_NUM_ELEMENTS", 1000)
    monkeypatch.setattr(bench, "_interleaved_medians", lambda tasks, repeats: dict.fromkeys(tasks, 2.0))
    report = bench.bench_kernels(5000, repeats=1)
    assert report.numpy_num_elements == 1000
    assert {getattr(report, name) for name in SECONDS} == {2.0}
    assert {getattr(report, name) for name in NUMPY_SECONDS} == {10.0}
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


@pytest.mark.parametrize("option", ["--num-elements", "--repeats", "--block"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_counts_that_make_no_sense_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run("kernels", option, value)
    assert refused.value.code == 2
    assert f"expected an integer of at least 1, got '{value}'" in capsys.readouterr().err


def test_a_benchmark_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run()
    assert refused.value.code == 2
    assert "BENCHMARK" in capsys.readouterr().err


def test_no_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0 and 9"):
        bench.bench_kernels(0)
