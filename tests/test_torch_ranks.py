"""Ranks of one process that differ: gradients missing or not finite, and models, options or stages that disagree."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_training import (
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    gradient,
    mean_gradient,
    on_ranks,
    parameters,
    set_gradients,
    snapshot,
    train,
)

from hvd_onebit import __version__
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize("freeze_step", [2, 50], ids=["compression", "warm-up"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_missing_gradient_counts_as_zero(size: int, freeze_step: int) -> None:
    def work(missing: bool) -> Callable[[LocalTransport], list[Tensor]]:
        def on_rank(transport: LocalTransport) -> list[Tensor]:
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
            for step in range(6):
                set_gradients(params, step, transport.rank)
                if transport.rank == 1 and step in (1, 3, 4):
                    for p in params[:3]:
                        p.grad = None if missing else torch.zeros_like(p)
                optimizer.step()
            return snapshot(params)

        return on_rank

    with_none, with_zero = on_ranks(size, work(True)), on_ranks(size, work(False))
    assert_replicas_equal(with_none)
    assert_bit_equal(with_none[0], with_zero[0])


# steps that every rank skips


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad_step", [1, 5], ids=["warm-up", "compression"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(size: int, bad_step: int, bad: float) -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(AdamW(params, lr=0.01), transport, freeze_step=3)
        for step in range(8):
            set_gradients(params, step, transport.rank)
            if step == bad_step:
                if transport.rank == size - 1:
                    params[2].grad.view(-1)[7] = bad  # type: ignore[union-attr]
                before = _everything(optimizer, params)
                optimizer.step()
                _assert_kept(before, _everything(optimizer, params))
                assert (optimizer.stats.steps_skipped, optimizer.stats.skipped_in_a_row) == (1, 1)
                assert optimizer.stats.step == bad_step
            else:
                optimizer.step()
        assert (optimizer.stats.steps_skipped, optimizer.stats.skipped_in_a_row) == (1, 0)
        assert optimizer.stats.step == 7
        return snapshot(params)

    assert_replicas_equal(on_ranks(size, work))


def _everything(optimizer: Any, params: list[torch.nn.Parameter]) -> dict[str, Any]:
    state = {f"{i}.{name}": value for i, p in enumerate(params) for name, value in optimizer.state[p].items()}
    errors = {
        f"{bucket}.{name}": each[name]
        for bucket, each in optimizer.state_dict()["onebit"]["errors"].items()
        for name in ("worker_error", "server_error")
    }
    return copy.deepcopy({"params": snapshot(params), **state, "errors": errors})


def _assert_kept(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Nothing has changed, but for the rounding of error feedback that was taken back."""
    before_errors, after_errors = before.pop("errors"), after.pop("errors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[name]), name
        elif isinstance(value, list):
            assert_bit_equal(value, after[name])
        else:
            assert value == after[name], name
    for name, value in before_errors.items():
        assert (value is None) is (after_errors[name] is None)
        if value is not None:
            torch.testing.assert_close(after_errors[name], value, rtol=1e-5, atol=1e-5)


def test_after_a_skipped_step_training_is_as_if_it_had_not_been(caplog: pytest.LogCaptureFixture) -> None:
    def work(bad: bool) -> Callable[[LocalTransport], list[Tensor]]:
        def on_rank(transport: LocalTransport) -> list[Tensor]:
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=3)
            for step in range(10):
                if bad and step == 6:
                    set_gradients(params, 99, transport.rank)
                    if transport.rank == 1:
                        params[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
                    optimizer.step()
                train(optimizer, params, [step], transport.rank)
            return snapshot(params)

        return on_rank

    with caplog.at_level(logging.WARNING, "hvd_onebit"):
        skipped = on_ranks(2, work(True))
    assert sum("skipped on all ranks" in message for message in caplog.messages) == 1, "said once, by rank 0"
    assert "step 7 skipped" in caplog.text
    whose = [message for message in caplog.messages if "on rank" in message]
    assert whose == ["step 7: on rank 1 the gradients of p0 are NaN or infinite"]
    for one, other in zip(skipped[0], on_ranks(2, work(False))[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("freeze_step", [2, 50], ids=["compression", "warm-up"])
def test_too_many_skipped_steps_end_in_the_same_error_on_all_ranks(freeze_step: int) -> None:
    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step, max_skipped_steps=3)
        train(optimizer, params, range(4), transport.rank)
        before = snapshot(params)
        for step in range(4, 7):
            set_gradients(params, step, transport.rank)
            if transport.rank == 1:
                params[1].grad.fill_(float("nan"))  # type: ignore[union-attr]
            try:
                optimizer.step()
            except OneBitError as error:
                assert step == 6
                assert_bit_equal(snapshot(params), before)
                return str(error)
        raise AssertionError("no error")

    errors = on_ranks(2, work)
    assert len(set(errors)) == 1
    assert "3 steps in a row" in errors[0]
    assert "last good step: 4" in errors[0]
    assert "learning rate" in errors[0], "likely causes"


def test_skips_that_are_not_in_a_row_are_no_error() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2, max_skipped_steps=2)
        for step in range(12):
            set_gradients(params, step, transport.rank)
            if step % 2:
                params[1].grad.fill_(float("nan"))  # type: ignore[union-attr]
            optimizer.step()
        assert optimizer.stats.steps_skipped == 6

    on_ranks(2, work)


# ranks that disagree


def _other_model(transport: LocalTransport) -> Any:
    shapes = [(8, 5), (5,)] if transport.rank == 0 else [(8, 5), (5,), (7,)]
    params = parameters(shapes)
    return distribute(Adam(params), transport, freeze_step=1), params


def _other_shape(transport: LocalTransport) -> Any:
    params = parameters([(8, 5), (6 if transport.rank == 1 else 5,)])
    return distribute(Adam(params), transport, freeze_step=1), params


def _other_dtype(transport: LocalTransport) -> Any:
    params = parameters(dtype=torch.float64 if transport.rank == 1 else torch.float32)
    return distribute(Adam(params), transport, freeze_step=1), params


def _other_names(transport: LocalTransport) -> Any:
    params = parameters([(3,), (3,)])
    names = [("a", params[0]), ("b" if transport.rank else "c", params[1])]
    return distribute(Adam(params), transport, freeze_step=1, named_parameters=names), params


def _other_order(transport: LocalTransport) -> Any:
    """The same parameters, registered the other way round on one rank."""
    params = parameters([(3,), (3,)])
    names = [("a", params[0]), ("b", params[1])]
    if transport.rank == 1:
        params, names = params[::-1], names[::-1]
    return distribute(Adam(params), transport, freeze_step=1, named_parameters=names), params


def _other_version(transport: LocalTransport) -> Any:
    optimizer, params = _other_option()(transport)
    static_fields = optimizer._onebit._static_fields
    if transport.rank == 1:
        optimizer._onebit._static_fields = lambda: {**static_fields(), "version of hvd_onebit": "9.9.9"}
    return optimizer, params


def _other_option(**options: Any) -> Callable[[LocalTransport], Any]:
    def make(transport: LocalTransport) -> Any:
        params = parameters()
        given = options if transport.rank == 1 else {}
        return distribute(Adam(params), transport, **{"freeze_step": 2, **given}), params

    return make


def _other_lr(transport: LocalTransport) -> Any:
    params = parameters()
    return distribute(Adam(params, lr=0.01 * (1 + transport.rank)), transport, freeze_step=2), params


def _other_stage(transport: LocalTransport) -> Any:
    """One rank got a checkpoint of the compression stage."""
    params = parameters()
    optimizer = distribute(Adam(params), transport, freeze_step=2)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(4), transport.rank)
    if transport.rank == 0:
        optimizer.load_state_dict(saved)
    return optimizer, params


