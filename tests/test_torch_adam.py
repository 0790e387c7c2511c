"""1-bit Adam's numbers in torch: warm-up against torch's own optimizers, the compression stage against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_training import (
    SHAPES,
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

import hvd_onebit.torch as onebit
from hvd_onebit import reference
from hvd_onebit.layout import Bucket, cut_chunks
from hvd_onebit.transport.local import LocalTransport

Adam, AdamW, OneBitAdam = torch.optim.Adam, torch.optim.AdamW, onebit.OneBitAdam

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Adam": (Adam, {}),
    "Adam, weight decay": (Adam, {"weight_decay": 0.1}),
    "Adam, amsgrad": (Adam, {"amsgrad": True}),
    "Adam, maximize": (Adam, {"maximize": True}),
    "Adam, foreach": (Adam, {"foreach": True}),
    "Adam, no foreach": (Adam, {"foreach": False}),
    "Adam, fused": (Adam, {"fused": True}),
    "Adam, tensor lr": (Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "Adam, decoupled": (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adam, all at once": (Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.8, 0.9)}),
    "AdamW": (AdamW, {}),
    "AdamW, amsgrad, maximize": (AdamW, {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "eps": 1e-4}),
    "OneBitAdam": (OneBitAdam, {}),
    "OneBitAdam, weight decay": (OneBitAdam, {"weight_decay": 0.1}),
    "OneBitAdam, decoupled": (OneBitAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
}


def plain(cls: type, params: Any, kwargs: dict[str, Any]) -> Any:
    """The optimizer of torch that `cls` must equal during warm-up."""
    return (Adam if cls is OneBitAdam else cls)(params, **{"lr": 0.01, **kwargs})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warm_up_is_torchs_own_optimizer_on_the_averaged_gradient(name: str) -> None:
    cls, kwargs = OPTIMIZERS[name]
    size, steps = 2, 6

    def work(transport: LocalTransport) -> tuple[list[list[Tensor]], str]:
        params = parameters()
        optimizer = distribute(cls(params, **{"lr": 0.01, **kwargs}), transport, freeze_step=steps)
        kept = []
        for step in range(steps):
            assert optimizer.stats.stage == "warm-up"
            train(optimizer, params, [step], transport.rank)
            kept.append(snapshot(params))
        return kept, optimizer.stats.stage

    params = parameters()
    optimizer = plain(cls, params, kwargs)
    expected = []
    for step in range(steps):
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, size, index, p)
        optimizer.step()
        expected.append(snapshot(params))
    for kept, stage in on_ranks(size, work):
        assert stage == "compression", "frozen after exactly freeze_step updates"
        for step in range(steps):
            assert_bit_equal(kept[step], expected[step], f"after step {step}")


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_warm_up_without_bias_correction_is_the_papers_adam(amsgrad: bool, decoupled: bool) -> None:
    lr, eps, decay = 0.01, 1e-8, 0.1

    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = OneBitAdam(
            params,
            lr=lr,
            amsgrad=amsgrad,
            bias_correction=False,
            weight_decay=decay,
            decoupled_weight_decay=decoupled,
            freeze_step=9,
        )
        train(distribute(optimizer, transport), params, range(5), transport.rank)
        return snapshot(params)

    found = on_ranks(2, work)[0]
    for index, p in enumerate(parameters()):
        x, m, v, most = (np.zeros(p.shape) for _ in range(4))
        x = p.detach().double().numpy()
        for step in range(5):
            g = mean_gradient(step, 2, index, p).double().numpy()
            g = g if decoupled else g + decay * x
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            most = np.maximum(most, v)
            x = x * (1 - lr * decay) if decoupled else x
            x = x - lr * m / (np.sqrt(most if amsgrad else v) + eps)
        np.testing.assert_allclose(found[index].numpy(), x, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("freeze_step", [1, 2, 5])
def test_there_are_exactly_freeze_step_full_precision_updates(freeze_step: int) -> None:
    """The variance is that of plain Adam after freeze_step updates, the first one included, and stays."""

    def work(transport: LocalTransport) -> list[list[Tensor]]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step, variance_floor=0.0)
        kept, stages = [], []
        for step in range(freeze_step + 3):
            train(optimizer, params, [step], transport.rank)
            kept.append([optimizer.state[p]["exp_avg_sq"].clone() for p in params])
            stages.append(optimizer.stats.stage)
        assert stages == ["warm-up"] * (freeze_step - 1) + ["compression"] * 4
        assert optimizer.stats.frozen_step == freeze_step
        assert {int(optimizer.state[p]["step"]) for p in params} == {freeze_step + 3}
        return kept

    params = parameters()
    optimizer = Adam(params, lr=0.01)
    for step in range(freeze_step):
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, 2, index, p)
        optimizer.step()
    for kept in on_ranks(2, work):
        for after in kept[freeze_step - 1 :]:
            assert_bit_equal(after, [optimizer.state[p]["exp_avg_sq"] for p in params])


def test_freeze_step_zero_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="freeze_step=0 leaves no variance to freeze: it must be at least 1"):
        on_ranks(1, lambda transport: distribute(Adam(parameters()), transport, freeze_step=0))


# the whole path, step by step, against the oracle

ORACLE: dict[str, tuple[Callable[[Any], Any], dict[str, Any], dict[str, Any]]] = {
    "Adam": (lambda p: Adam(p, lr=0.01), {}, {}),
    "Adam, weight decay": (lambda p: Adam(p, lr=0.01, weight_decay=0.1), {"weight_decay": 0.1}, {}),
    "AdamW": (lambda p: AdamW(p, lr=0.01, weight_decay=0.1), {"weight_decay": 0.1, "decoupled": True}, {}),
    "AdamW, betas, eps": (
        lambda p: AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3),
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01, "decoupled": True},
        {},
    ),
    "mean scale": (lambda p: Adam(p, lr=0.01), {"scale": "mean"}, {"scale": "mean"}),
    "small blocks": (lambda p: Adam(p, lr=0.01), {"block": 8}, {"block": 8}),
    "no floor": (lambda p: Adam(p, lr=0.01), {"variance_floor": 0.0}, {"variance_floor": 0.0}),
    "high floor": (lambda p: Adam(p, lr=0.01), {"variance_floor": 0.5}, {"variance_floor": 0.5}),
    "OneBitAdam": (lambda p: OneBitAdam(p, lr=0.01, scale="mean", block=100), {"scale": "mean", "block": 100}, {}),
}


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ORACLE)
def test_every_step_follows_the_oracle(name: str, size: int, algorithm: str) -> None:
    """Each tensor has a bucket and an oracle of its own; the oracle takes over the state before every step.

    That keeps float32's rounding from flipping a sign later on, and every number that a step makes is compared.
    """
    make, oracle_options, options = ORACLE[name]
    freeze_step, steps = 4, 9

    def work(transport: LocalTransport) -> list[list[dict[str, Any]]]:
        params = parameters()
        optimizer = distribute(
            make(params), transport, freeze_step=freeze_step, bucket_elements=1, exchange=algorithm, **options
        )
        kept = [_state_of(optimizer, params)]
        for step in range(steps):
            train(optimizer, params, [step], transport.rank)
            kept.append(_state_of(optimizer, params))
        return kept

    by_rank = on_ranks(size, work)
    for index, p in enumerate(parameters()):
        block = oracle_options.get("block", 2048)
        bucket = Bucket("b", ("p",), (p.numel(),))
        cuts = [0, *(chunk.stop for chunk in cut_chunks(bucket, size, block))] if algorithm == "two_phase" else None
        oracle = reference.OneBitAdam(
            p.detach().double().numpy().ravel(),
            num_workers=size,
            freeze_step=freeze_step,
            cuts=cuts,
            **{"lr": 0.01, **oracle_options},
        )
        for step in range(steps):
            gradients = [gradient(step, rank, index, p).double().numpy().ravel() for rank in range(size)]
            oracle.step_workers(gradients)
            after = [kept[step + 1][index] for kept in by_rank]
            close = {"rtol": 2e-5, "atol": 2e-6, "err_msg": f"parameter {index}, step {step}"}
            for rank in range(size):
                np.testing.assert_allclose(after[rank]["x"], oracle.x, **close)
                np.testing.assert_allclose(after[rank]["m"], oracle.m, **close)
                np.testing.assert_allclose(after[rank]["v"], oracle.v, **{**close, "atol": 1e-9})
                if step >= freeze_step:
                    np.testing.assert_allclose(after[rank]["worker_error"], oracle.worker_errors[rank], **close)
                    if cuts:
                        np.testing.assert_allclose(after[rank]["server_error"], oracle.server_errors[rank], **close)
            oracle.x, oracle.m, oracle.v = (after[0][each].copy() for each in "xmv")
            if step >= freeze_step:
                oracle.worker_errors = [each["worker_error"] for each in after]
                oracle.server_errors = [each["server_error"] for each in after] if cuts else []


@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_preconditioned_space_follows_the_oracle(size: int, algorithm: str) -> None:
    """With space="update" the ranks average u = m/(sqrt(v)/correction + eps), and the momentum is made from it."""
    freeze_step, steps, lr, eps = 3, 7, 0.01, 1e-8

    def work(transport: LocalTransport) -> list[list[dict[str, Any]]]:
        params = parameters()
        optimizer = distribute(
            Adam(params, lr=lr),
            transport,
            freeze_step=freeze_step,
            bucket_elements=1,
            exchange=algorithm,
            space="update",
        )
        kept = []
        for step in range(steps):
            train(optimizer, params, [step], transport.rank)
            kept.append(_state_of(optimizer, params))
        return kept

    by_rank = on_ranks(size, work)
    for index, p in enumerate(parameters()):
        bucket = Bucket("b", ("p",), (p.numel(),))
        cuts = [0, *(chunk.stop for chunk in cut_chunks(bucket, size, 2048))]
        for step in range(freeze_step, steps):
            before, after = ([kept[at][index] for kept in by_rank] for at in (step - 1, step))
            root = np.sqrt(before[0]["v"] / (1 - 0.999**freeze_step)) + eps
            gradients = [gradient(step, rank, index, p).double().numpy().ravel() for rank in range(size)]
            inputs = [(0.9 * before[0]["m"] + 0.1 * g) / root for g in gradients]
            workers = [each["worker_error"] for each in before]
            if algorithm == "one_shot":
                u = reference.compressed_allreduce_one_shot(inputs, workers, 2048)
            else:
                servers = [each["server_error"] for each in before]
                u = reference.compressed_allreduce_two_phase(inputs, workers, servers, cuts, 2048)
            close = {"rtol": 2e-5, "atol": 2e-6, "err_msg": f"parameter {index}, step {step}"}
            for rank in range(size):
                np.testing.assert_allclose(after[rank]["m"], u * root, **close)
                np.testing.assert_allclose(after[rank]["worker_error"], workers[rank], **{**close, "atol": 2e-5})
                x = before[0]["x"] - lr / (1 - 0.9 ** (step + 1)) * u
                np.testing.assert_allclose(after[rank]["x"], x, **close)


def _state_of(optimizer: Any, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Each parameter's numbers in float64; buckets of one tensor."""
    errors = {each["parameters"][0]: each for each in optimizer.state_dict()["onebit"]["errors"].values()}

    def double(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().double().numpy().ravel().copy()

    states = []
    for i, p in enumerate(params):
        state, error = optimizer.state[p], errors.get(f"p{i}", {})
        states.append(
            {
                "x": double(p),
                "m": double(state["exp_avg"]),
                "v": double(state["exp_avg_sq"]),
                "worker_error": double(error.get("worker_error")),
                "server_error": double(error.get("server_error")),
            }
        )
    return states


@pytest.mark.parametrize(
    ("amsgrad", "maximize", "bias_correction"),
    [(True, False, True), (False, True, True), (True, True, False), (False, False, False)],
)
def test_amsgrad_maximize_and_bias_correction_act_in_both_stages(
    amsgrad: bool, maximize: bool, bias_correction: bool
) -> None:
    """A parameter moves by lr * m / (sqrt(v) + eps), of the state's own numbers with their corrections."""
    freeze_step, lr = 3, 0.01

    def work(transport: LocalTransport) -> None:
        params = parameters()
        kind = OneBitAdam if not bias_correction else Adam
        given = {} if bias_correction else {"bias_correction": False}
        optimizer = distribute(
            kind(params, lr=lr, amsgrad=amsgrad, maximize=maximize, **given), transport, freeze_step=freeze_step
        )
        for step in range(8):
            before = snapshot(params)
            train(optimizer, params, [step], transport.rank)
            for i, p in enumerate(params):
                state = optimizer.state[p]
                m = state["exp_avg"].double()
                v = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].double()
                if bias_correction:
                    m = m / (1 - 0.9 ** (step + 1))
                    v = v / (1 - 0.999 ** min(step + 1, freeze_step))
                moved = lr * m / (v.sqrt() + 1e-8)
                if step + 1 == freeze_step:
                    continue  # the floor was put under v after this step used it
                torch.testing.assert_close(p.double(), before[i].double() - moved, rtol=1e-5, atol=1e-6)
                shared = gradient(0, 0, i, p).sign()
                if step == 0:
                    sign = 1 if maximize else -1
                    assert (((p - before[i]).sign() * shared * sign) >= 0).float().mean() > 0.7

    on_ranks(2, work)


