"""What the commands' arguments may be."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from hvd_onebit._arguments import as_count, as_rate, as_seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("25_000_000", 25_000_000),
        ("25M", 25_000_000),
        ("1.5B", 1_500_000_000),
        ("1.5G", 1_500_000_000),
        (" 7 k", 7000),
        ("25e6", 25_000_000),
        ("0.001k", 1),
    ],
)
def test_counts_as_people_write_them(text: str, number: int) -> None:
    assert as_count(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "0.0001k", "many", "M", "nan", "inf", "1e99", "1 2", "0x10"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a whole number of at least 1, got '{text}'"):
        as_count(text)


@pytest.mark.parametrize(
    ("parse", "text"), [(as_seconds, "-1"), (as_seconds, "inf"), (as_seconds, "x"), (as_rate, "x")]
)
def test_seconds_and_rates_are_checked(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
        parse(text)
