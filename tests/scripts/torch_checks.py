"""Checks of hvd_onebit.torch under a real launcher: see rank_checks.py."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from rank_checks import FOLDER, check, heard, run_checks
from torch import Tensor
from torch_training import SHAPES, assert_bit_equal, gradient, mean_gradient, parameters, set_gradients, snapshot

import hvd_onebit.torch as onebit
from hvd_onebit.errors import OneBitError

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW

# -- helpers --


def distribute(optimizer: torch.optim.Optimizer, *, prefix: str = "p", **options: Any) -> Any:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    named: Any = {"named_parameters": [(f"{prefix}{i}", p) for i, p in enumerate(every)], "check_every": 1}
    return onebit.DistributedOptimizer(optimizer, **{**named, "measure": False, **options})


def backward(
    params: Sequence[Tensor], step: int, *, rank: int | None = None, only: Sequence[int] | None = None
) -> None:
    """Autograd's own pass, hooks and all, that leaves exactly `gradient(...)` in .grad."""
    rank = hvd.rank() if rank is None else rank
    used = [(i, p) for i, p in enumerate(params) if p.requires_grad and (only is None or i in only)]
    if used:
        torch.stack([(p * gradient(step, rank, i, p)).sum().float() for i, p in used]).sum().backward()


def train(optimizer: Any, params: Sequence[Tensor], steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()


def assert_replicas(params: Sequence[Tensor], what: str = "") -> None:
    everyone = hvd.allgather_object([p.detach() for p in params])
    for rank, replica in enumerate(everyone):
        assert_bit_equal(replica, everyone[0], f"rank {rank} {what}")


def assert_close_to_plain(params: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    """To the bit for two ranks; more are summed in an order that is Horovod's own."""
    if hvd.size() == 2:
        assert_bit_equal(list(params), list(plain))
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def plain_adam(cls: type, steps: Sequence[int], shapes: Any = SHAPES, **kwargs: Any) -> list[Tensor]:
    params = parameters(shapes)
    optimizer = cls(params, **kwargs)
    for step in steps:
        for index, p in enumerate(params):
            p.grad = mean_gradient(step, hvd.size(), index, p)
        optimizer.step()
    return snapshot(params)


# -- numbers --


@check
def warm_up_is_torchs_optimizer() -> None:
    for cls, kwargs in (
        (Adam, {}),
        (AdamW, {"amsgrad": True}),
        (Adam, {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    ):
        params = parameters()
        optimizer = distribute(cls(params, lr=0.01, **kwargs), freeze_step=5)
        train(optimizer, params, range(5))
        assert optimizer.stats.stage == "compression"
        assert_close_to_plain(params, plain_adam(cls, range(5), lr=0.01, **kwargs))


@check
def replicas_stay_equal() -> None:
    for exchange in ("one_shot", "two_phase"):
        params = parameters()
        optimizer = distribute(AdamW(params, lr=0.01), freeze_step=2, exchange=exchange, block=8, bucket_elements=60)
        for step in range(8):
            train(optimizer, params, [step])
            assert_replicas(params, f"{exchange}, step {step}")
        assert optimizer.stats.stage == "compression"


@check
def any_dtype_and_shape() -> None:
    shapes = ((), (1,), (0, 3), (7,), (130,))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        params = parameters(shapes, dtype=dtype)
        params.append(torch.nn.Parameter(parameters([(6, 9)], dtype=dtype)[0].detach().t()))
        optimizer = distribute(Adam(params, lr=0.01, eps=1e-4), freeze_step=2)
        train(optimizer, params, range(5))
        # float64 is not rounded to float32: it stays in full precision, and then there is nothing to compress
        assert optimizer.stats.stage == ("warm-up" if dtype == torch.float64 else "compression")
        assert_replicas(params, str(dtype))


@check
def full_precision_follows_adam() -> None:
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=2, full_precision=["p2"])
    train(optimizer, params, range(8))
    assert_close_to_plain(params[2:3], plain_adam(Adam, range(8), lr=0.01)[2:3])
    assert optimizer.stats.compressed_elements == 73


@check
def same_bits() -> None:
    """The parameters after 12 steps, for the test to compare with another launcher's and the local transport's."""
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=4)
    train(optimizer, params, range(12))
    torch.save(snapshot(params), FOLDER / f"same_bits.{hvd.rank()}.pt")


# -- ranks --


@check
def none_gradient_on_one_rank() -> None:
    for freeze_step in (2, 50):
        trained = []
        for missing in (True, False):
            params = parameters()
            optimizer = distribute(Adam(params, lr=0.01), freeze_step=freeze_step)
            for step in range(6):
                optimizer.zero_grad()
                lacking = hvd.rank() == 1 and step in (1, 3, 4)
                backward(params, step, only=(3, 4) if lacking else None)
                if lacking and not missing:
                    torch.stack([(p * 0.0).sum() for p in params[:3]]).sum().backward()
                optimizer.step()
                assert_replicas(params, f"step {step}")
            trained.append(snapshot(params))
        assert_bit_equal(*trained)


@check
def nan_on_one_rank() -> None:
    params = parameters()
    optimizer = distribute(AdamW(params, lr=0.01), freeze_step=3)
    for step in range(8):
        optimizer.zero_grad()
        if step in (1, 5) and hvd.rank() == hvd.size() - 1:
            with torch.no_grad():
                bad = params[1] * float("nan")
            backward(params, step, only=(0, 2, 3, 4))
            (params[1] * bad).sum().backward()
        else:
            backward(params, step)
        before = snapshot(params)
        optimizer.step()
        if step in (1, 5):
            assert_bit_equal(snapshot(params), before)
        assert_replicas(params, f"step {step}")
    assert optimizer.stats.steps_skipped == 2
    assert optimizer.stats.step == 6


@check
def too_many_skipped_steps() -> None:
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=2, max_skipped_steps=3)
    train(optimizer, params, range(4))
    errors = []
    for step in range(4, 7):
        optimizer.zero_grad()
        backward(params, step, only=(1, 2, 3, 4))
        (params[0] * float("inf" if hvd.rank() == 0 else "1")).sum().backward()
        try:
            optimizer.step()
        except OneBitError as error:
            errors.append(str(error))
    everyone = hvd.allgather_object(errors)
    assert len(errors) == 1
    assert "3 steps in a row" in errors[0]
    assert all(each == errors for each in everyone)


# -- Horovod's idioms --


@check
def broadcast_leaves_a_fresh_optimizer_unchanged() -> None:
    params, twins = parameters(), parameters()
    optimizer, twin = (distribute(Adam(each, lr=0.01), freeze_step=3) for each in (params, twins))
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_parameters([(f"p{i}", p) for i, p in enumerate(params)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = optimizer.state_dict()
    assert str(after["param_groups"]) == str(before["param_groups"])
    assert str(after["state"]) == str(before["state"])
    assert optimizer.stats.step == 0
    train(optimizer, params, range(6))
    train(twin, twins, range(6))
    assert_bit_equal(params, twins, "with and without the broadcast")


@check
def broadcast_carries_a_restored_stage() -> None:
    """Only rank 0 restores a checkpoint of either stage; every rank then goes on in it, and says what it lacks."""
    for stop in (1, 6):
        params = parameters()
        source = distribute(Adam(params, lr=0.01), freeze_step=3)
        train(source, params, range(stop))
        saved, kept = copy.deepcopy(source.state_dict()), snapshot(params)
        fresh = [torch.nn.Parameter(x.clone() if hvd.rank() == 0 else torch.zeros_like(x)) for x in kept]
        optimizer = distribute(Adam(fresh, lr=0.01 if hvd.rank() == 0 else 0.5), freeze_step=3)
        if hvd.rank() == 0:
            optimizer.load_state_dict(saved)
        hvd.broadcast_parameters([(f"p{i}", p) for i, p in enumerate(fresh)], root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with heard() as messages:
            train(optimizer, fresh, range(stop, stop + 4))
        said = [f"rank {hvd.rank()} got its state by a broadcast" in message for message in messages]
        assert sum(said) == (stop == 6 and hvd.rank() > 0), messages
        assert optimizer.stats.step == stop + 4
        assert optimizer.stats.stage == "compression"
        assert_replicas(fresh)


def _errors_in(state_dict: dict[str, Any]) -> list[Tensor]:
    """This rank's own."""
    return [each["worker_error"] for each in state_dict["onebit"]["errors"].values()]


@check
def broadcast_in_the_middle_of_training() -> None:
    """Rank 0 goes back to a checkpoint while the others have gone on, and brings them back with it."""
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=3)
    train(optimizer, params, range(5))
    saved, kept = copy.deepcopy(optimizer.state_dict()), snapshot(params)
    train(optimizer, params, range(5, 8))
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
        assert_bit_equal(_errors_in(optimizer.state_dict()), _errors_in(saved))
        with torch.no_grad():
            for p, x in zip(params, kept, strict=True):
                p.copy_(x)
    hvd.broadcast_parameters([(f"p{i}", p) for i, p in enumerate(params)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with heard() as messages:
        train(optimizer, params, range(5, 9))
    assert not messages, "compression errors are there"
    assert_replicas(params)
    assert optimizer.stats.step == 9


@check
def backward_passes_per_step() -> None:
    """Two passes and a step are one exchange: the same bytes and bits as one pass with the summed gradient."""
    for freeze_step in (2, 50):
        params, twins = parameters(), parameters()
        optimizer = distribute(Adam(params, lr=0.01), freeze_step=freeze_step, backward_passes_per_step=2)
        twin = distribute(Adam(twins, lr=0.01), freeze_step=freeze_step)
        for step in range(6):
            optimizer.zero_grad()
            backward(params, 2 * step)
            backward(params, 2 * step + 1)
            optimizer.step()
            twin.zero_grad()
            terms = [
                (p * (gradient(2 * step, hvd.rank(), i, p) + gradient(2 * step + 1, hvd.rank(), i, p))).sum()
                for i, p in enumerate(twins)
            ]
            torch.stack(terms).sum().backward()
            twin.step()
            assert_bit_equal(params, twins, f"step {step}")
        assert optimizer.stats.step == 6
        assert optimizer.stats.bytes_sent == twin.stats.bytes_sent


@check
def synchronize_clip_skip_synchronize() -> None:
    for freeze_step in (2, 50):
        params, twins, clipped = parameters(), parameters(), parameters()
        optimizer, twin, clipping = (
            distribute(Adam(each, lr=0.01), freeze_step=freeze_step) for each in (params, twins, clipped)
        )
        for step in range(6):
            for each, own in ((optimizer, params), (twin, twins), (clipping, clipped)):
                each.zero_grad()
                backward(own, step)
                if each is not twin:
                    each.synchronize()
                    if each is clipping:
                        torch.nn.utils.clip_grad_norm_(own, 0.1)
                    with each.skip_synchronize():
                        each.step()
                else:
                    each.step()
            assert_bit_equal(params, twins, f"step {step}")
            assert_replicas(clipped)
        assert optimizer.stats.bytes_sent == twin.stats.bytes_sent == clipping.stats.bytes_sent
        if freeze_step == 2:
            norm = torch.cat([clipping.state[p]["exp_avg"].reshape(-1) for p in clipped]).norm()
            assert norm <= 0.1001


@check
def local_clipping() -> None:
    """Hooks send nothing before the norm is known: as gradients that were clipped before anyone saw them."""
    for passes in (1, 2):
        params, twins = parameters(), parameters()
        options = {"freeze_step": 2, "bucket_elements": 60, "backward_passes_per_step": passes}
        optimizer = distribute(Adam(params, lr=0.01), local_clip_norm=0.5, **options)
        twin = distribute(Adam(twins, lr=0.01), **{**options, "backward_passes_per_step": 1})
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(passes):
                backward(params, step)
            own = [passes * gradient(step, hvd.rank(), i, p) for i, p in enumerate(twins)]
            norm = torch.stack([g.double().square().sum() for g in own]).sum().sqrt()
            for p, g in zip(twins, own, strict=True):
                p.grad = g * float(0.5 / norm)
            if step % 2:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            twin.step()
            assert_replicas(params, f"step {step}")
            for mine, theirs in zip(params, twins, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert optimizer.stats.bytes_sent == twin.stats.bytes_sent


@check
def sum_predivide_compression_groups() -> None:
    """Horovod's other arguments: their effect in warm-up is Horovod's, replicas stay equal afterwards."""
    size = hvd.size()
    summed, averaged = parameters(), parameters()
    by_sum = distribute(Adam(summed, lr=0.01, eps=1e-3 * size), freeze_step=2, op=hvd.Sum)
    by_mean = distribute(Adam(averaged, lr=0.01, eps=1e-3), freeze_step=2)
    train(by_sum, summed, range(6))
    train(by_mean, averaged, range(6))
    for p, q in zip(summed, averaged, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    for options in (
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"num_groups": 2},
    ):
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), freeze_step=2, **options)
        train(optimizer, params, range(6))
        assert optimizer.stats.stage == "compression"
        assert_replicas(params, str(options))
        half = 0.5 if "compression" in options else 1.0
        assert optimizer.stats.bytes_per_step["warm-up"] == half * by_mean.stats.bytes_per_step["warm-up"], options
    params = parameters()
    grouped = distribute(Adam(params, lr=0.01), freeze_step=2, groups=[params[:2], params[2:]])
    train(grouped, params, range(6))
    assert_replicas(params)


@check
def sparse_gradients() -> None:
    for freeze_step in (1, 50):
        weights = {}
        for sparse in (True, False):
            table = torch.nn.Embedding(10, 4, sparse=sparse)
            with torch.no_grad():
                table.weight.fill_(1.0)
            optimizer = onebit.DistributedOptimizer(
                Adam(table.parameters(), lr=0.01),
                named_parameters=table.named_parameters(),
                freeze_step=freeze_step,
                sparse_as_dense=True,
            )
            for _ in range(4):
                optimizer.zero_grad()
                table(torch.tensor([2, 5 + hvd.rank(), 2])).sum().backward()
                optimizer.step()
            weights[sparse] = table.weight.detach()
            assert_replicas([table.weight])
        assert_bit_equal([weights[True]], [weights[False]])
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = onebit.DistributedOptimizer(
        Adam(table.parameters()), named_parameters=table.named_parameters(), freeze_step=1
    )
    loss = table(torch.tensor([1])).sum()
    with pytest.raises(TypeError, match="'weight' has a sparse gradient"):
        loss.backward()


@check
def parameters_that_come_late() -> None:
    """A layer unfrozen after the freeze and a group added then: warm-up of their own, in which hooks send them."""
    params, extra = parameters(), parameters([(7, 9)], seed=5)
    params[2].requires_grad_(False)
    start = snapshot(params)[2]
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=3)
    train(optimizer, params, range(5))
    assert torch.equal(params[2], start)
    params[2].requires_grad_(True)
    optimizer.add_param_group({"params": extra, "lr": 0.1})
    compressed = []
    for step in range(5, 10):
        optimizer.zero_grad()
        backward([*params, *extra], step)
        # the first step with them finds them, and sends them when backward is over
        assert all((p in optimizer._handles) == (step > 5) for p in extra), "sent while backward runs"
        optimizer.step()
        compressed.append(optimizer.stats.compressed_elements)
        assert_replicas([*params, *extra], f"step {step}")
    assert compressed == [73] * 2 + [336] * 3, compressed
    assert not torch.equal(params[2], start)


@check
def frozen_and_unused_parameters() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    start = snapshot(params)
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=2)
    for step in range(6):
        optimizer.zero_grad()
        backward(params, step, only=(0, 1, 2, 3))
        optimizer.step()
        assert_replicas(params)
    assert torch.equal(params[0], start[0])
    assert torch.equal(params[4], start[4])


@check
def pickle_and_deepcopy() -> None:
    for stop in (1, 6):
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), freeze_step=3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        train(optimizer, params, range(stop))
        copies = [
            copy.deepcopy((params, optimizer, scheduler)),
            pickle.loads(pickle.dumps((params, optimizer, scheduler))),
        ]
        train(optimizer, params, range(stop, 8))
        for twins, twin, twin_scheduler in copies:
            assert twin_scheduler.optimizer is twin
            assert twin.param_groups[0]["params"][0] is twins[0]
            train(twin, twins, range(stop, 8))
            assert_bit_equal(twins, params, f"copied after {stop}")
            assert twin.stats.stage == "compression"
        torch.save(scheduler.state_dict(), FOLDER / f"scheduler.{hvd.rank()}.pt")


@check
def two_optimizers_at_once() -> None:
    left, right = parameters(), parameters([(30,)], seed=3)
    one = distribute(Adam(left, lr=0.01), freeze_step=2)
    two = distribute(Adam(right, lr=0.01), freeze_step=3, named_parameters=[("right", right[0])])
    idle = distribute(Adam(parameters(), lr=0.01), freeze_step=2) if hvd.rank() == 0 else None
    for step in range(6):
        one.zero_grad()
        two.zero_grad()
        backward(left, step)
        backward(right, step)
        two.step()
        one.step()
    assert_replicas([*left, *right])
    assert one.stats.stage == two.stats.stage == "compression"
    del idle


@check
def zero_grad_too_early() -> None:
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=9)
    backward(params, 0)
    with pytest.raises(OneBitError, match=r"before step\(\) or synchronize\(\)"):
        optimizer.zero_grad()
    optimizer.step()