def _other_step(transport: LocalTransport) -> Any:
    params = parameters()
    optimizer = distribute(Adam(params), transport, freeze_step=9)
    train(optimizer, params, [0], transport.rank)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, [1], transport.rank)
    if transport.rank == 0:
        optimizer.load_state_dict(saved)
    return optimizer, params


DISAGREEMENTS: dict[str, tuple[Callable[[LocalTransport], Any], list[str]]] = {
    "another model": (_other_model, ["number of parameters: rank 0: 2; rank 1,2: 3"]),
    "another shape": (_other_shape, ["parameter 1", "p1 (5,)", "p1 (6,)"]),
    "another dtype": (_other_dtype, ["float64"]),
    "other names": (_other_names, ["parameter 1"]),
    "another order": (_other_order, ['parameter 0: rank 0,2: "a (3,) float32"; rank 1: "b (3,) float32"']),
    "another version": (_other_version, [f'version of hvd_onebit: rank 0,2: "{__version__}"; rank 1: "9.9.9"']),
    "another freeze_step": (_other_option(freeze_step=3), ["freeze_step: rank 0,2: 2; rank 1: 3"]),
    "another block": (_other_option(block=64), ["block: rank 0,2: 2048; rank 1: 64"]),
    "another exchange": (_other_option(exchange="two_phase"), ["exchange"]),
    "other full_precision": (_other_option(full_precision=["p0"]), ["full_precision"]),
    "another learning rate": (_other_lr, ["lr of group 0: rank 0: 0.01; rank 1: 0.02; rank 2: 0.03"]),
    "another stage": (_other_stage, ["stage", '"warm-up"', '"compression"', "broadcast_optimizer_state"]),
    "another step": (_other_step, ["step: rank 0: 1; rank 1,2: 2"]),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_the_same_error(name: str) -> None:
    make, says = DISAGREEMENTS[name]

    def work(transport: LocalTransport) -> str:
        optimizer, params = make(transport)
        before = snapshot(params)
        with pytest.raises(OneBitError, match="the ranks disagree") as caught:
            train(optimizer, params, [9], transport.rank)
        assert_bit_equal(snapshot(params), before, "an error must not change training state")
        return str(caught.value)

    errors = on_ranks(3, work)
    assert len(set(errors)) == 1
    for text in says:
        assert text in errors[0]


def test_a_momentum_that_differs_is_found_by_the_checksum() -> None:
    """Bits that were damaged on the way to one rank: the next step's comparison names it."""

    class Damaging:
        """Passes everything on, and flips one bit of what one rank receives in its third allgather."""

        def __init__(self, inner: LocalTransport) -> None:
            self._inner, self._calls = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def allgather(self, message: Any, receive_bytes: Any, *, name: str) -> Any:
            pending = self._inner.allgather(message, receive_bytes, name=name)
            self._calls += 1
            if self._calls != 3 or self.rank != 1:
                return pending

            class Flipped:
                ready = pending.ready

                def wait(self) -> Any:
                    gathered = pending.wait()
                    gathered[-1] ^= 1
                    return gathered

            return Flipped()

    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = distribute(Adam(params), Damaging(transport), freeze_step=1, check_every=1)  # type: ignore[arg-type]
        with pytest.raises(OneBitError) as caught:
            train(optimizer, params, range(8), transport.rank)
        return str(caught.value)

    errors = on_ranks(2, work)
    assert len(set(errors)) == 1
    assert "checksum" in errors[0]


def test_parameters_that_were_never_broadcast_are_found() -> None:
    def work(transport: LocalTransport) -> str:
        params = parameters(seed=transport.rank)
        optimizer = distribute(Adam(params), transport, freeze_step=2, check_every=0)
        with pytest.raises(OneBitError) as caught:
            train(optimizer, params, range(1), transport.rank)
        assert_bit_equal(params, parameters(seed=transport.rank))
        return str(caught.value)

    errors = on_ranks(2, work)
    assert len(set(errors)) == 1
    assert "checksum of the parameters" in errors[0]
    assert "hvd.broadcast_parameters" in errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_that_part_later_are_found(dtype: torch.dtype) -> None:
    """A model that was restored on one rank only, or changed by hand."""

    def work(transport: LocalTransport) -> str:
        params = parameters(dtype=dtype)
        optimizer = distribute(Adam(params, lr=1e-3), transport, freeze_step=2, check_every=2)
        train(optimizer, params, range(5), transport.rank)
        with torch.no_grad():
            params[2][3, 1] += transport.rank
        with pytest.raises(OneBitError) as caught:
            train(optimizer, params, range(5, 9), transport.rank)
        return str(caught.value)

    errors = on_ranks(2, work)
    assert len(set(errors)) == 1
    assert "checksum of the parameters" in errors[0]


def test_a_variance_that_differs_at_the_freeze_is_found() -> None:
    """With weight decay on parameters that have parted each rank would freeze a variance of its own."""

    def work(transport: LocalTransport) -> str:
        params = parameters()
        optimizer = distribute(Adam(params, weight_decay=0.1), transport, freeze_step=3, check_every=0)
        train(optimizer, params, range(1), transport.rank)
        with torch.no_grad():
            params[0].add_(transport.rank)
        with pytest.raises(OneBitError) as caught:
            train(optimizer, params, range(1, 5), transport.rank)
        return str(caught.value)

    errors = on_ranks(2, work)
    assert len(set(errors)) == 1
    assert "checksum of the frozen variance" in errors[0]


def test_a_rank_that_raises_ends_the_others() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params), transport, freeze_step=2)
        train(optimizer, params, range(3), transport.rank)
        if transport.rank == 1:
            raise ZeroDivisionError("this rank's own fault")
        train(optimizer, params, range(3, 6), transport.rank)

    with pytest.raises((ZeroDivisionError, OneBitError), match="this rank's own fault"):
        on_ranks(3, work)


