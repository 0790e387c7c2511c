"""Options are checked once, at construction, with an error that says what to do."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hvd_onebit.options import CompressionOptions, is_full_precision, options_from


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"freeze_steps": 5}, TypeError, "'freeze_step'"),
        ({"bucket_element": 5}, TypeError, "'bucket_elements'"),
        ({"qqqqqqqq": 5}, TypeError, r"help\(hvd_onebit.options.CompressionOptions\) list all"),
        ({"lr": 0.1}, TypeError, "'lr'; an optimizer's own argument goes to the optimizer"),
        ({"freeze_step": 2.0}, TypeError, "freeze_step must be an integer"),
        ({"freeze_step": True}, TypeError, "freeze_step must be an integer"),
        ({"freeze_step": "soon"}, TypeError, '"auto"'),
        ({"freeze_step": -1}, ValueError, "at least 0, not -1"),
        ({"freeze_latest_step": 0}, ValueError, "freeze_latest_step"),
        ({"freeze_threshold": 0.0}, ValueError, "freeze_threshold"),
        ({"freeze_threshold": 1.5}, ValueError, "freeze_threshold"),
        ({"exchange": "ring"}, ValueError, "'two_phase'"),
        ({"scale": "max"}, ValueError, "'rms', 'mean'"),
        ({"block": 0}, ValueError, "block"),
        ({"block": "layer"}, TypeError, '"tensor"'),
        ({"block": 1.5}, TypeError, "block"),
        ({"dead": "drop"}, ValueError, "'floor', 'hold'"),
        ({"variance_floor": 1.0}, ValueError, "variance_floor"),
        ({"variance_floor": -0.1}, ValueError, "variance_floor"),
        ({"variance_floor": float("nan")}, ValueError, "variance_floor"),
        ({"freeze_threshold": float("nan")}, ValueError, "freeze_threshold"),
        ({"full_precision": "*.bias"}, TypeError, "\\['\\*.bias'\\]"),
        ({"min_elements": -1}, ValueError, "min_elements"),
        ({"bucket_elements": 0}, ValueError, "bucket_elements"),
        ({"max_skipped_steps": 0}, ValueError, "max_skipped_steps"),
        ({"check_every": -1}, ValueError, "check_every"),
        ({"full_precision": [3]}, TypeError, "full_precision"),
        ({"local_clip_norm": 0.0}, ValueError, "local_clip_norm must be positive"),
        ({"local_clip_norm": float("inf")}, ValueError, "local_clip_norm must be positive"),
        ({"local_clip_norm": "1"}, TypeError, "local_clip_norm must be a number"),
    ],
)
def test_bad_options_are_refused_with_the_reason(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        options_from(given)


def test_good_options_are_kept() -> None:
    options = options_from(
        {
            "freeze_step": "auto",
            "block": "tensor",
            "full_precision": ["*.bias"],
            "freeze_latest_step": 9,
            "check_every": 0,
        }
    )
    assert (options.freeze_step, options.block, options.full_precision) == ("auto", "tensor", ("*.bias",))
    assert options_from({}) == CompressionOptions()


@pytest.mark.parametrize(
    ("num_elements", "size"),
    [(1, 2**22), (2**22 * 12, 2**22), (2**22 * 12 + 1, 2**22 + 2**16), (10**8, 2**23), (10**9, 2**23)],
)
def test_buckets_grow_with_the_model(num_elements: int, size: int) -> None:
    assert CompressionOptions().bucket_size(num_elements) == size
    assert CompressionOptions(bucket_elements=7).bucket_size(num_elements) == 7


@pytest.mark.parametrize(
    ("exchange", "size", "algorithm"),
    [("auto", 1, "one_shot"), ("auto", 2, "one_shot"), ("auto", 3, "two_phase"), ("one_shot", 5, "one_shot"),
     ("two_phase", 2, "two_phase")],
)  # fmt: skip
def test_auto_takes_one_shot_up_to_two_ranks(exchange: str, size: int, algorithm: str) -> None:
    assert CompressionOptions(exchange=exchange).algorithm(size) == algorithm


def test_fields_survive_json_and_name_every_option() -> None:
    options = CompressionOptions(full_precision=("a", "b"))
    fields = options.as_fields()
    assert json.loads(json.dumps(fields)) == fields
    assert set(fields) == {field.name for field in dataclasses.fields(CompressionOptions)}


@pytest.mark.parametrize(
    ("name", "num_elements", "full"),
    [("head.bias", 5, True), ("head.weight", 5, True), ("head.weight", 10, False), ("Head.bias", 10, False),
     ("embed", 10, True), ("embed.weight", 10, False), ("empty", 0, True)],
)  # fmt: skip
def test_full_precision_by_name_pattern_and_size(name: str, num_elements: int, full: bool) -> None:
    options = CompressionOptions(full_precision=("head.*ias", "embed"), min_elements=10)
    assert is_full_precision(name, num_elements, options) is full
