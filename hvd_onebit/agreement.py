"""Ranks agree, or all ranks raise: what must be equal everywhere is hashed and compared at every step.

A rank that raised alone would leave the others hanging in a collective. So every rank sends a short digest; when they
differ, every rank sends the fields themselves, and all raise the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from hvd_onebit import __version__
from hvd_onebit.errors import FREEZE_FAILED, OneBitError
from hvd_onebit.options import CompressionOptions
from hvd_onebit.transport import Pending, Transport

__all__ = [
    "FAILURE",
    "PARAMETERS",
    "Agreement",
    "check_fields",
    "digest",
    "encode_fields",
    "raise_disagreement",
    "raise_if_any_failed",
    "static_fields",
]

_DIGEST_BYTES = 16

Fields = Mapping[str, Any]


def digest(fields: Fields) -> bytes:
    """A hash of JSON-able fields, equal on two ranks exactly when the fields are."""
    return hashlib.blake2b(encode_fields(fields), digest_size=_DIGEST_BYTES).digest()


def encode_fields(fields: Fields) -> bytes:
    """JSON-able fields as bytes, in one way."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def static_fields(options: CompressionOptions, parameters: Sequence[str], size: int) -> dict[str, Any]:
    """What ranks must have in common and what does not change while they train.

    Args:
        options: what the user chose.
        parameters: name, shape and dtype of each, in order.
        size: number of ranks.
    """
    fields: dict[str, Any] = {"version of hvd_onebit": __version__, "world size": size}
    fields |= {f"option {name}": value for name, value in options.as_fields().items()}
    fields["number of parameters"] = len(parameters)
    return fields | {f"parameter {i}": each for i, each in enumerate(parameters)}


def check_fields(encoded: Sequence[bytes]) -> None:
    """Raises OneBitError, the same text on every rank, when the ranks' fields differ.

    Args:
        encoded: every rank's `encode_fields`, in rank order.
    """
    all_fields = [json.loads(each) for each in encoded]
    differences: dict[str, str] = {}
    for name in sorted({name for fields in all_fields for name in fields}):
        ranks_by_value: defaultdict[str, list[int]] = defaultdict(list)
        for rank, fields in enumerate(all_fields):
            ranks_by_value[_shown(fields.get(name))].append(rank)
        if len(ranks_by_value) > 1:
            views = "; ".join(f"rank {_join(ranks)}: {value}" for value, ranks in ranks_by_value.items())
            differences[name] = f"  {name}: {views}"
    if differences:
        # TensorFlow compares parameters before the second step, as some models are built in the first
        has_started = any(fields.get("step", 0) > 1 for fields in all_fields)
        raise OneBitError(
            "the ranks disagree, so training was stopped on all of them before anything was mixed up:\n"
            + "\n".join(differences.values())
            + f"\n{_remedy(differences, has_started=has_started)} End the process: this step's collectives are still "
            "under way."
        )


PARAMETERS = "checksum of the parameters"
"""The field that tells ranks apart which start from other parameters, where somebody forgot to broadcast them."""

_SAME_VERSION = "Install the same version on every host."
_SAME_RANKS = "Start all ranks with one command."
_SAME_MODEL = "Build the same model and optimizer on every rank, and train the same part of it."
_SAME_OPTIONS = (
    "Give every rank the same options and hyperparameters: a learning rate must not depend on a rank's own loss or "
    "data."
)
_SAME_START = (
    "Start from the same parameters: broadcast them from one rank before the first step, by hvd.broadcast_parameters "
    "or the callback BroadcastGlobalVariablesCallback."
)
_SAME_STEPS = (
    "Restore the same checkpoint: on all ranks, or on one followed by broadcast_optimizer_state. Then take every step "
    "on all ranks."
)
_GOOD_GRADIENTS = (
    "Likely causes: a learning rate too high, bad input data on that rank, or overflow in half precision. Go on from a "
    "checkpoint."
)
_NO_DRIFT = (
    "The ranks have drifted apart: something changes parameters, gradients or state on some of them only. Restore the "
    "same checkpoint on all, and clip or change gradients after synchronize()."
)

