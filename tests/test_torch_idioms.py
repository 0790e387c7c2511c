"""What Horovod's users do with an optimizer: refused with the reason, or working in both stages; on one process."""

from __future__ import annotations

import copy
import logging
import pickle
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
    on_ranks,
    parameters,
    set_gradients,
    snapshot,
    train,
)

import hvd_onebit.torch as onebit
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW


class _MyAdam(torch.optim.Adam):
    pass


def _pair(transport: LocalTransport, names: Any, optimizer: Any = None) -> Any:
    params = parameters()
    named = names(params)
    return onebit.DistributedOptimizer(
        optimizer or Adam(params), named_parameters=named, transport=transport, freeze_step=2
    )


BAD: dict[str, tuple[Callable[[LocalTransport], Any], type[Exception], str]] = {
    "RMSprop": (lambda t: distribute(torch.optim.RMSprop(parameters()), t), TypeError, "not RMSprop"),
    "a subclass of Adam": (lambda t: distribute(_MyAdam(parameters()), t), TypeError, "not _MyAdam"),
    "wrapped twice": (
        lambda t: distribute(distribute(Adam(parameters()), t, freeze_step=2), t, freeze_step=2),
        TypeError,
        "distributed already",
    ),
    "unknown option": (lambda t: distribute(Adam(parameters()), t, freezestep=2), TypeError, "'freeze_step'"),
    "bad option": (lambda t: distribute(Adam(parameters()), t, block=0), ValueError, "block must be at least 1"),
    "OneBitAdam, unknown": (lambda t: onebit.OneBitAdam(parameters(), freze_step=2), TypeError, "'freeze_step'"),
    "OneBitAdam, bad": (lambda t: onebit.OneBitAdam(parameters(), scale="max"), ValueError, "scale"),
    "no backward pass": (
        lambda t: distribute(Adam(parameters()), t, backward_passes_per_step=0),
        ValueError,
        "backward_passes_per_step must be at least 1",
    ),
    "names twice": (
        lambda t: _pair(t, lambda ps: [("same", p) for p in ps]),
        ValueError,
        "unique.*same.*prefix",
    ),
    "unnamed": (
        lambda t: _pair(t, lambda ps: [(f"p{i}", p) for i, p in enumerate(ps[:3])]),
        ValueError,
        r"2 of the optimizer's 5 parameters are not in named_parameters .*\(1,\), \(3, 3, 3\)",
    ),
    "no pairs": (lambda t: _pair(t, lambda ps: ps), TypeError, r"\(name, parameter\) pairs"),
    "differentiable": (
        lambda t: distribute(Adam(parameters(), differentiable=True), t, freeze_step=2),
        ValueError,
        "differentiable",
    ),
    "complex": (
        lambda t: distribute(Adam([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))]), t, freeze_step=2),
        TypeError,
        "view_as_real",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    make, error, says = BAD[name]
    with pytest.raises(error, match=says):
        on_ranks(1, make)


def test_without_horovod_initialised_the_error_says_what_to_call() -> None:
    pytest.importorskip("horovod.torch")
    with pytest.raises(OneBitError, match=r"call hvd.init\(\)"):
        onebit.DistributedOptimizer(Adam(parameters()), freeze_step=2)


def test_the_class_stays_the_users() -> None:
    def work(transport: LocalTransport) -> None:
        for cls in (Adam, AdamW, onebit.OneBitAdam):
            optimizer = distribute(cls(parameters()), transport, freeze_step=2)
            assert isinstance(optimizer, cls)
            assert type(optimizer).__name__ == cls.__name__
            assert optimizer.compression_options.freeze_step == 2

    on_ranks(1, work)


def test_options_of_the_wrapper_win_over_onebit_adams_own() -> None:
    def work(transport: LocalTransport) -> None:
        inner = onebit.OneBitAdam(parameters(), freeze_step=5, block=64)
        options = distribute(inner, transport, freeze_step=3).compression_options
        assert (options.freeze_step, options.block) == (3, 64)

    on_ranks(1, work)


def test_names_may_be_left_out() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = onebit.DistributedOptimizer(Adam(params), transport=transport, freeze_step=2)
        train(optimizer, params, range(4), transport.rank)
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


# sparse gradients


def _embedding_gradient(rank: int) -> Tensor:
    """Row 2 twice: duplicates are summed."""
    indices = torch.tensor([[2, 5 + rank, 2]])
    values = torch.ones(3, 4) * torch.tensor([[1.0], [2.0], [3.0]])
    return torch.sparse_coo_tensor(indices, values, (10, 4), check_invariants=True)


