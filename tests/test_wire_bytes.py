"""Bytes counted by the network interface itself, in both frameworks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import run_horovod

TESTS = Path(__file__).parent


def _own_network() -> tuple[str, ...] | None:
    """A command that runs others in a network namespace of their own, where no one else's bytes are counted."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return None
    prefix = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if tried.returncode == 0 else None


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_the_wire_carries_one_bit_an_element(tmp_path: Path, framework: str, size: int) -> None:
    """Counted by the interface itself: no full-precision gradient moves after the freeze."""
    prefix = _own_network()
    if prefix is None:
        pytest.skip("needs unshare -n (root) and ip: on a shared loopback others' bytes would be counted")
    run_horovod(
        TESTS / "scripts" / f"{framework}_bytes.py",
        size,
        str(tmp_path),
        timeout=150,
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "HOROVOD_CYCLE_TIME": "20"},  # milliseconds: less chatter to tell apart
        prefix=prefix,
    ).check()
    found = json.loads((tmp_path / "bytes.json").read_text(encoding="utf-8"))
    d = found["num_elements"]
    expected = size * 2 * (size - 1) / size * (d / 8 + 4 * d / 2048)
    assert found["stage"] == "compression"
    assert found["stats_per_step"] * size == pytest.approx(expected, rel=0.01)
    # Horovod chatters less while it works than while it waits, so the idle bytes are the most that is its own
    counted, idle = found["counted_per_step"], found["idle_per_step"]
    assert counted - idle <= 1.03 * expected, found
    assert counted >= 0.97 * expected, found
    assert idle < 0.1 * expected, "too much chatter to prove anything"
    assert found["warm_up"] >= 2 * (size - 1) * 4 * d
