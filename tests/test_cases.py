"""CASES.md names tests that exist, for every case and both frameworks, or says that one is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUM_CASES = 29
ROWS = {
    int(cells[0]): cells[1:]
    for line in (ROOT / "CASES.md").read_text(encoding="utf-8").splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and cells[0].isdigit()
}


@cache
def _functions(file: str) -> frozenset[str]:
    """What a test run runs of a file: in scripts of checks, what is marked as one."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if file.endswith("_checks.py"):
        functions = [each for each in functions if "check" in map(ast.unparse, each.decorator_list)]
    return frozenset(each.name for each in functions)


def test_every_case_has_a_row() -> None:
    assert list(ROWS) == list(range(1, NUM_CASES + 1))


@pytest.mark.parametrize("number", ROWS)
def test_what_a_case_names_exists(number: int) -> None:
    promise, core, *frameworks = ROWS[number]
    assert promise.endswith(".")
    assert len(frameworks) == 2
    assert all(frameworks), "an empty cell: name a test, or say that it is missing"
    for quoted in re.findall(r"`([^`]*)`", " ".join([core, *frameworks])):
        file, _, function = quoted.partition("::")
        assert (ROOT / file).is_file(), quoted
        assert function in _functions(file), quoted
        assert function.startswith("test_") or file.startswith("tests/scripts/"), quoted