def test_the_step_size_does_not_jump_at_or_after_the_freeze() -> None:
    """A constant gradient moves every coordinate by lr in each step, in both stages, however long it goes on."""

    def work(transport: LocalTransport) -> None:
        params = [torch.nn.Parameter(torch.zeros(50))]
        optimizer = distribute(Adam(params, lr=0.01, eps=0.0), transport, freeze_step=5)
        for step in range(200):
            before = snapshot(params)[0]
            params[0].grad = torch.ones(50)
            optimizer.step()
            torch.testing.assert_close(before - params[0], torch.full((50,), 0.01), rtol=2e-4, atol=1e-6, msg=str(step))

    on_ranks(2, work)


@pytest.mark.parametrize(("cls", "factor"), [(AdamW, 1 - 0.01 * 0.1), (Adam, None)])
def test_weight_decay_goes_on_where_there_is_no_gradient(cls: type, factor: float | None) -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters([(6, 6)])
        optimizer = distribute(cls(params, lr=0.01, weight_decay=0.1), transport, freeze_step=2)
        train(optimizer, params, range(2), transport.rank)
        params[0].grad = torch.zeros(6, 6)
        with torch.no_grad():
            optimizer.state[params[0]]["exp_avg"].zero_()
            params[0].add_(1.0 * params[0].sign())
        before = snapshot(params)[0]
        optimizer.step()
        if factor is not None:
            torch.testing.assert_close(params[0].detach(), before * factor, rtol=1e-6, atol=0)
        else:
            assert ((params[0] - before).sign() == -before.sign()).all()

    on_ranks(2, work)


