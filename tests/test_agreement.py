"""Ranks that disagree all raise the same error, which names the ranks and the field."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_onebit.agreement import Agreement, check_fields, digest, encode_fields
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport, run_ranks

Fields = dict[str, Any]


def errors_of(all_fields: list[Fields]) -> list[str | None]:
    """What each rank raised when it compared its fields with the others'."""

    def work(transport: LocalTransport) -> str | None:
        fields = all_fields[transport.rank]
        agreement = Agreement(transport, "agreement")
        agreement.start(digest(fields))
        try:
            agreement.finish(lambda: fields)
        except OneBitError as error:
            return str(error)
        return None

    return run_ranks(len(all_fields), work, timeout_seconds=10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_fields_pass(size: int) -> None:
    assert errors_of([{"a": 1, "b": [1.5, "x"]} for _ in range(size)]) == [None] * size


@pytest.mark.parametrize(
    ("all_fields", "says"),
    [
        ([{"a": 1}, {"a": 2}], ["a: rank 0: 1; rank 1: 2"]),
        ([{"a": 1}, {"a": 1}, {"a": 2}], ["a: rank 0,1: 1; rank 2: 2"]),
        ([{"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 3}], ["a: rank 0,2: 2; rank 1: 1", "b: rank 0,1: 1"]),
        ([{"a": 1, "b": 2}, {"a": 1}], ["b: rank 0: 2; rank 1: null"]),
        ([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.10000000000000002}], ["lr: rank 0,1: 0.1; rank 2: 0.10000000000000002"]),
        ([{"p": "x" * 400}, {"p": "x" * 399 + "y"}], ["p: rank 0: ", "... ("]),
    ],
)  # fmt: skip
def test_every_rank_raises_the_same_text(all_fields: list[Fields], says: list[str]) -> None:
    errors = errors_of(all_fields)
    assert errors[0] is not None
    assert len(set(errors)) == 1
    for text in says:
        assert text in errors[0]
    assert "Give every rank the same options" in errors[0], "the remedy"


MODEL, OPTIONS, START = "Build the same model", "Give every rank the same options", "broadcast them from one rank"
STEPS, DRIFT, VERSION = "Restore the same checkpoint: on all", "have drifted apart", "Install the same version"
RANKS = "Start all ranks with one command"


@pytest.mark.parametrize(
    ("differ", "step", "remedies"),
    [
        (["version of hvd_onebit"], 0, [VERSION]),
        (["world size"], 0, [RANKS]),
        (["hosts of the hierarchical exchange"], 0, [RANKS]),
        (["number of parameters", "parameter 3", "checksum of the parameters"], 0, [MODEL]),
        (["optimizer"], 0, [MODEL]),
        (["parameters that are trained"], 5, [MODEL]),
        (["variables that are not trained"], 5, [MODEL]),
        (["option block"], 0, [OPTIONS]),
        (["lr of group 0"], 7, [OPTIONS]),
        (["lr"], 7, [OPTIONS]),
        (["betas of group 1", "version of hvd_onebit"], 7, [VERSION, OPTIONS]),
        (["checksum of the parameters"], 0, [START]),
        (["checksum of the parameters"], 1, [START]),
        (["checksum of the parameters", "lr"], 0, [OPTIONS, START]),
        (["checksum of the parameters"], 9, [DRIFT]),
        (["checksum of the averaged momentum"], 9, [DRIFT]),
        (["stage", "checksum of the parameters"], 9, [STEPS]),
        (["group 0 frozen at step 3, first parameter"], 9, [STEPS]),
        (["frozen at steps"], 9, [STEPS]),
        (["first steps"], 9, [STEPS]),
        (["measured bucket_elements"], 9, [STEPS]),
    ],
)
def test_the_remedy_is_that_of_what_differs(differ: list[str], step: int, remedies: list[str]) -> None:
    fields = [{"step": step, **dict.fromkeys(differ, rank)} for rank in range(2)]
    error = errors_of(fields)[0]
    assert error is not None
    assert [each for each in (VERSION, RANKS, MODEL, OPTIONS, STEPS, DRIFT, START) if each in error] == remedies


def test_ranks_at_different_steps_are_told_to_restore_the_same_checkpoint() -> None:
    error = errors_of([{"step": 0, "checksum of the parameters": 5}, {"step": 40}])[0]
    assert error is not None
    assert STEPS in error
    assert DRIFT not in error
    assert START not in error


def test_fields_that_agree_are_not_named() -> None:
    error = errors_of([{"agreed": 1, "a": 1}, {"agreed": 1, "a": 2}])[0]
    assert error is not None
    assert "agreed" not in error


def test_the_order_of_fields_does_not_matter() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len(digest({})) == len(digest({"a": "x" * 10_000}))


def test_the_check_is_made_anew_each_step() -> None:
    def work(transport: LocalTransport) -> int:
        agreement = Agreement(transport, "agreement")
        for step in range(5):
            fields = {"step": step if step < 3 or transport.rank == 0 else step + 1}
            agreement.start(digest(fields))
            try:
                agreement.finish(lambda fields=fields: fields)  # type: ignore[misc]
            except OneBitError:
                return step
        return -1

    assert run_ranks(2, work, timeout_seconds=10) == [3, 3]


def test_check_fields_passes_what_is_equal() -> None:
    check_fields([encode_fields({"a": 1})] * 3)
