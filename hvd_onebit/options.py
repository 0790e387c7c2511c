"""What a user may choose about compression: one frozen dataclass, checked once, the same in every framework."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = [
    "AUTO",
    "MEASURED",
    "CompressionOptions",
    "is_full_precision",
    "local_steps_options",
    "options_from",
    "patterns_without_match",
    "refuse_for_local_steps",
]

AUTO = "auto"
MEASURED = "measured"
_BUCKETS_OF_A_MODEL = 12
_LEAST_AUTO, _MOST_AUTO, _STEP_AUTO = 1 << 22, 1 << 23, 1 << 16

_CHOICES = {
    "exchange": (AUTO, "one_shot", "two_phase", MEASURED),
    "scale": ("rms", "mean"),
    "space": ("momentum", "update"),
    "dead": ("floor", "hold"),
}

_OPTIMIZERS_OWN = ("lr", "learning_rate", "betas", "beta_1", "beta_2", "momentum", "eps", "epsilon", "weight_decay")
_OF_THE_OPTIMIZER = "an optimizer's own argument goes to the optimizer that is wrapped, by the name that it has there; "
_ALL_OPTIONS = "docs/guide.md, Options, and help(hvd_onebit.options.CompressionOptions) list all"


@dataclass(frozen=True)
class CompressionOptions:
    """How gradients travel once the variance is frozen.

    Attributes:
        freeze_step: number of full-precision updates (T_w) before the variance is frozen and compression starts, or
            "auto" for the 1-bit Adam paper's rule (see `schedule.py`).
        freeze_latest_step: with "auto", freeze at this step at the latest; None: wait for the rule.
        freeze_threshold: with "auto", the ratio of the variance's 1-norms that counts as settled.
        exchange: "one_shot" (every rank gathers every message), "two_phase" (chunks are averaged by the rank that owns
            them), or "auto": one_shot for two ranks, where it costs the same bytes and half the latency, two_phase for
            more. "measured": what is expected to be faster by what is measured in the warm-up (see `probe.py`). The two
            round differently, and a measurement has noise: for runs that can be repeated bit for bit name one, or
            leave it at "auto".
        hierarchical: True averages in full precision inside each host first, so that a host sends its gradients once,
            compressed, and not once a rank; "auto" does so on several hosts that have the same number of ranks, four
            or more (see `hosts.py`).
        scale: "rms" (||z||_2/sqrt(d), the 1-bit Adam paper) or "mean" (||z||_1/d, the 0/1 Adam paper).
        block: elements that share one scale, or "tensor" for one scale a tensor.
        space: "momentum" sends the momentum, as the papers do; "update" sends it divided by the root of the frozen
            variance, so that all coordinates have comparable magnitude (Adam and LAMB).
        dead: "floor" lifts the frozen variance to `variance_floor` times its tensor's mean; "hold" keeps coordinates
            whose variance is zero exactly where they are, and lifts the others.
        variance_floor: the floor's height, relative to the mean of the tensor's variance; 0 for none.
        error_feedback: False drops the compression error at every step: for experiments only, it converges worse.
        full_precision: names (or shell patterns such as "*.bias") of parameters that are never compressed.
        min_elements: tensors with fewer elements stay in full precision.
        overlap: start a bucket's exchange as soon as backward has filled it. Gradients must then not be changed between
            backward and synchronize(), as in Horovod.
        bucket_elements: a bucket holds whole tensors of about this many elements together. "auto": a twelfth of what
            is compressed, from 2**22 to 2**23; "measured": from 2**20 to 2**24, chosen as with `exchange`. It decides
            which elements share a block, and so changes roundings, too.
        skip_nonfinite: skip a step, on all ranks together, when a gradient somewhere is NaN or infinite.
        max_skipped_steps: that many skipped steps in a row end the run with an error.
        local_clip_norm: before anything is sent, in every stage, each rank scales its own gradient down so that its
            2-norm over all parameters is at most this; None: no such clipping.
        measure: measure the network and the kernels once in a run, for half a second (see `probe.py`), and say whether
            compression pays.
        check_every: compare a checksum of the received bytes across ranks every this many steps; 0: never.
    """

    freeze_step: int | str = AUTO
    freeze_latest_step: int | None = None
    freeze_threshold: float = 0.96
    exchange: str = AUTO
    hierarchical: bool | str = AUTO
    scale: str = "rms"
    block: int | str = 2048
    space: str = "momentum"
    dead: str = "floor"
    variance_floor: float = 0.01
    error_feedback: bool = True
    full_precision: tuple[str, ...] = ()
    min_elements: int = 0
    overlap: bool = True
    bucket_elements: int | str = AUTO
    skip_nonfinite: bool = True
    max_skipped_steps: int = 25
    local_clip_norm: float | None = None
    measure: bool = True
    check_every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.full_precision, str):
            raise TypeError(
                f"full_precision takes a list of parameter names or patterns, not the single string "
                f"{self.full_precision!r}; write [{self.full_precision!r}]"
            )
        object.__setattr__(self, "full_precision", tuple(self.full_precision))
        for name in self.full_precision:
            if not isinstance(name, str):
                raise TypeError(f"full_precision takes parameter names or patterns, not {name!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        if not isinstance(self.hierarchical, bool) and self.hierarchical != AUTO:
            raise ValueError(f'hierarchical must be True, False or "auto", not {self.hierarchical!r}')
        if self.freeze_step != AUTO:
            _check_int("freeze_step", self.freeze_step, 0, '(or "auto")')
            if self.freeze_latest_step is not None:
                raise ValueError(
                    'freeze_latest_step goes with freeze_step="auto"; a number freezes at that step anyway'
                )
        if self.block != "tensor":
            _check_int("block", self.block, 1, '(or "tensor")')
        if self.freeze_latest_step is not None:
            _check_int("freeze_latest_step", self.freeze_latest_step, 1)
        if self.bucket_elements not in (AUTO, MEASURED):
            _check_int("bucket_elements", self.bucket_elements, 1, '(or "auto" or "measured")')
        if self.is_open and (self.freeze_step == 0 or not self.measure):
            missing = "a warm-up to measure in: use a freeze_step of at least 1" if self.measure else "measure=True"
            raise ValueError(
                f'exchange="measured" and bucket_elements="measured" need {missing}, or name what is to be used'
            )
        for name, least in (("min_elements", 0), ("max_skipped_steps", 1), ("check_every", 0)):
            _check_int(name, getattr(self, name), least)
        for name in ("variance_floor", "freeze_threshold", "local_clip_norm"):
            value = getattr(self, name)
            if name == "local_clip_norm" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if self.local_clip_norm is not None and not 0.0 < self.local_clip_norm < math.inf:
            raise ValueError(f"local_clip_norm must be positive and finite, not {self.local_clip_norm!r}")
        if not 0.0 <= self.variance_floor < 1.0:
            raise ValueError(
                f"variance_floor is a fraction of the mean variance in [0, 1), not {self.variance_floor!r}"
            )
        if not 0.0 < self.freeze_threshold <= 1.0:
            raise ValueError(f"freeze_threshold must be in (0, 1], not {self.freeze_threshold!r}")

    def algorithm(self, size: int) -> str:
        """The exchange used among `size` ranks."""
        if self.exchange in (AUTO, MEASURED):
            return "one_shot" if size <= 2 else "two_phase"
        return self.exchange

    @property
    def is_open(self) -> bool:
        """Whether a measurement has something to choose."""
        return MEASURED in (self.exchange, self.bucket_elements)

    def bucket_size(self, num_elements: int) -> int:
        """Elements of a bucket among `num_elements` that are compressed together."""
        if isinstance(self.bucket_elements, int):
            return self.bucket_elements
        wanted = _STEP_AUTO * math.ceil(num_elements / _BUCKETS_OF_A_MODEL / _STEP_AUTO)
        return min(max(wanted, _LEAST_AUTO), _MOST_AUTO)

    def unmeasured(self, size: int) -> CompressionOptions:
        """What is used among `size` ranks where nothing was measured."""
        exchange = self.algorithm(size) if self.exchange == MEASURED else self.exchange
        bucket_elements = AUTO if self.bucket_elements == MEASURED else self.bucket_elements
        return replace(self, exchange=exchange, bucket_elements=bucket_elements)

    def with_choice(self, choice: Mapping[str, Any], size: int) -> CompressionOptions:
        """What is used among `size` ranks, given what a measurement has chosen.

        Args:
            choice: what `choice_of` returned, perhaps on other ranks; empty: nothing was chosen.
            size: ranks that exchange bits with each other.
        """
        used = self.unmeasured(size)
        if choice and self.exchange == MEASURED and choice["size"] == size:
            used = replace(used, exchange=choice["exchange"])
        if choice and self.bucket_elements == MEASURED:
            used = replace(used, bucket_elements=choice["bucket_elements"])
        return used

    def choice_of(self, size: int) -> dict[str, Any]:
        """These options, chosen by a measurement among `size` ranks, as plain JSON values."""
        return {"size": size, "exchange": self.algorithm(size), "bucket_elements": self.bucket_elements}

    def as_fields(self) -> dict[str, Any]:
        """The options as plain JSON values, for comparison across ranks."""
        return {**asdict(self), "full_precision": list(self.full_precision)}


def _check_int(name: str, value: object, least: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer {also}".rstrip() + f", not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def options_from(given: Mapping[str, Any]) -> CompressionOptions:
    """CompressionOptions from keyword arguments; an unknown name is refused with the nearest known one.

    Raises:
        TypeError: an option that does not exist, or of the wrong type.
        ValueError: a value out of range.
    """
    known = [field.name for field in fields(CompressionOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else _OF_THE_OPTIMIZER if name in _OPTIMIZERS_OWN else ""
            raise TypeError(f"unknown option {name!r}; {hint}{_ALL_OPTIONS}")
    return CompressionOptions(**given)


def local_steps_options(
    given: Mapping[str, Any],
    *,
    var_freeze_step: int | str,
    var_update_scaler: int,
    local_step_scaler: int | None,
    local_step_clipper: int,
) -> CompressionOptions:
    """The options of 0/1 Adam, whose variance is frozen at `var_freeze_step`; its own numbers are checked.

    Raises:
        TypeError: an option that does not exist or that 0/1 Adam lacks.
        ValueError: a value out of range.
    """
    refuse_for_local_steps(given)
    for name, value in (
        ("var_update_scaler", var_update_scaler),
        ("local_step_scaler", 1 if local_step_scaler is None else local_step_scaler),
        ("local_step_clipper", local_step_clipper),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
    return options_from({"freeze_step": var_freeze_step, **given})


def refuse_for_local_steps(given: Mapping[str, Any]) -> None:
    """Raises for what 0/1 Adam lacks, since it has no warm-up."""
    if "freeze_step" in given:
        raise TypeError("0/1 Adam compresses from the first step on: it has var_freeze_step, not freeze_step")
    for name in ("exchange", "bucket_elements"):
        if given.get(name) == MEASURED:
            raise ValueError(
                f"0/1 Adam compresses from the first step on, so there is no warm-up to measure in: name the {name} "
                "that is to be used"
            )


def patterns_without_match(names: Sequence[str], options: CompressionOptions) -> list[tuple[str, str | None]]:
    """Entries of full_precision that no parameter matches, each with the nearest name."""
    unmatched = [pattern for pattern in options.full_precision if not fnmatch.filter(names, pattern)]
    return [(pattern, next(iter(difflib.get_close_matches(pattern, names, n=1)), None)) for pattern in unmatched]


def is_full_precision(name: str, num_elements: int, options: CompressionOptions, *, num_bytes: int = 4) -> bool:
    """True when this parameter is kept out of compression for ever.

    By the user's options, or since it is float64: what is compressed is updated in float32, and whoever chose more
    wants to keep it.

    Args:
        name: of the parameter.
        num_elements: that it has.
        options: the user's.
        num_bytes: of one element.
    """
    if num_elements < max(options.min_elements, 1) or num_bytes > 4:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in options.full_precision)
