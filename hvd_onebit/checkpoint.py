"""Files that are there as a whole or not at all, however a run ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["save_atomically"]


def save_atomically(write: Callable[[BinaryIO], object], path: str | os.PathLike[str]) -> None:
    """Writes a file to the side, flushes it to the disk, and puts it in the place of the old one in a single step.

    Whenever the run is ended, by a signal or with the machine, `path` holds the old content or the new, never half. The
    file to the side is `path` with ".partial" at its end: the next save overwrites what a killed one has left there.
    A path has one writer at a time: give each rank its own, or save on one rank.

    Args:
        write: gets the open file, e.g. lambda file: torch.save(optimizer.state_dict(), file).
        path: in a folder that exists.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the old file is as it was, and so is training.
        Exception: whatever `write` raises, when it is not the disk's fault; the old file is as it was.

    Example:
        >>> save_atomically(lambda file: torch.save(optimizer.state_dict(), file), f"optimizer.{hvd.rank()}.pt")
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            watched = _Watched(file)
            try:
                write(watched)  # type: ignore[arg-type] # a BinaryIO but for its type
            except Exception:
                # serialisers wrap what the disk said in errors of their own
                if watched.failure is not None:
                    raise watched.failure from None
                raise
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: the checkpoint was not saved, and the one that was there is as it was. "
                "Free some space or save elsewhere; training can go on",
                str(target),
            ) from error
        raise
    _flush_folder(target.parent)


class _Watched:
    """A file that keeps the first error of its writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def _flush_folder(folder: Path) -> None:
    """Makes a rename last, where the file system lets a folder be flushed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
