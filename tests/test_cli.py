"""The command line: help, refusals with the nearest name, doctor, and a bench that is imported only when asked for."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from triton_path import with_triton

import hvd_onebit
from hvd_onebit import doctor, horovod_build
from hvd_onebit.__main__ import main


def run_cli(*arguments: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hvd_onebit", *arguments],
        cwd=cwd,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(autouse=True)
def _no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a parser lets through by mistake must not touch the environment that the tests run in."""

    def refuse(**_: object) -> None:
        raise AssertionError("install-horovod must not run here")

    monkeypatch.setattr(horovod_build, "install", refuse)


def assert_exits(arguments: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert_exits(["--help"], 0)
    output = capsys.readouterr().out
    for command in ("install-horovod", "doctor", "bench"):
        assert command in output


@pytest.mark.parametrize("command", ["install-horovod", "doctor"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_exits([command, "--help"], 0)
    assert f"usage: hvd-onebit {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert_exits(["--version"], 0)
    assert capsys.readouterr().out == f"hvd-onebit {hvd_onebit.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["docter"], "did you mean doctor?"),
        (["install_horovod"], "did you mean install-horovod?"),
        (["doctor", "--jsn"], "unknown argument: --jsn; did you mean --json?"),
        (["install-horovod", "--rebiuld"], "did you mean --rebuild?"),
        (["install-horovod", "--job=3"], "did you mean --jobs?"),
        (["--versoin", "doctor"], "did you mean --version?"),
    ],
)
def test_unknown_name_gets_the_nearest(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_exits(arguments, 2)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["doctor", "--entirely-different"], "unknown argument: --entirely-different\n"),
        (["install-horovod", "--jobs", "0"], "expected a whole number of at least 1, got '0'"),
        (["install-horovod", "--jobs", "many"], "expected a whole number of at least 1, got 'many'"),
        (["install-horovod", "--build-dir", "/no/such/folder"], "expected an existing folder"),
        (["install-horovod", "--gpu", "ncll"], "did you mean nccl?"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_exits(arguments, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "with_nccl"), [([], False), (["--gpu", "nccl"], True)])
def test_a_build_for_gpus_must_be_asked_for(
    arguments: list[str], with_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(horovod_build, "install", seen.update)
    assert main(["install-horovod", *arguments]) == 0
    assert seen["with_nccl"] is with_nccl


def test_bench_is_imported_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import sys, hvd_onebit.__main__ as m; m._parser().parse_args(['doctor']); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'hvd_onebit.__main__'" in result.stdout
    assert "'hvd_onebit.bench'" not in result.stdout

    bench = types.ModuleType("hvd_onebit.bench")
    seen: list[int] = []
    bench.add_arguments = lambda parser: parser.add_argument("--size", type=int)  # type: ignore[attr-defined]
    bench.main = lambda args: seen.append(args.size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hvd_onebit.bench", bench)
    assert main(["bench", "--size", "3"]) == 0
    assert seen == [3]


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
def test_doctor_finds_a_working_installation(tmp_path: Path) -> None:
    result = run_cli("doctor", "--json", cwd=tmp_path)
    report = json.loads(result.stdout)
    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert (result.returncode, report["ok"]) == (0, True), result.stdout
    for framework in ("torch", "tensorflow"):
        if importlib.util.find_spec(framework) is not None:
            assert "gloo" in findings[f"horovod.{framework}"]["details"]["built_with"]
    assert findings["threads"]["details"]["usable_cpus"] >= 1


def test_doctor_reports_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')", encoding="utf-8")
    # A crash in place of an exception, as a library built for other versions gives.
    (tmp_path / "tensorflow.py").write_text("import os; os.abort()", encoding="utf-8")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no libmpi')", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = run_cli("doctor", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert "! torch       ImportError: broken on purpose" in lines
    assert any(line.startswith("! tensorflow  ended with status -6") for line in lines)
    assert any("remedy: repair or uninstall torch" in line for line in lines)
    assert any(line.startswith("- mpi4py") for line in lines)
    assert lines[-2].startswith("Lines marked - ")
    assert lines[-1].startswith("Something that is needed does not work")


def test_doctor_speaks_to_people() -> None:
    found = {
        "horovod.torch": {"version": "0.28.1", "built_with": ["gloo", "mpi"]},
        "kernels": {"native": True},
        "threads": {"OMP_NUM_THREADS": 1},
    }
    lines = doctor.Report(tuple(doctor.Finding(*each) for each in found.items())).to_text().splitlines()
    assert lines[:2] == ["  horovod.torch  0.28.1, built with gloo and mpi", "  kernels        compiled C"]
    assert lines[2].split() == ["threads", "OMP_NUM_THREADS", "1"]
    assert lines[-1] == "All that is needed works. To start two ranks: horovodrun --gloo -np 2 python train.py"


def test_doctor_does_not_take_a_busy_machine_for_a_broken_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_SECONDS", 0.01)
    _, error = doctor._probe("import time; time.sleep(60)", os.environ)
    findings = doctor._framework_findings({}, {"torch": error, "tensorflow": "No module named 'tensorflow'"})
    assert (findings[0].problem, findings[0].remedy) == (
        "no answer within 0.01 s",
        "try again when the machine is less busy",
    )


def test_doctor_names_the_remedy_for_what_is_absent() -> None:
    errors = {name: f"ModuleNotFoundError: No module named '{name}'" for name in ("torch", "tensorflow")}
    findings = doctor._framework_findings({}, errors)
    assert [(finding.topic, finding.needed) for finding in findings] == [("torch", True), ("tensorflow", True)]
    assert findings[0].remedy == "pip install torch, then hvd-onebit install-horovod"

    found = {"torch": {"version": "2.13.0"}}
    errors["torch"] = "ModuleNotFoundError: No module named 'horovod'"
    findings = doctor._framework_findings(found, errors)
    assert [(finding.topic, finding.needed) for finding in findings] == [
        ("torch", False),
        ("horovod.torch", True),
        ("tensorflow", False),
    ]
    assert findings[1].remedy == "hvd-onebit install-horovod"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {"used": "Triton", "since": None}),
        ({"HVD_ONEBIT_TRITON": "0"}, {"used": "torch operations", "since": "HVD_ONEBIT_TRITON=0"}),
    ],
)
def test_doctor_says_which_kernels_a_gpu_gets(variables: dict[str, str], found: dict[str, str]) -> None:
    pytest.importorskip("torch")
    environment = with_triton() | variables
    pretend = "import torch; torch.version.cuda = '13.0'; torch.version.hip = None\n"
    reported, _ = doctor._probe(pretend + doctor._PROBES["torch"], environment)
    assert {"topic": "gpu kernels", **found} in reported


def test_doctor_misses_nccl_where_torch_can_use_gpus() -> None:
    def found(cuda: str | None, *built_with: str) -> doctor.Finding:
        topics = {"torch": {"cuda": cuda}, "horovod.torch": {"built_with": list(built_with)}}
        return doctor._framework_findings(topics, {"torch": "", "tensorflow": "No module named 'tensorflow'"})[1]

    missed = found("13.0", "gloo", "mpi")
    assert missed.remedy == "hvd-onebit install-horovod --gpu nccl"
    assert not missed.needed
    assert found(None, "gloo").problem is found("13.0", "gloo", "nccl").problem is None
