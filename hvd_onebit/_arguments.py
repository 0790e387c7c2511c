"""What the commands' arguments may be: numbers as people write them, seconds, rates."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

from hvd_onebit.netlab import Rate, parse_rate

__all__ = ["as_count", "as_rate", "as_seconds"]

_THOUSANDS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3}


def as_count(text: str) -> int:
    """A whole number of at least 1: "25000000", "25_000_000", "25M", "1.5B", "25e6"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d)?)\s*([kmgb]?)", text.strip().replace("_", "").lower())
    number = Decimal(match[1]) * 1000 ** _THOUSANDS[match[2]] if match else Decimal(0)
    if number < 1 or number % 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(number)


def as_seconds(text: str) -> float:
    """A time of at least 0, and of an end."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def as_rate(text: str) -> Rate:
    """A link's rate."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
