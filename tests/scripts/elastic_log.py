"""What the elastic trainings of both frameworks write down, and how they change the hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["change_hosts", "write_note"]


def write_note(folder: Path, kind: str, state: Any, hvd: Any, *, parameters: list[float], owes: list[float]) -> None:
    """Adds a line to this process's own file in `folder`."""
    stats = state.optimizer.stats
    line = {
        "kind": kind,
        "step": state.step,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "stage": stats.stage,
        "frozen_step": stats.frozen_step,
        "parameters": parameters,
        "owes": owes,
        "bytes": stats.bytes_per_step["compression"],
    }
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def change_hosts(folder: Path, names: str) -> None:
    """Has the discovery script find the hosts of `names`, which commas part, from now on."""
    new = folder / "hosts.new"
    new.write_text("".join(f"{name}:1\n" for name in names.split(",")), encoding="utf-8")
    new.rename(folder / "hosts")