# parameters that are special


def test_a_full_precision_parameter_follows_plain_adam_for_ever() -> None:
    size, steps = 3, 25

    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(
            Adam(params, lr=0.01, weight_decay=0.1), transport, freeze_step=3, full_precision=["p0", "p[3-4]*"]
        )
        train(optimizer, params, range(steps), transport.rank)
        assert optimizer.stats.compressed_elements == 205
        assert optimizer.stats.full_precision_elements == 40 + 1 + 27
        assert optimizer.stats.full_precision_names == ("p0", "p3", "p4")
        return snapshot(params)

    params = parameters()
    optimizer = Adam(params, lr=0.01, weight_decay=0.1)
    for step in range(steps):
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, size, index, p)
        optimizer.step()
    by_rank = on_ranks(size, work)
    assert_replicas_equal(by_rank)
    for index, p in enumerate(params):
        assert torch.equal(by_rank[0][index], p) is (index in (0, 3, 4)), index


def test_small_tensors_stay_in_full_precision_when_asked() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params), transport, freeze_step=1, min_elements=28)
        train(optimizer, params, range(3), transport.rank)
        assert optimizer.stats.compressed_elements == 240

    on_ranks(2, work)


@pytest.mark.parametrize("dead", ["floor", "hold"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_rows_of_an_embedding_that_are_never_touched(cls: type, weight_decay: float, dead: str) -> None:
    """Elsewhere such rows went from 1.0 to 6953 in a step."""

    def work(transport: LocalTransport) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(50, 16))
        start = weight.detach().clone()
        optimizer = distribute(cls([weight], lr=0.01, weight_decay=weight_decay), transport, freeze_step=10, dead=dead)
        for step in range(60):
            weight.grad = torch.zeros_like(weight)
            weight.grad[:40] = gradient(step, transport.rank, 0, weight)[:40]
            optimizer.step()
        if weight_decay == 0:
            assert optimizer.stats.dead_elements == 160
        return start, weight.detach()

    by_rank = on_ranks(3, work)
    assert_replicas_equal([[weight] for _, weight in by_rank])
    start, weight = by_rank[0]
    assert torch.isfinite(weight).all()
    moved = (weight - start).abs()
    if dead == "hold" and weight_decay == 0:
        assert torch.equal(weight[40:], start[40:])
    elif weight_decay == 0:
        assert moved[40:].max() < moved[:40].max()
    assert moved.max() < 2.0
    assert moved[:40].min() > 0


def test_a_row_first_touched_after_the_freeze_trains_with_the_floor() -> None:
    def work(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.zeros(20, 64))
        optimizer = distribute(Adam([weight], lr=0.01), transport, freeze_step=10, block=64)
        for step in range(120):
            weight.grad = torch.ones_like(weight) + 0.3 * gradient(step, transport.rank, 0, weight)
            if step < 20:
                weight.grad[10:] = 0
            optimizer.step()
        assert weight[10:].mean() < -0.5, "it goes down the gradient"
        assert (weight[10:] < 0).all()
        assert weight.abs().max() < 20

    on_ranks(2, work)


def test_a_layer_unfrozen_late_warms_up_by_itself() -> None:
    freeze_step = 4

    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        params[2].requires_grad_(False)
        start = params[2].detach().clone()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
        train(optimizer, params, range(8), transport.rank)
        assert torch.equal(params[2], start)
        params[2].requires_grad_(True)
        compressed = []
        for step in range(8, 16):
            train(optimizer, params, [step], transport.rank)
            compressed.append(optimizer.stats.compressed_elements)
        assert compressed == [73] * (freeze_step - 1) + [273] * 5
        assert (params[2] != start).all()
        return snapshot(params)

    by_rank = on_ranks(2, work)
    assert_replicas_equal(by_rank)
    # its warm-up is plain Adam's
    p = parameters()[2]
    optimizer = Adam([p], lr=0.01)
    for step in range(8, 8 + freeze_step):
        p.grad = mean_gradient(step, 2, 2, p)
        optimizer.step()

    def again(transport: LocalTransport) -> Tensor:
        params = parameters()
        params[2].requires_grad_(False)
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=freeze_step)
        train(optimizer, params, range(8), transport.rank)
        params[2].requires_grad_(True)
        train(optimizer, params, range(8, 8 + freeze_step), transport.rank)
        return params[2].detach()

    for found in on_ranks(2, again):
        assert torch.equal(found, p)