@pytest.mark.parametrize("freeze_step", [1, 9], ids=["compression", "warm-up"])
def test_sparse_gradients_are_summed_when_asked(freeze_step: int) -> None:
    def work(sparse: bool) -> Callable[[LocalTransport], Tensor]:
        def on_rank(transport: LocalTransport) -> Tensor:
            weight = torch.nn.Parameter(torch.zeros(10, 4))
            optimizer = distribute(Adam([weight]), transport, freeze_step=freeze_step, sparse_as_dense=True)
            for _ in range(3):
                given = _embedding_gradient(transport.rank)
                weight.grad = given if sparse else given.to_dense()
                optimizer.step()
            return weight.detach()

        return on_rank

    found, expected = on_ranks(2, work(True)), on_ranks(2, work(False))
    assert_replicas_equal([[each] for each in found])
    assert_bit_equal(found, expected)
    assert _embedding_gradient(0).to_dense()[2, 0] == 4.0


def test_a_sparse_gradient_is_refused_otherwise_and_nothing_changes() -> None:
    def work(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.zeros(10, 4))
        optimizer = distribute(Adam([weight]), transport, freeze_step=2)
        weight.grad = _embedding_gradient(0)
        with pytest.raises(TypeError, match=r"'p0' has a sparse gradient.*sparse_as_dense=True"):
            optimizer.step()
        assert not weight.any()

    on_ranks(2, work)


# synchronize, clip, skip_synchronize


@pytest.mark.parametrize("freeze_step", [2, 9], ids=["compression", "warm-up"])
def test_synchronize_and_a_skipped_one_are_step(freeze_step: int) -> None:
    """The same bits and the same bytes as step() alone: nothing is communicated twice."""

    def work(apart: bool) -> Callable[[LocalTransport], Any]:
        def on_rank(transport: LocalTransport) -> Any:
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
            for step in range(6):
                set_gradients(params, step, transport.rank)
                if apart:
                    optimizer.synchronize()
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
            return snapshot(params), optimizer.stats.bytes_sent, optimizer.stats.step

        return on_rank

    apart, together = on_ranks(2, work(True)), on_ranks(2, work(False))
    for (found, sent, steps), (expected, expected_sent, _) in zip(apart, together, strict=True):
        assert_bit_equal(found, expected)
        assert sent == expected_sent
        assert steps == 6


@pytest.mark.parametrize("synchronize_first", [True, False])
def test_a_plain_step_after_synchronize_uses_it(synchronize_first: bool) -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        for step in range(4):
            set_gradients(params, step, transport.rank)
            if synchronize_first:
                optimizer.synchronize()
            optimizer.step()
        assert optimizer.stats.step == 4

    on_ranks(2, work)


def test_a_step_that_skips_a_synchronize_that_was_never_made_is_an_error() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        set_gradients(params, 0, transport.rank)
        with optimizer.skip_synchronize(), pytest.raises(OneBitError, match="needs a synchronize"):
            optimizer.step()

    on_ranks(1, work)
    on_ranks(2, work)


def test_after_synchronize_the_gradient_is_what_step_will_use() -> None:
    """The averaged gradient during warm-up, the averaged momentum afterwards; the same on every rank."""

    def work(transport: LocalTransport) -> list[list[Tensor]]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        kept = []
        for step in range(4):
            set_gradients(params, step, transport.rank)
            optimizer.synchronize()
            grads = [p.grad.clone() for p in params if p.grad is not None]
            kept.append(grads)
            with optimizer.skip_synchronize():
                optimizer.step()
            if step >= 2:
                assert_bit_equal(grads, [optimizer.state[p]["exp_avg"] for p in params])
        return kept

    by_rank = on_ranks(2, work)
    for step in range(4):
        assert_replicas_equal([kept[step] for kept in by_rank])
    for index, p in enumerate(parameters()):
        mean = (gradient(0, 0, index, p) + gradient(0, 1, index, p)) / 2
        assert torch.equal(by_rank[0][0][index], mean)


def test_step_alone_leaves_the_gradients_of_compressed_parameters() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(AdamW(params, lr=0.01), transport, freeze_step=2)
        train(optimizer, params, range(3), transport.rank)
        set_gradients(params, 3, transport.rank)
        given = [p.grad.clone() for p in params if p.grad is not None]
        optimizer.step()
        assert_bit_equal([p.grad for p in params if p.grad is not None], given)

    on_ranks(2, work)


@pytest.mark.parametrize("freeze_step", [2, 9], ids=["compression", "warm-up"])
def test_clipping_bounds_what_the_step_uses(freeze_step: int) -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
        for step in range(6):
            set_gradients(params, step, transport.rank)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            if step >= freeze_step:
                used = [p.grad.clone() for p in params if p.grad is not None]
            with optimizer.skip_synchronize():
                optimizer.step()
            if step >= freeze_step:
                momentum = [optimizer.state[p]["exp_avg"] for p in params]
                assert_bit_equal(momentum, used)
                norm = torch.cat([each.reshape(-1) for each in momentum]).norm()
                assert norm <= 0.5001
        return snapshot(params)

    assert_replicas_equal(on_ranks(3, work))


