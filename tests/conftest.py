"""What every test shares: one thread a rank."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when a framework is imported
