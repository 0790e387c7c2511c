"""The user's cache of built wheels: complete or absent, checked when taken, locked while written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["DamagedWheelError", "cache_root", "cached_wheel", "locked", "sha256", "store_wheel"]


class DamagedWheelError(Exception):
    """The cache holds something else than the wheel that was stored."""


def cache_root() -> Path:
    """Returns the folder where wheels, the source and logs are kept, without making it."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore relative paths.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "hvd-onebit"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cached_wheel(entry: Path) -> Path | None:
    """Returns the wheel in the cache folder `entry`, or None if there is none.

    Raises:
        DamagedWheelError: there is one and it is damaged.
    """
    if not entry.exists():
        return None
    wheels = sorted(entry.glob("*.whl"))
    if len(wheels) != 1:
        raise DamagedWheelError(f"{entry} holds {len(wheels)} wheels instead of one")
    wheel = wheels[0]
    recorded = wheel.with_name(f"{wheel.name}.sha256")
    if not recorded.is_file() or recorded.read_text(encoding="ascii", errors="replace").strip() != sha256(wheel):
        raise DamagedWheelError(f"{wheel} is not what was stored there")
    try:
        with zipfile.ZipFile(wheel) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise DamagedWheelError(f"{wheel} is damaged: {error}") from error
    if damaged is not None:
        raise DamagedWheelError(f"{wheel} is damaged at {damaged}")
    return wheel


def store_wheel(wheel: Path, entry: Path) -> Path:
    """Puts the wheel and its checksum into the cache as the folder `entry`, and returns its path there.

    The folder appears complete or not at all. The caller holds the entry's lock.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".storing-") as temporary:
        staged = Path(temporary, "entry")
        staged.mkdir()
        shutil.copyfile(wheel, staged / wheel.name)
        (staged / f"{wheel.name}.sha256").write_text(f"{sha256(staged / wheel.name)}\n", encoding="ascii")
        if entry.exists():
            entry.rename(Path(temporary, "replaced"))
        staged.rename(entry)
    return entry / wheel.name


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`, which is made if need be.

    The lock ends with its process, however that ends, so the file may stay.

    Args:
        path: file to lock.
        on_wait: called once if another process holds the lock, before waiting for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