def test_a_tensor_without_gradients_before_the_freeze_warms_up_when_it_gets_them() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=3)
        for step in range(12):
            set_gradients(params, step, transport.rank)
            if step < 6:
                params[2].grad = None
            optimizer.step()
            assert (optimizer.stats.compressed_elements == 273) is (step >= 8), step
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


def test_a_group_added_late_warms_up_by_itself() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        extra = parameters([(7, 9)], seed=5)
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=3)
        train(optimizer, params, range(6), transport.rank)
        optimizer.add_param_group({"params": extra, "lr": 0.1})
        before = snapshot(extra)[0]
        compressed = []
        for step in range(6, 12):
            train(optimizer, [*params, *extra], [step], transport.rank)
            compressed.append(optimizer.stats.compressed_elements)
        assert compressed == [273] * 2 + [336] * 4
        assert (extra[0] != before).all()
        return snapshot([*params, *extra])

    assert_replicas_equal(on_ranks(2, work))


def test_parameters_that_are_frozen_or_never_used_stay() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        params[0].requires_grad_(False)
        start = snapshot(params)
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        for step in range(6):
            set_gradients(params, step, transport.rank)
            params[4].grad = None
            optimizer.step()
        assert torch.equal(params[0], start[0])
        assert torch.equal(params[4], start[4])
        assert not torch.equal(params[1], start[1])
        return snapshot(params)

    assert_replicas_equal(on_ranks(3, work))


