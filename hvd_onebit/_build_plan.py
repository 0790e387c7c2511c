"""All that decides what comes out of the compiler, and so which wheel may be used again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hvd_onebit._build_gpu import Nccl
from hvd_onebit._build_needs import Mpi, version_tuple
from hvd_onebit._horovod_source import HOROVOD_VERSION, Patch, patches

__all__ = ["BuildPlan"]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """All that a Horovod wheel depends on; equal plans can share one wheel.

    Attributes:
        frameworks: name to version of each framework to build for.
        mpi: the MPI to build for, or None for Gloo alone.
        horovod_options: Horovod's own build variables that the user has set, such as HOROVOD_GPU_OPERATIONS.
        python: interpreter and its version, as in "cpython-311".
        platform: system, machine and C library, as in "linux-x86_64-glibc2.36".
        vector_units: the CPU features that Horovod's build would use if present.
        nccl: what to build for GPUs with, or None for CPUs alone.
    """

    frameworks: Mapping[str, str]
    mpi: Mpi | None
    horovod_options: Mapping[str, str]
    python: str
    platform: str
    vector_units: tuple[str, ...]
    nccl: Nccl | None = None

    @classmethod
    def for_this_environment(
        cls, frameworks: Mapping[str, str], mpi: Mpi | None, nccl: Nccl | None = None
    ) -> BuildPlan:
        """Returns the plan for the running interpreter on this machine."""
        return cls(
            frameworks=dict(frameworks),
            mpi=mpi,
            horovod_options={name: os.environ[name] for name in sorted(os.environ) if name.startswith("HOROVOD_")},
            python=sys.implementation.cache_tag,
            platform=f"{sysconfig.get_platform()}-{''.join(platform.libc_ver())}",
            vector_units=_vector_units(),
            nccl=nccl,
        )

    @property
    def cxx_standard(self) -> int:
        """The C++ standard to compile for: PyTorch's headers ask for 20 since 2.13, all else for 17."""
        return 20 if version_tuple(self.frameworks.get("torch", "0")) >= (2, 13) else 17

    @property
    def mpi_library_dir(self) -> Path | None:
        """Where libmpi must be looked up by its full path, or None if a path relative to the module finds it."""
        if self.mpi is None or self.mpi.library_dir is None or self.mpi.library_dir == Path(sys.prefix) / "lib":
            return None
        return self.mpi.library_dir

    @property
    def nccl_rpath(self) -> str | None:
        """Where libnccl is looked up at run time: relative to the module, if it comes from a Python package."""
        if self.nccl is None:
            return None
        folder, packages = self.nccl.library.parent, Path(sysconfig.get_path("purelib"))
        if folder.is_relative_to(packages):
            return f"\\$ORIGIN/../../{folder.relative_to(packages)}"
        return str(folder)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The changes to Horovod's source under this plan."""
        return patches(
            cxx_standard=self.cxx_standard,
            mpi_library_dir=self.mpi_library_dir,
            nccl_rpath=self.nccl_rpath,
        )

    @property
    def key(self) -> str:
        """Name of this plan's folder in the cache: readable, and different whenever anything differs."""
        mpi = "gloo" if self.mpi is None else f"{self.mpi.name}{self.mpi.version}"
        names = [f"{name}{version}" for name, version in self.frameworks.items()]
        gpu = [] if self.nccl is None else [f"nccl{self.nccl.version}", f"cuda{self.nccl.cuda_version}"]
        readable = "-".join([HOROVOD_VERSION, self.python, self.platform, *names, mpi, *gpu]).lower()
        everything = json.dumps(
            [
                readable,
                self.vector_units,
                sorted(self.horovod_options.items()),
                [dataclasses.astuple(patch) for patch in self.patches],
            ]
        )
        digest = hashlib.sha256(everything.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^a-z0-9.+_-]+', '', readable)}-{digest}"

    def describe(self) -> str:
        """Returns one line for people."""
        names = " and ".join(f"{name} {version}" for name, version in self.frameworks.items())
        mpi = "Gloo alone" if self.mpi is None else f"Gloo and {self.mpi.name} {self.mpi.version}"
        gpu = "" if self.nccl is None else f", and NCCL {self.nccl.version} with CUDA {self.nccl.cuda_version}"
        return f"Horovod {HOROVOD_VERSION} for {names}, with {mpi}{gpu}, on {self.python}"

    def build_environment(self, base: Mapping[str, str], temporary: Path, *, jobs: int) -> dict[str, str]:
        """Returns the environment for the compiler run."""
        environment = dict(base)
        for name, variable in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
            environment[f"HOROVOD_WITH{'' if name in self.frameworks else 'OUT'}_{variable}"] = "1"
        environment[f"HOROVOD_WITH{'OUT' if self.mpi is None else ''}_MPI"] = "1"
        environment |= {
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            # Gloo declares itself for a CMake older than what CMake 4 still accepts.
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "CMAKE_GENERATOR": "Unix Makefiles",
            "MAKEFLAGS": f"-j{jobs}",
            "TMPDIR": str(temporary),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self.mpi is not None:
            environment["MPI_HOME"] = str(self.mpi.mpicxx.parent.parent)
        if self.nccl is not None:
            environment |= {
                "HOROVOD_GPU": "CUDA",
                "HOROVOD_GPU_OPERATIONS": "NCCL",
                "HOROVOD_CUDA_HOME": str(self.nccl.cuda_home),
                "CUDA_HOME": str(self.nccl.cuda_home),  # what torch's build helpers go by
                "HOROVOD_NCCL_HOME": str(self.nccl.header.parent.parent),
                "HOROVOD_NCCL_INCLUDE": str(self.nccl.header.parent),
                "HOROVOD_NCCL_LIB": str(_linked(self.nccl.library, temporary)),
                "HOROVOD_NCCL_LINK": "SHARED",  # a second NCCL beside torch's would be one too many
            }
        return environment


def _linked(library: Path, temporary: Path) -> Path:
    """Returns a folder where a linker finds the library by the name that it looks for."""
    if library.name == "libnccl.so":
        return library.parent
    folder = temporary / "nccl"
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(library)
    return folder


def _vector_units() -> tuple[str, ...]:
    """Returns which of the CPU features that Horovod's build looks for this machine has."""
    try:
        cpu = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    except OSError:
        return ()
    return tuple(name for name in ("avx", "f16c", "fma") if name in cpu)
