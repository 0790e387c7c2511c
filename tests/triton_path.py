"""Where Triton is, for tests that run it in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

__all__ = ["with_triton"]


def with_triton() -> dict[str, str]:
    """The environment of a process that can import Triton; skips the test where there is none.

    `make test` puts it into a folder that is on nobody's path: torch imports Triton wherever it finds it, and in a
    process that has imported TensorFlow that aborts.
    """
    folder = Path(sys.prefix) / "triton"
    if folder.is_dir():
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": path}
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: make test installs it; or pip install -r requirements-triton.txt")
    return dict(os.environ)