def test_a_compressed_parameter_that_is_frozen_later_stays_from_then_on() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        params = parameters()
        optimizer = distribute(AdamW(params, lr=0.01), transport, freeze_step=2)
        train(optimizer, params, range(4), transport.rank)
        params[2].requires_grad_(False)
        params[2].grad = None
        before = params[2].detach().clone()
        train(optimizer, params, range(4, 8), transport.rank)
        assert torch.equal(params[2], before)
        return snapshot(params)

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
def test_replicas_are_equal_after_every_step_whatever_the_shapes(size: int, dtype: torch.dtype, exchange: str) -> None:
    shapes = ((), (1,), (0, 3), (7,), (4, 5), (130,), (2, 0))

    def work(transport: LocalTransport) -> list[list[Tensor]]:
        params = parameters(shapes, dtype=dtype)
        with torch.no_grad():
            transposed = torch.nn.Parameter(parameters([(6, 9)], dtype=dtype)[0].detach().t())
        assert not transposed.is_contiguous()
        params.append(transposed)
        optimizer = distribute(
            AdamW(params, lr=0.01, eps=1e-4), transport, freeze_step=2, exchange=exchange, bucket_elements=100
        )
        start = snapshot(params)
        kept = []
        for step in range(6):
            train(optimizer, params, [step], transport.rank)
            kept.append(snapshot(params))
        assert transposed.dtype == dtype
        for i, p in enumerate(params):
            assert p.numel() == 0 or not torch.equal(start[i], p), i
            assert p.numel() == 0 or (start[i] - p).abs().max() < 1.0, i
        return kept

    by_rank = on_ranks(size, work)
    for step in range(6):
        assert_replicas_equal([kept[step] for kept in by_rank])