@check
def steps_that_are_given_up() -> None:
    """Another backward() and synchronize() take the place of one that was not used; nothing collides or is lost."""
    for overlap in (True, False):
        params, twins = parameters(), parameters()
        optimizer, twin = (
            distribute(Adam(each, lr=0.01), freeze_step=2, exchange="two_phase", bucket_elements=60, overlap=overlap)
            for each in (params, twins)
        )
        for step in range(8):
            for each, own in ((optimizer, params), (twin, twins)):
                each.zero_grad()
                backward(own, step)
                if each is optimizer and step > 2:
                    errors = [bucket.exchange.worker_error.clone() for bucket in each._onebit._all_buckets()]
                    each.synchronize()
                    for p in own:
                        p.grad = None
                    backward(own, step)
                    for bucket, before in zip(each._onebit._all_buckets(), errors, strict=True):
                        if not overlap:
                            torch.testing.assert_close(bucket.exchange.worker_error, before, rtol=1e-5, atol=1e-5)
                each.step()
            if step <= 2:
                assert_bit_equal(params, twins, f"step {step}")
            else:
                assert_replicas(params, f"step {step}")
        assert optimizer.stats.step == twin.stats.step == 8
        for mine, theirs in zip(params, twins, strict=True):
            # signs of what is next to zero may turn by a rounding
            assert float((mine - theirs).detach().abs().mean()) < 2e-3


