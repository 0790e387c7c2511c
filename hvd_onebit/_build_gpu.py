"""What a build of Horovod for NCCL needs beside the rest: a CUDA compiler, and NCCL's header and library.

Looked for in the places that Horovod's own variables name, then in CUDA's and torch's wheels, then in the system.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvd_onebit._processes import which

__all__ = ["Nccl", "find_nccl", "without_cuda"]

_MIN_NCCL_MAJOR = 2
_LIBRARIES = ("libnccl.so", "libnccl.so.2")  # NVIDIA's wheels hold the second alone
_SYSTEM_PREFIXES = ("/usr/local/cuda", "/usr/local", "/usr")


@dataclasses.dataclass(frozen=True)
class Nccl:
    """NCCL and the CUDA toolkit to build with.

    Attributes:
        version: NCCL's, as its header says.
        header: nccl.h.
        library: libnccl.so or libnccl.so.2.
        cuda_home: folder that holds bin/nvcc.
        cuda_version: nvcc's.
    """

    version: str
    header: Path
    library: Path
    cuda_home: Path
    cuda_version: str


def without_cuda(frameworks: Iterable[str], environment: Mapping[str, str], cwd: Path) -> list[str]:
    """Returns which of the frameworks are builds for CPUs alone."""
    built = {
        "torch": "import torch; print('cuda', torch.version.cuda is not None)",
        "tensorflow": "import tensorflow as tf; print('cuda', bool(tf.sysconfig.get_build_info()['is_cuda_build']))",
    }
    quiet = dict(environment) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    return [
        name
        for name in frameworks
        if "cuda True" not in _output([sys.executable, "-c", built[name]], quiet, cwd).splitlines()
    ]


def find_nccl(environment: Mapping[str, str], for_cpus: Sequence[str] = ()) -> Nccl | list[str]:
    """Returns what to build with, or one line for each thing that is missing, with the remedy.

    Args:
        environment: variables that name folders, and PATH.
        for_cpus: frameworks to build for that cannot use GPUs, see `without_cuda`.
    """
    problems = []
    for framework in for_cpus:
        problems.append(
            f"{framework} is a build for CPUs, with which Horovod for NCCL does not compile or load. Install a CUDA "
            f"build, or uninstall {framework}, or leave --gpu out"
        )

    cuda_home = next(_cuda_homes(environment), None)
    cuda_version = None if cuda_home is None else _nvcc_version(cuda_home, environment)
    if cuda_home is None:
        named = environment.get("HOROVOD_CUDA_HOME")
        where = f"{named}, which HOROVOD_CUDA_HOME names, has no bin/nvcc" if named else "no CUDA compiler (nvcc)"
        problems.append(
            f"{where}. Install the CUDA toolkit of the version that your framework was built for and set "
            "HOROVOD_CUDA_HOME to its folder; Debian, Ubuntu: apt-get install nvidia-cuda-toolkit; conda: conda "
            "install cuda-nvcc; for CUDA 13: pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl "
            "nvidia-cuda-runtime nvidia-nvvm (the nvidia-cuda-nvcc-cu12 package holds no nvcc)"
        )
    elif not any(_files([cuda_home / name for name in _library_names()], ("libcudart.so",))):
        problems.append(
            f"CUDA's run-time library libcudart.so is missing below {cuda_home}. Install the toolkit's development "
            "files; where NVIDIA's Python packages left lib/libcudart.so.13 alone, link it: ln -s libcudart.so.13 "
            f"{cuda_home / 'lib' / 'libcudart.so'}"
        )
    if cuda_home is not None and cuda_version is None:
        problems.append(f"{cuda_home / 'bin' / 'nvcc'} does not run, or does not tell its version: repair the toolkit")

    major = "12" if cuda_version is None else cuda_version.split(".")[0]
    remedy = (
        f"pip install nvidia-nccl-cu{major} (CUDA builds of torch bring it along); Debian, Ubuntu: apt-get install "
        "libnccl2 libnccl-dev; conda: conda install nccl; or set HOROVOD_NCCL_HOME to the folder that holds "
        "include/nccl.h and lib/libnccl.so"
    )
    header = next(_files(_header_folders(environment), ("nccl.h",)), None)
    library = next(_files(_library_folders(environment, header), _LIBRARIES), None)
    version = None if header is None else _nccl_version(header)
    if header is None:
        problems.append(f"NCCL's header nccl.h is missing. {remedy}")
    elif version is None or int(version.split(".")[0]) < _MIN_NCCL_MAJOR:
        problems.append(f"{header} is of NCCL {version or 'without a version'}; 2 or later is needed. {remedy}")
    if library is None:
        problems.append(f"NCCL's library libnccl.so is missing. {remedy}")

    if problems:
        return problems
    assert cuda_home is not None
    assert cuda_version is not None
    assert header is not None
    assert library is not None
    assert version is not None
    return Nccl(version, header, library, cuda_home, cuda_version)


def _cuda_homes(environment: Mapping[str, str]) -> Iterator[Path]:
    """Folders with bin/nvcc, the best first; what HOROVOD_CUDA_HOME names is the only one."""
    nvcc = which("nvcc", environment)
    folders: list[str | Path | None] = [environment.get("HOROVOD_CUDA_HOME")]
    if not folders[0]:
        folders = [environment.get("CUDA_HOME"), None if nvcc is None else nvcc.resolve().parent.parent]
        folders += [*_wheel_folders("cu*"), *_SYSTEM_PREFIXES]
    for folder in folders:
        if folder and (Path(folder) / "bin" / "nvcc").is_file():
            yield Path(folder)


def _header_folders(environment: Mapping[str, str]) -> list[Path]:
    if environment.get("HOROVOD_NCCL_INCLUDE"):
        return [Path(environment["HOROVOD_NCCL_INCLUDE"])]
    return [prefix / "include" for prefix in _nccl_prefixes(environment)]


def _library_folders(environment: Mapping[str, str], header: Path | None) -> list[Path]:
    """Folders to look for the library in: the header's own prefix first, so that the two belong together."""
    if environment.get("HOROVOD_NCCL_LIB"):
        return [Path(environment["HOROVOD_NCCL_LIB"])]
    prefixes = _nccl_prefixes(environment)
    if header is not None and header.parent.parent in prefixes:
        prefixes.insert(0, header.parent.parent)
    return [prefix / name for prefix in prefixes for name in _library_names()]


