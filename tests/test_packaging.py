"""What gets installed: built from the sdist, in fresh environments, seen from an empty folder."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "mpi4py")


def run(*command: object, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HVD_ONEBIT_NATIVE")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def assert_ok(result: "subprocess.CompletedProcess[str]") -> str:
    assert result.returncode == 0, result.stdout
    return result.stdout


def build(source: Path, kind: str, destination: Path, **variables: str) -> Path:
    """Builds an sdist or a wheel through the standard hooks, without network, and returns it."""
    destination.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    assert_ok(run(sys.executable, "-c", code, destination, cwd=source, **variables))
    (built,) = destination.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without anything that was built in it."""
    tree = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for folder in ("hvd_onebit", "torch_impl", "tf_impl"):
        if (REPOSITORY / folder).is_dir():
            shutil.copytree(REPOSITORY / folder, tree / folder, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, so that a file missing there is missed here."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return build(tree, "wheel", folder / "dist", HVD_ONEBIT_REQUIRE_NATIVE="1")


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment that sees this one's packages, but not its installation of hvd_onebit."""
    assert_ok(run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent))
    python = folder / "bin" / "python"
    purelib = assert_ok(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder.parent))
    # Path files in a folder that a path file names are not read: an editable installation there stays unseen.
    Path(purelib.strip(), "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose environment holds the wheel."""
    python = make_environment(tmp_path_factory.mktemp("wheel") / "env")
    pip = [sys.executable, "-m", "pip", "--python", python]
    assert_ok(run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=wheel.parent))
    return python


def test_sdist_holds_the_c_sources(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {f"hvd_onebit/csrc/{name}" for name in ("onebit.c", "onebit.h", "module.c")} <= names
    assert {"LICENSE", "torch_impl/__init__.py", "hvd_onebit/py.typed"} <= names


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(metadata_name).decode()
    modules = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {"hvd_onebit/py.typed", f"hvd_onebit/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"}
    for folder, package in (
        ("hvd_onebit", "hvd_onebit"),
        ("hvd_onebit/transport", "hvd_onebit/transport"),
        ("torch_impl", "hvd_onebit/torch"),
        ("tf_impl", "hvd_onebit/tensorflow"),
    ):
        expected |= {f"{package}/{path.name}" for path in (source / folder).glob("*.py")}
    assert modules == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    fields, _, description = metadata.partition("\n\n")
    required = [line for line in fields.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [line.split(":")[1].split(">")[0].strip() for line in required] == ["numpy"]
    extras = {line.split(": ")[1] for line in fields.splitlines() if line.startswith("Provides-Extra:")}
    assert extras == {"torch", "triton", "tensorflow", "mpi", "horovod", "demo", "dev"}
    readme = source / "README.md"
    if readme.is_file():
        assert description.strip() == readme.read_text(encoding="utf-8").strip(), "pyproject.toml names no readme"


def test_wheel_works_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    code = "import hvd_onebit, hvd_onebit._kernels; print(hvd_onebit.__file__, hvd_onebit.__version__)"
    file, version = assert_ok(run(python, "-c", code, cwd=tmp_path)).split()
    assert Path(file).is_relative_to(python.parent.parent)
    assert assert_ok(run(python.parent / "hvd-onebit", "--version", cwd=tmp_path)).split() == ["hvd-onebit", version]


def test_core_imports_no_framework(python: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, json, pkgutil, sys
import hvd_onebit, hvd_onebit.transport
def modules(package, excluded):
    found = pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    return [module.name for module in found if module.name.rpartition(".")[2] not in excluded]
names = modules(hvd_onebit, ("torch", "tensorflow")) + modules(hvd_onebit.transport, ("mpi",))
for name in names:
    importlib.import_module(name)
print(json.dumps([names, [name for name in {FRAMEWORKS!r} if name in sys.modules]]))
"""
    imported, frameworks = json.loads(assert_ok(run(python, "-c", code, cwd=tmp_path)))
    assert {"hvd_onebit.__main__", "hvd_onebit.doctor", "hvd_onebit.horovod_build"} <= set(imported)
    assert frameworks == []


LOCATE = "import hvd_onebit, importlib.util as u; print(u.find_spec('hvd_onebit.torch').origin)"


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "horovod")), reason="needs PyTorch and Horovod"
)
def test_torch_layer_imports_from_the_wheel(python: Path, tmp_path: Path) -> None:
    located = Path(assert_ok(run(python, "-c", f"{LOCATE}; import hvd_onebit.torch", cwd=tmp_path)).strip())
    assert located.is_relative_to(python.parent.parent)
    assert located.parent.parts[-2:] == ("hvd_onebit", "torch")


def test_editable_installation_maps_the_layers(source: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(source, tmp_path / "tree")
    python = make_environment(tmp_path / "env")
    pip = [sys.executable, "-m", "pip", "--python", python]
    arguments = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--editable", tree]
    assert_ok(run(*pip, "install", *arguments, cwd=tmp_path, HVD_ONEBIT_REQUIRE_NATIVE="1"))
    code = f"{LOCATE}; from hvd_onebit import _kernels; print(hvd_onebit.__file__)"
    located = [Path(line) for line in assert_ok(run(python, "-c", code, cwd=tmp_path)).splitlines()]
    assert located == [tree / "torch_impl" / "__init__.py", tree / "hvd_onebit" / "__init__.py"]
    # From the tree itself, where the core is found as a plain folder, as under `python -m` and pytest.
    assert assert_ok(run(python, "-c", LOCATE, cwd=tree)).strip() == str(located[0])


def test_failed_kernel_build_falls_back_unless_forbidden(source: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(source, tmp_path / "tree")
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, tmp_path / "dist"]
    refused = run(*command, cwd=tree, CC="false", HVD_ONEBIT_REQUIRE_NATIVE="1")
    assert refused.returncode != 0
    assert "the C kernels of hvd_onebit were not built" in assert_ok(
        run(*command, cwd=tree, CC="false", HVD_ONEBIT_REQUIRE_NATIVE="0")
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