@check
def load_state_dict_too_early() -> None:
    for steps in (1, 4):
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), freeze_step=2)
        train(optimizer, params, range(steps))
        saved = optimizer.state_dict()
        backward(params, steps)
        with pytest.raises(OneBitError, match=r"load_state_dict\(\) was called after backward\(\)"):
            optimizer.load_state_dict(saved)
        optimizer.synchronize()
        optimizer.load_state_dict(saved)
        train(optimizer, params, range(steps, steps + 3))
        assert optimizer.stats.step == steps + 3
        assert_replicas(params)
        # Elastic goes back to the last commit after a collective that failed
        handler = onebit.elastic.OptimizerStateHandler(optimizer, f"early.{steps}")
        backward(params, steps + 3)
        handler.restore()


@check
def closure() -> None:
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=2)

    def loss_of(step: int) -> Callable[[], Any]:
        def compute() -> Any:
            optimizer.zero_grad()
            backward(params, step)
            return step

        return compute

    for step in range(5):
        assert optimizer.step(loss_of(step)) == step
    twins = parameters()
    train(distribute(Adam(twins, lr=0.01), freeze_step=2), twins, range(5))
    assert_bit_equal(params, twins)


# -- state --


@check
def resume_bit_for_bit() -> None:
    """The original goes on beside its checkpoint: from three ranks on Horovod's own sums differ from run to run."""
    for stop in (3, 4, 5, 7) if hvd.size() == 2 else (4, 5, 7):
        params = parameters()
        optimizer = distribute(Adam(params, lr=0.01), freeze_step=4, exchange="two_phase")
        train(optimizer, params, range(stop))
        file = FOLDER / f"checkpoint.{stop}.{hvd.rank()}.pt"
        torch.save({"optimizer": optimizer.state_dict(), "params": snapshot(params)}, file)
        train(optimizer, params, range(stop, 9))
        saved = torch.load(file, weights_only=True)
        resumed = [torch.nn.Parameter(x) for x in saved["params"]]
        optimizer = distribute(Adam(resumed, lr=0.01), freeze_step=4, exchange="two_phase")
        optimizer.load_state_dict(saved["optimizer"])
        train(optimizer, resumed, range(stop, 9))
        assert_bit_equal(resumed, params, f"stopped after {stop}")


