"""The Triton kernels without a GPU: interpreted, against the core's kernels; and compiled, for what a GPU would run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_path import with_triton

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"


def assert_passes(script: str, **variables: str) -> None:
    """All checks of `script` pass, in a pytest of their own."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SCRIPTS / script)],
        cwd=SCRIPTS.parent.parent,
        env=with_triton() | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"^\d\d+ passed", result.stdout, re.MULTILINE), result.stdout


def test_interpreted_they_give_the_bits_of_the_cores_kernels() -> None:
    assert_passes("triton_checks.py", TRITON_INTERPRET="1")


def test_compiled_they_round_every_operation(tmp_path: Path) -> None:
    assert_passes("triton_compiled_checks.py", TRITON_CACHE_DIR=str(tmp_path))