def test_the_bytes_of_both_stages_are_counted() -> None:
    size = 3

    def work(transport: LocalTransport) -> tuple[float, float, float]:
        params = parameters([(1000, 1000), (1000,)])
        optimizer = distribute(Adam(params), transport, freeze_step=1)
        for step in range(3):
            for index, p in enumerate(params):
                p.grad = gradient(step, transport.rank, index, p)
            optimizer.step()
        stats = optimizer.stats
        assert stats.bytes_sent["compression"] == 2 * stats.bytes_per_step["compression"]
        assert 30 < stats.ratio < 32
        return (
            stats.bytes_per_step["warm-up"],
            stats.bytes_per_step["compression"],
            stats.uncompressed_bytes_per_step,
        )

    by_rank = on_ranks(size, work)
    d = 1_001_000
    for warm_up, compressed, uncompressed in by_rank:
        assert warm_up == uncompressed == pytest.approx(2 * (size - 1) / size * 4 * d)
        assert compressed == pytest.approx(2 * (size - 1) / size * (d / 8 + 4 * d / 2048), rel=0.03)


def test_the_mean_gradient_of_these_tests_is_the_transports() -> None:
    p = parameters()[0]

    def work(transport: LocalTransport) -> Any:
        return transport.allreduce(gradient(0, transport.rank, 0, p).numpy(), name="g").wait()

    assert torch.equal(torch.from_numpy(on_ranks(3, work)[1]), mean_gradient(0, 3, 0, p))