def test_half_precision_follows_float32() -> None:
    """The momentum and the update are float32 whatever the parameter is: only its own rounding tells them apart."""

    def work(dtype: torch.dtype) -> Callable[[LocalTransport], Tensor]:
        def on_rank(transport: LocalTransport) -> Tensor:
            params = [torch.nn.Parameter(torch.ones(64, dtype=dtype))]
            optimizer = distribute(Adam(params, lr=0.01, eps=1e-4), transport, freeze_step=3)
            for step in range(20):
                params[0].grad = (torch.linspace(-1, 1, 64) + 0.1 * step).to(dtype)
                optimizer.step()
            return params[0].detach().float()

        return on_rank

    expected = on_ranks(2, work(torch.float32))[0]
    for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
        torch.testing.assert_close(on_ranks(2, work(dtype))[0], expected, rtol=0, atol=tolerance)


def test_every_group_uses_its_own_numbers_in_both_stages() -> None:
    """Each group behaves as it would alone: groups never share a bucket."""
    options = [
        {"lr": 0.01, "betas": (0.9, 0.99)},
        {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1},
        {"lr": 0.001, "betas": (0.0, 0.999), "eps": 1e-2},
    ]

    def together(transport: LocalTransport) -> list[Tensor]:
        params = parameters(SHAPES[:3])
        groups = [{"params": [p], **each} for p, each in zip(params, options, strict=True)]
        train(distribute(Adam(groups), transport, freeze_step=3), params, range(9), transport.rank)
        return snapshot(params)

    def alone(index: int) -> Callable[[LocalTransport], Tensor]:
        def work(transport: LocalTransport) -> Tensor:
            p = parameters(SHAPES[:3])[index]
            optimizer = distribute(Adam([p], **options[index]), transport, freeze_step=3)
            for step in range(9):
                p.grad = gradient(step, transport.rank, index, p)
                optimizer.step()
            return p.detach()

        return work

    by_rank = on_ranks(2, together)
    assert_replicas_equal(by_rank)
    for index in range(3):
        assert torch.equal(by_rank[0][index], on_ranks(2, alone(index))[0]), index


def test_a_learning_rate_that_moves_acts_at_once() -> None:
    def work(transport: LocalTransport) -> None:
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), transport, freeze_step=2)
        train(optimizer, params, range(4), transport.rank)
        before = snapshot(params)
        optimizer.param_groups[0]["lr"] = 0.0
        train(optimizer, params, [4], transport.rank)
        assert_bit_equal(snapshot(params), before)

    on_ranks(2, work)


@pytest.mark.parametrize("size", [2, 3])
def test_training_reaches_what_adam_reaches(size: int) -> None:
    """A noisy quadratic: compressed training ends as near the minimum as plain Adam does."""
    target = torch.linspace(-1, 1, 500)

    def loss_with(compressed: bool) -> float:
        def work(transport: LocalTransport) -> float:
            x = torch.nn.Parameter(torch.zeros(500))
            freeze_step = 50 if compressed else 10_000
            optimizer = distribute(Adam([x], lr=0.02), transport, freeze_step=freeze_step)
            for step in range(400):
                optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
                x.grad = (x.detach() - target) + 0.1 * gradient(step, transport.rank, 0, x)
                optimizer.step()
            return float((x.detach() - target).square().mean())

        return on_ranks(size, work)[0]

    assert loss_with(True) < max(1.5 * loss_with(False), 1e-3)


def test_alone_onebit_adam_is_torchs_adam() -> None:
    left, right = parameters(), parameters()
    train(OneBitAdam(left, lr=0.01, weight_decay=0.1, freeze_step=2), left, range(6), 0)
    train(Adam(right, lr=0.01, weight_decay=0.1), right, range(6), 0)
    assert_bit_equal(left, right)


def test_one_rank_is_plain_adam() -> None:
    def work(transport: LocalTransport) -> None:
        left, right = parameters(), parameters()
        optimizer = distribute(Adam(left, lr=0.01), transport, freeze_step=2)
        train(optimizer, left, range(6), 0)
        train(Adam(right, lr=0.01), right, range(6), 0)
        assert_bit_equal(left, right)
        assert optimizer.stats.bytes_sent == {"warm-up": 0.0, "compression": 0.0}

    on_ranks(1, work)