# by how a field's name begins; of each remedy that applies the message holds one sentence, in this order
_REMEDIES = {
    _SAME_VERSION: ("version of ",),
    _SAME_RANKS: ("world size", "hosts of "),
    _SAME_MODEL: ("number of parameters", "parameter ", "optimizer", "parameters ", "variables "),
    _SAME_OPTIONS: (),
    _SAME_STEPS: ("step", "stage", "group ", "frozen at ", "first steps", "measured "),
    _GOOD_GRADIENTS: ("gradients were ",),
    _NO_DRIFT: ("checksum ",),
}


def _remedy(names: Iterable[str], *, has_started: bool) -> str:
    """What to do about fields that differ."""
    found = {_remedy_of(name) for name in names}
    if found & {_SAME_MODEL, _SAME_STEPS}:
        found.discard(_NO_DRIFT)  # no wonder
    elif _NO_DRIFT in found and not has_started:
        found = (found - {_NO_DRIFT}) | {_SAME_START}
    return " ".join(remedy for remedy in (*_REMEDIES, _SAME_START) if remedy in found)


def _remedy_of(name: str) -> str:
    return next((remedy for remedy, starts in _REMEDIES.items() if name.startswith(starts)), _SAME_OPTIONS)


FAILURE = "why the variance could not be frozen"
"""The field of a rank that failed at the freeze, where ranks find that out by comparing fields: [rank, reason].

The rank makes digests differ even if all ranks fail for the same reason.
"""


def raise_disagreement(encoded: Sequence[bytes]) -> NoReturn:
    """Raises OneBitError, the same text on every rank, for ranks whose digests differ.

    Args:
        encoded: every rank's `encode_fields`, in rank order.
    """
    _raise_failures([json.loads(each).get(FAILURE, (rank, ""))[1] for rank, each in enumerate(encoded)], FREEZE_FAILED)
    check_fields(encoded)
    raise OneBitError("the ranks' digests differ although their fields are equal: they run different versions")


def raise_if_any_failed(transport: Transport[Any], failure: str, *, what: str, name: str) -> None:
    """Collective: raises OneBitError, the same text on every rank, when some rank failed at what all have to do.

    Args:
        transport: among the ranks.
        failure: what went wrong on this rank; empty when all went well.
        what: what was tried, and what holds now.
        name: fixed name of the collective.
    """
    _raise_failures([each.decode() for each in transport.allgather_bytes(failure.encode(), name=name).wait()], what)


def _raise_failures(failures: Sequence[str], what: str) -> None:
    if any(failures):
        reasons = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(failures) if each)
        raise OneBitError(f"{what} ({reasons})")


def _join(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _shown(value: Any, most: int = 160) -> str:
    text = json.dumps(value)
    return (
        text if len(text) <= most else f"{text[:most]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"
    )


class Agreement:
    """One comparison a step, overlapped with the step's other collectives.

    Args:
        transport: among the ranks that must agree.
        name: fixed name of the collective.
    """

    def __init__(self, transport: Transport[Any], name: str) -> None:
        self._transport = transport
        self._name = name
        self._pending: Pending[list[bytes]] | None = None

    def start(self, fields_digest: bytes) -> None:
        """Collective: sends this rank's digest."""
        self._pending = self._transport.allgather_bytes(fields_digest, name=f"{self._name}.digest")

    def finish(self, fields: Callable[[], Fields]) -> None:
        """Waits; when the digests differ every rank sends `fields()` and raises the same OneBitError."""
        assert self._pending is not None
        digests, self._pending = self._pending.wait(), None
        if len(set(digests)) > 1:
            encoded = self._transport.allgather_bytes(encode_fields(fields()), name=f"{self._name}.fields").wait()
            raise_disagreement(encoded)