def test_a_step_that_is_not_finite_is_skipped_with_synchronize_too() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        for step in range(6):
            set_gradients(params, step, transport.rank)
            if step in (1, 4) and transport.rank == 0:
                params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
            before = snapshot(params)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert all(map(torch.equal, before, params)) is (step in (1, 4))
        assert optimizer.stats.steps_skipped == 2
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    def work(transport: LocalTransport) -> None:
        x = torch.nn.Parameter(torch.ones(40))
        optimizer = distribute(Adam([x], lr=0.01), transport, freeze_step=2)
        calls = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (x * x).sum()
            loss.backward()
            calls.append(1)
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
        assert len(calls) == 5
        assert losses == sorted(losses, reverse=True)

    on_ranks(2, work)


# schedulers, copies


def _schedulers(optimizer: Any) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda: lr.LambdaLR(optimizer, _halve),
        "OneCycleLR": lambda: lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        "CosineAnnealingLR": lambda: lr.CosineAnnealingLR(optimizer, T_max=10),
    }


def _halve(epoch: int) -> float:
    return 0.5 ** (epoch // 3)


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "CosineAnnealingLR"])
def test_schedulers_act_in_both_stages(name: str) -> None:
    """The learning rates are those that plain Adam sees; OneCycleLR moves the momentum's beta too."""
    plain = parameters()
    reference = Adam(plain, lr=0.01)
    scheduler = _schedulers(reference)[name]()
    expected = []
    for step in range(8):
        train(reference, plain, [step], 0)
        scheduler.step()
        expected.append((reference.param_groups[0]["lr"], reference.param_groups[0]["betas"]))

    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=3)
        scheduler = _schedulers(optimizer)[name]()
        found = []
        for step in range(8):
            train(optimizer, params, [step], transport.rank)
            scheduler.step()
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        assert found == expected
        assert optimizer.stats.stage == "compression"
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize("stop", [1, 5], ids=["warm-up", "compression"])
@pytest.mark.parametrize("held", [False, True], ids=["alone", "held by a scheduler"])
def test_a_deep_copy_goes_on_as_the_original(stop: int, held: bool) -> None:
    """Over a transport of its own, which a copy shares."""

    def work(transport: LocalTransport) -> tuple[list[Tensor], list[Tensor]]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20) if held else None
        train(optimizer, params, range(stop), transport.rank)
        twin_params, twin, twin_scheduler = copy.deepcopy((params, optimizer, scheduler))
        assert type(twin).__name__ == "Adam"
        assert twin is not optimizer
        assert twin_params[0] is not params[0]
        assert twin.param_groups[0]["params"][0] is twin_params[0]
        if held:
            assert twin_scheduler.optimizer is twin  # type: ignore[union-attr]
        for step in range(stop, 8):
            train(optimizer, params, [step], transport.rank)
        for step in range(stop, 8):
            train(twin, twin_params, [step], transport.rank)
        return snapshot(params), snapshot(twin_params)

    for original, twin in on_ranks(2, work):
        assert_bit_equal(twin, original)


def test_pickling_over_a_transport_says_what_to_do() -> None:
    def work(transport: LocalTransport) -> None:
        optimizer = distribute(Adam(parameters()), transport, freeze_step=2)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)

    on_ranks(1, work)


# notices


@pytest.mark.parametrize(
    ("size", "options", "steps", "says", "level"),
    [
        (1, {"freeze_step": 2}, 3, "one rank: there is nothing to send", logging.WARNING),
        (2, {"freeze_step": 2}, 1, "freeze_step=2 is early", logging.WARNING),
        (2, {"freeze_step": 500}, 1, "warm-up: 500 steps in full precision", logging.INFO),
        (2, {}, 1, "after 2000 steps at the earliest", logging.INFO),
        (2, {"freeze_step": 2, "full_precision": ["*"]}, 1, "nothing will be compressed", logging.WARNING),
        (2, {"freeze_step": 2, "min_elements": 9999}, 1, "nothing will be compressed", logging.WARNING),
        (2, {"freeze_step": 2, "full_precision": ["p1"]}, 3, "compression starts: 268 elements", logging.INFO),
        (2, {"freeze_step": 2, "full_precision": ["p1"]}, 3, "5 in full precision (p1)", logging.INFO),
    ],
)
def test_what_is_not_compressed_is_said_once(
    size: int, options: dict[str, Any], steps: int, says: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        train(distribute(Adam(params), transport, **options), params, range(steps), transport.rank)

    with caplog.at_level(logging.INFO, "hvd_onebit"):
        on_ranks(size, work)
    found = [record for record in caplog.records if says in record.getMessage()]
    assert len(found) == 1, caplog.text
    assert found[0].levelno == level


def test_a_late_freeze_step_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, betas=(0.9, 0.9)), transport, freeze_step=5)
        train(optimizer, params, range(8), transport.rank)

    with caplog.at_level(logging.WARNING, "hvd_onebit"):
        on_ranks(2, work)
    assert not caplog.records


def test_horovods_own_optimizer_around_ours_is_refused() -> None:
    hvd = pytest.importorskip("horovod.torch")

    def work(transport: LocalTransport) -> None:
        optimizer = distribute(Adam(parameters()), transport, freeze_step=2)
        with pytest.raises(TypeError, match="wrap it once"):
            hvd.DistributedOptimizer(optimizer)

    on_ranks(2, work)
