"""What every test shares: one thread a rank, and nothing written outside tmp_path."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HVD_ONEBIT_REQUIRE_NATIVE", "1")