def _library_names() -> list[str]:
    """Names of folders with libraries below a prefix."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    return ["lib", "lib64", *([f"lib/{multiarch}"] if multiarch else [])]


def _nccl_prefixes(environment: Mapping[str, str]) -> list[Path]:
    """Where NCCL may lie: torch's own first, as it is the one that a process with torch has loaded already."""
    named = environment.get("HOROVOD_NCCL_HOME")
    if named:
        return [Path(named)]
    return [*_wheel_folders("nccl"), *_cuda_homes(environment), *map(Path, _SYSTEM_PREFIXES)]


def _wheel_folders(pattern: str) -> list[Path]:
    """Folders that NVIDIA's Python packages have put into this environment."""
    return sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob(pattern), reverse=True)


def _files(folders: list[Path], names: tuple[str, ...]) -> Iterator[Path]:
    return (folder / name for folder in folders for name in names if (folder / name).is_file())


def _nvcc_version(cuda_home: Path, environment: Mapping[str, str]) -> str | None:
    match = re.search(r"release (\d+(?:\.\d+)*)", _output([cuda_home / "bin" / "nvcc", "--version"], environment))
    return None if match is None else match.group(1)


def _output(command: Sequence[str | Path], environment: Mapping[str, str], cwd: Path | None = None) -> str:
    """What the command prints, or "" if it fails."""
    try:
        return subprocess.run(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nccl_version(header: Path) -> str | None:
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = [
        re.search(rf"^\s*#\s*define\s+NCCL_{name}\s+(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(part.group(1) for part in parts if part is not None) or None