# -- disagreements: every rank raises the same error (last, as they leave gradients under way) --


def _assert_all_raise(optimizer: Any, params: Sequence[Tensor], says: str) -> None:
    before = snapshot(params)
    text = None
    try:
        train(optimizer, params, [9])
    except OneBitError as error:
        text = str(error)
    assert text is not None
    everyone = hvd.allgather_object(text)
    assert len(set(everyone)) == 1, everyone
    assert says in text, text
    assert_bit_equal(params, before)


@check
def disagree_on_an_option() -> None:
    params = parameters()
    _assert_all_raise(
        distribute(Adam(params), prefix="option", freeze_step=2 + hvd.rank()),
        params,
        "freeze_step: rank 0: 2; rank 1: 3",
    )


@check
def disagree_on_the_model() -> None:
    params = parameters([(8, 5), (5,)] if hvd.rank() == 0 else [(8, 5), (6,), (7,)])
    _assert_all_raise(
        distribute(Adam(params), prefix="model", freeze_step=2), params, "number of parameters: rank 0: 2; rank 1"
    )


@check
def disagree_on_the_stage() -> None:
    """A checkpoint restored on one rank only, without a broadcast: a single line forgotten."""
    params = parameters()
    optimizer = distribute(Adam(params), prefix="stage", freeze_step=2)
    train(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(1, 5))
    if hvd.rank() == 1:
        optimizer.load_state_dict(saved)
    _assert_all_raise(optimizer, params, "stage: rank 0")


