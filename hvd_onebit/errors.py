"""The one exception type for a run gone wrong."""

from __future__ import annotations

__all__ = ["OneBitError"]


class OneBitError(RuntimeError):
    """Training cannot go on as asked: ranks disagree, state does not fit, too many steps in a row were skipped."""
