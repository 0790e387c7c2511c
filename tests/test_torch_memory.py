"""What the compression stage keeps in memory, and that nobody sees how it is kept."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from memory import count_while_all_hold

torch = pytest.importorskip("torch")

from torch_training import (  # noqa: E402 - torch may be missing
    assert_bit_equal,
    assert_replicas_equal,
    distribute,
    on_ranks,
    parameters,
    set_gradients,
    snapshot,
    train,
)

import hvd_onebit.torch as onebit  # noqa: E402
from hvd_onebit.transport.local import LocalTransport  # noqa: E402

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": lambda params, **options: onebit.OneBitAdam(params, lr=0.01, **options),
    "update space": lambda params, **options: onebit.OneBitAdam(params, lr=0.01, space="update", **options),
    "hold": lambda params, **options: onebit.OneBitAdam(params, lr=0.01, dead="hold", **options),
    "lamb": lambda params, **options: onebit.OneBitLamb(params, lr=0.01, weight_decay=0.1, **options),
    "sgd": lambda params, **options: onebit.OneBitSGD(params, lr=0.01, **options),
}
TENSORS, ELEMENTS = 64, 1 << 17


def tensor_bytes() -> int:
    """Bytes that all living tensors hold together."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # not isinstance: some objects warn when they are asked
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("exchange", "kept_bytes"), [("one_shot", 2 / 8), ("two_phase", 1 / 8 + 4 / 2)], ids=["one_shot", "two_phase"]
)
def test_adam_keeps_little_more_than_plain_adam(exchange: str, kept_bytes: float) -> None:
    """8.5 bytes of state a parameter, working memory and messages included, beside two_phase's server errors."""
    size, counted = 2, []

    def work(transport: LocalTransport) -> None:
        params = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(TENSORS)]
        optimizer = distribute(
            torch.optim.AdamW(params), transport, freeze_step=1, exchange=exchange, bucket_elements=ELEMENTS
        )
        for step in range(4):
            for p in params:
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
        counted.extend(count_while_all_hold(transport, tensor_bytes))
        assert optimizer.stats.stage == "compression"

    before = tensor_bytes()
    on_ranks(size, work)
    num_elements = size * TENSORS * ELEMENTS
    per_parameter = (counted[0] - before) / num_elements - 4  # the parameters themselves
    # variance and worker error, messages, and one bucket to work in
    assert 8 + kept_bytes <= per_parameter <= 8 + kept_bytes + 4 / TENSORS + 0.02
    assert per_parameter <= 8.5 + (2 if exchange == "two_phase" else 0)


@pytest.mark.parametrize("exchange", ["one_shot", "two_phase"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_looking_at_the_state_changes_nothing(name: str, exchange: str) -> None:
    def work(transport: LocalTransport, look: Callable[[Any], Any]) -> list[Any]:
        params = parameters()
        optimizer = distribute(OPTIMIZERS[name](params, freeze_step=3, exchange=exchange), transport)
        for step in range(9):
            train(optimizer, params, [step], transport.rank)
            look(optimizer)
        key = "momentum_buffer" if name == "sgd" else "exp_avg"
        return [*snapshot(params), *(optimizer.state[p][key].clone() for p in params)]

    unseen = on_ranks(2, lambda transport: work(transport, lambda optimizer: None))
    assert_replicas_equal(unseen)
    for look in (lambda optimizer: optimizer.state, lambda optimizer: optimizer.state_dict(), copy.deepcopy):
        for mine, theirs in zip(on_ranks(2, lambda transport, look=look: work(transport, look)), unseen, strict=True):
            assert_bit_equal(mine, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_comes_and_goes(name: str) -> None:
    """It is bits between steps, float32 for whoever looks, and float32 after the user's own change of gradients."""
    key = "momentum_buffer" if name == "sgd" else "exp_avg"

    def work(transport: LocalTransport) -> list[Any]:
        params = parameters()
        optimizer = distribute(OPTIMIZERS[name](params, freeze_step=2), transport)
        train(optimizer, params, range(4), transport.rank)
        raw = optimizer.__dict__["state"]
        assert not any(key in raw[p] for p in params)
        seen = optimizer.state[params[0]][key]
        assert seen.shape == params[0].shape
        optimizer.state[params[0]][key].zero_()  # is taken at its word
        train(optimizer, params, [4], transport.rank)
        assert not any(key in raw[p] for p in params)
        set_gradients(params, 5, transport.rank)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        clipped = [p.grad.clone() for p in params]
        with optimizer.skip_synchronize():
            optimizer.step()
        if name not in ("update space", "hold"):
            assert_bit_equal([raw[p][key] for p in params], clipped)
        train(optimizer, params, [6], transport.rank)
        assert not any(key in raw[p] for p in params)
        return snapshot(params)

    assert_replicas_equal(on_ranks(3, work))


def test_a_momentum_set_by_hand_is_used() -> None:
    def work(transport: LocalTransport, by_hand: bool) -> list[Any]:
        params = parameters()
        optimizer = distribute(OPTIMIZERS["adam"](params, freeze_step=2), transport)
        train(optimizer, params, range(4), transport.rank)
        if by_hand:
            optimizer.state[params[0]]["exp_avg"].mul_(-3.0)
        train(optimizer, params, [4], transport.rank)
        return snapshot(params)

    left, right = (on_ranks(2, lambda t, by_hand=by_hand: work(t, by_hand)) for by_hand in (False, True))
    assert not torch.equal(left[0][0], right[0][0])
    assert_replicas_equal(right)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_momentum_is_not_mixed_with_the_bits_of_the_old_one(name: str) -> None:
    """Back to a checkpoint of the warm-up in the process that is past it; torch looks at the state while it loads."""

    def work(transport: LocalTransport, goes_back: bool) -> list[Any]:
        params = parameters()
        optimizer = distribute(OPTIMIZERS[name](params, freeze_step=4), transport)
        train(optimizer, params, range(2), transport.rank)
        if goes_back:
            saved, at = copy.deepcopy(optimizer.state_dict()), snapshot(params)
            train(optimizer, params, range(2, 7), transport.rank)
            optimizer.load_state_dict(saved)
            with torch.no_grad():
                for p, value in zip(params, at, strict=True):
                    p.copy_(value)
        train(optimizer, params, range(10, 17), transport.rank)
        return snapshot(params)

    straight, back = (on_ranks(2, lambda t, goes_back=goes_back: work(t, goes_back)) for goes_back in (False, True))
    for mine, theirs in zip(back, straight, strict=True):
        assert_bit_equal(mine, theirs)