# -- a process set smaller than the world --


@check
def process_set() -> None:
    members = hvd.add_process_set([0, 2])
    params = parameters()
    optimizer = distribute(Adam(params, lr=0.01), freeze_step=2, process_set=members)
    for step in range(6):
        optimizer.zero_grad()
        if hvd.rank() != 1:
            backward(params, step, rank=members.rank())
        else:
            set_gradients(params, step, 7)
        if hvd.rank() != 1 or step < 3:
            optimizer.step()
    everyone = hvd.allgather_object(snapshot(params))
    assert_bit_equal(everyone[2], everyone[0])
    if hvd.rank() == 1:
        alone = parameters()
        plain = Adam(alone, lr=0.01)
        for step in range(3):
            set_gradients(alone, step, 7)
            plain.step()
        assert_bit_equal(params, alone, "the rank outside steps by itself")
        assert optimizer.stats.bytes_sent["compression"] == 0
    else:
        assert optimizer.stats.stage == "compression"
        assert optimizer.stats.bytes_sent["compression"] > 0
        torch.save(snapshot(params), FOLDER / f"process_set.{members.rank()}.pt")


@check
def notices() -> None:
    """Only one rank speaks."""
    params = parameters()
    with heard(logging.INFO) as messages:
        optimizer = distribute(Adam(params), freeze_step=2, measure=True)
        train(optimizer, params, range(4))
    texts = ("is early", "measured in", "Expected: float32", "compression starts:")
    said = [sum(text in message for message in messages) for text in texts]
    assert said == ([1] * 4 if hvd.rank() == 0 else [0] * 4), messages
    assert all(plan == optimizer.stats.plan for plan in hvd.allgather_object(optimizer.stats.plan))


def main() -> int:
    warnings.simplefilter("error")
    # Horovod's own, on every interpreter of today
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    hvd.init()
    return run_checks(hvd.rank())


if __name__ == "__main__":
    sys.exit(main())
