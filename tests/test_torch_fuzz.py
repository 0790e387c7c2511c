"""Sequences of steps, skipped steps, saves, loads and resizes, over optimizers, shapes, values, ranks and buckets."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import resident_kilobytes
from torch_training import assert_bit_equal, assert_replicas_equal, distribute, on_ranks, snapshot

import hvd_onebit.torch as onebit
from hvd_onebit.state import owed_by_parameter
from hvd_onebit.transport.local import LocalTransport

BETA1, MOMENTUM = 0.9, 0.9
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(BETA1, 0.95), eps=1e-6),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(BETA1, 0.95), eps=1e-6),
    "update": lambda ps: onebit.OneBitAdam(ps, lr=0.01, betas=(BETA1, 0.95), eps=1e-6, space="update"),
    "lamb": lambda ps: onebit.OneBitLamb(ps, lr=0.01, betas=(BETA1, 0.95), eps=1e-6, weight_decay=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=MOMENTUM),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (0, 3), (9, 8), (65,), (130,)]
VALUES = {"usual": 1.0, "tiny": 1e-3, "denormal": 1e-41, "huge": 1e12, "zero": 0.0, "minus zero": -0.0}


@dataclass(frozen=True)
class Setting:
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    options: dict[str, Any]

    def make(self, values: Sequence[torch.Tensor], transport: LocalTransport) -> tuple[Any, list[torch.nn.Parameter]]:
        params = [torch.nn.Parameter(value.clone()) for value in values]
        return distribute(KINDS[self.kind](params), transport, **self.options), params


SETTINGS = st.builds(
    Setting,
    kind=st.sampled_from(sorted(KINDS)),
    shapes=st.lists(st.sampled_from([(), (1,), (7,), (0, 3), (9, 8), (65,), (130,)]), min_size=1, max_size=4).map(
        tuple
    ),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    options=st.fixed_dictionaries(
        {
            "freeze_step": st.integers(1, 3),
            "exchange": st.sampled_from(["one_shot", "two_phase"]),
            "block": st.sampled_from([8, 64, 2048, "tensor"]),
            "bucket_elements": st.sampled_from([16, 100, 1 << 20]),
            "dead": st.sampled_from(["floor", "hold"]),
        }
    ),
)
STEP = st.tuples(st.just("step"), st.integers(0, 99), st.sampled_from(sorted(VALUES)))
OPERATIONS = st.lists(
    st.one_of(
        STEP,
        STEP,
        STEP,
        st.tuples(st.just("skip"), st.integers(0, 3)),
        st.tuples(st.just("save and load")),
        st.tuples(st.just("resize"), st.integers(1, 4)),
    ),
    min_size=3,
    max_size=12,
)


def _gradient(p: torch.Tensor, seed: int, rank: int, index: int, value: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * index + rank)
    size = VALUES[value] if p.dtype == torch.float32 or value != "huge" else 100.0
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return (noise * size).to(p.dtype)


def _owed(optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
    """This rank's part of what training owes: the mean over ranks is the whole."""
    extra = optimizer.state_dict()["onebit"]
    owed = owed_by_parameter(extra["errors"], extra["size"])
    return {name: part.double().numpy() for name, part in owed.items()}


def _momentum(optimizer: Any, p: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    state = optimizer.state[p]["momentum_buffer" if kind == "sgd" else "exp_avg"]
    return np.asarray(state.detach().double().numpy().reshape(-1)).copy()


def _mean(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.asarray(np.mean(parts, axis=0))


def _run(setting: Setting, operations: Sequence[tuple[Any, ...]], size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(setting.dtype) for shape in setting.shapes]
    saved: Any = None
    segments: list[tuple[int, list[tuple[Any, ...]]]] = [(size, [])]
    for operation in operations:
        if operation[0] == "resize":
            segments.append((operation[1], []))
        else:
            segments[-1][1].append(operation)
    left_owing: dict[str, np.ndarray[Any, Any]] = {}
    steps = 0
    for ranks, part in segments:

        def work(
            transport: LocalTransport,
            part: Any = part,
            saved: Any = saved,
            values: Any = values,
            first: int = steps,
        ) -> Any:
            optimizer, params = setting.make(values, transport)
            if saved is not None:
                optimizer.load_state_dict(copy.deepcopy(saved))
            arrived = _owed(optimizer)
            seen: list[tuple[Any, ...]] = []
            done = first
            for operation in part:
                if operation[0] == "save and load":
                    state, now = copy.deepcopy(optimizer.state_dict()), snapshot(params)
                    optimizer, params = setting.make(now, transport)
                    optimizer.load_state_dict(state)
                    continue
                skips = operation[0] == "skip"
                seed, value = (0, "usual") if skips else operation[1:]
                before = (_owed(optimizer), [_momentum(optimizer, p, setting.kind) for p in params], snapshot(params))
                inputs = []
                for index, p in enumerate(params):
                    p.grad = _gradient(p, seed, transport.rank, index, value)
                    inputs.append(p.grad.double().numpy().reshape(-1).copy())
                if skips and transport.rank == operation[1] % transport.size:
                    for p in params:
                        p.grad.fill_(float("nan"))
                compressed = optimizer.stats.stage == "compression"
                optimizer.step()
                if skips and any(p.numel() for p in params):
                    assert_bit_equal(snapshot(params), before[2], "a skipped step must change nothing")
                else:
                    done += 1
                assert optimizer.stats.step == done
                after = (_owed(optimizer), [_momentum(optimizer, p, setting.kind) for p in params])
                seen.append((skips, compressed, before[0], before[1], inputs, *after))
                for p in params:
                    assert torch.isfinite(p.float()).all()
            now = (snapshot(params), _owed(optimizer))
            optimizer.synchronize_for_checkpoint()
            return now, seen, _owed(optimizer), copy.deepcopy(optimizer.state_dict()), arrived, done

        results = on_ranks(ranks, work)
        assert_replicas_equal([result[0][0] for result in results])
        _assert_telescopes(setting, [result[1] for result in results])
        for name in results[0][0][1]:
            whole = _mean([result[0][1][name] for result in results])
            shared = _mean([result[2][name] for result in results])
            np.testing.assert_allclose(shared, whole, rtol=1e-4, atol=1e-5 * (np.abs(whole).max(initial=0) + 1e-30))
        for name in left_owing if ranks > 1 else ():
            arrived = _mean([result[4][name] for result in results])
            np.testing.assert_allclose(arrived, left_owing[name], rtol=1e-4, atol=1e-30)
        left_owing = {name: _mean([result[2][name] for result in results]) for name in results[0][2]}
        saved, values, steps = results[0][3], results[0][0][0], results[0][5]


def _assert_telescopes(setting: Setting, by_rank: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Result + what is owed after = mean input + what was owed before, against float64; nothing is owed for a skip."""
    for step in zip(*by_rank, strict=True):
        skips, compressed = step[0][:2]
        if not compressed:
            continue
        owes_after = step[0][5]
        for index in range(len(setting.shapes)):
            name = f"p{index}"
            if name not in owes_after or name not in step[0][2]:
                continue
            owed_before = _mean([each[2][name] for each in step])
            owed_after = _mean([each[5][name] for each in step])
            scale = max(np.abs(each[k][name]).max(initial=0) for each in step for k in (2, 5))
            if skips:
                # taken back from the message, to rounding of what was sent
                sent = scale + max(np.abs(array).max(initial=0) for each in step for array in (*each[3], *each[4]))
                np.testing.assert_allclose(owed_after, owed_before, rtol=0, atol=1e-6 * sent + 1e-37)
                continue
            if setting.kind not in ("adam", "sgd") or setting.options["dead"] == "hold":
                continue
            beta = MOMENTUM if setting.kind == "sgd" else BETA1
            share = 1.0 if setting.kind == "sgd" else 1 - BETA1
            mean_input = beta * step[0][3][index] + share * _mean([each[4][index] for each in step])
            result = step[0][6][index]
            size = scale + np.abs(mean_input).max(initial=0) + np.abs(result).max(initial=0)
            np.testing.assert_allclose(result + owed_after, mean_input + owed_before, rtol=0, atol=3e-6 * size + 1e-37)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS, operations=OPERATIONS, size=st.integers(1, 4))
def test_whatever_happens_ranks_agree_and_nothing_is_lost(
    setting: Setting, operations: list[tuple[Any, ...]], size: int
) -> None:
    _run(setting, operations, size)


# 0/1 Adam, whose ranks step by themselves between its rounds


def _zero_one(setting: Setting, values: Sequence[torch.Tensor], transport: LocalTransport) -> tuple[Any, list[Any]]:
    params = [torch.nn.Parameter(value.clone()) for value in values]
    options = dict(setting.options)
    optimizer = onebit.ZeroOneAdam(
        params,
        lr=0.01,
        betas=(BETA1, 0.95),
        eps=1e-6,
        var_freeze_step=options.pop("freeze_step"),
        var_update_scaler=2,
        local_step_scaler=2,
        local_step_clipper=4,
    )
    return distribute(optimizer, transport, **options), params


def _run_zero_one(setting: Setting, operations: Sequence[tuple[Any, ...]], size: int, *, loads: bool) -> Any:
    """What every rank holds at the end of each number of ranks."""
    generator = torch.Generator().manual_seed(1)
    values: Any = [torch.randn(shape, generator=generator).to(setting.dtype) for shape in setting.shapes]
    segments: list[tuple[int, list[tuple[Any, ...]]]] = [(size, [])]
    for operation in operations:
        if operation[0] == "resize":
            segments.append((operation[1], []))
        else:
            segments[-1][1].append(operation)
    saved: Any = None
    ends = []
    for ranks, part in segments:

        def work(transport: LocalTransport, part: Any = part, saved: Any = saved, values: Any = values) -> Any:
            optimizer, params = _zero_one(setting, values, transport)
            if saved is not None:
                optimizer.load_state_dict(copy.deepcopy(saved))
            met = []
            for operation in part:
                if operation[0] == "save and load":
                    if loads:
                        state, now = copy.deepcopy(optimizer.state_dict()), snapshot(params)
                        optimizer, params = _zero_one(setting, now, transport)
                        optimizer.load_state_dict(state)
                    continue
                skips = operation[0] == "skip"
                seed, value = (0, "usual") if skips else operation[1:]
                for index, p in enumerate(params):
                    p.grad = _gradient(p, seed, transport.rank, index, value)
                    if skips and transport.rank == operation[1] % transport.size:
                        p.grad.fill_(float("nan"))
                before = optimizer.stats.step, optimizer.stats.rounds, snapshot(params)
                optimizer.step()
                if optimizer.stats.step == before[0]:
                    assert skips, "a step that was skipped without a reason"
                    assert_bit_equal(snapshot(params), before[2], "a skipped step must change nothing")
                met.append(snapshot(params) if optimizer.stats.rounds > before[1] else [])
            alone = snapshot(params)
            optimizer.synchronize_for_checkpoint()
            return met, alone, snapshot(params), copy.deepcopy(optimizer.state_dict())

        results = on_ranks(ranks, work)
        for at_a_round in zip(*(result[0] for result in results), strict=True):
            assert_replicas_equal(at_a_round)
        assert_replicas_equal([result[2] for result in results])
        ends.append([result[1] for result in results])
        saved, values = results[0][3], results[0][2]
    return ends


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(setting=SETTINGS, operations=OPERATIONS, size=st.integers(1, 4))
def test_zero_one_adam_meets_at_its_rounds_whatever_happens(
    setting: Setting, operations: list[tuple[Any, ...]], size: int
) -> None:
    """Replicas are equal at every round and after a shared checkpoint; saving and loading changes no bit."""
    with_loads = _run_zero_one(setting, operations, size, loads=True)
    without = _run_zero_one(setting, operations, size, loads=False)
    for one, other in zip(with_loads, without, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_bit_equal(mine, theirs, "a load changed the training")


# what is made and dropped leaves nothing


def test_optimizers_that_are_dropped_leave_nothing() -> None:
    """A thousand, with state and buckets, are gone, and memory is as it was."""

    def make_and_drop(count: int) -> list[Any]:
        def work(transport: LocalTransport) -> list[Any]:
            params = [torch.nn.Parameter(torch.zeros(2000))]
            alive: list[weakref.ref[Any]] = []
            for _ in range(count):
                optimizer = distribute(torch.optim.Adam(params, lr=0.01), transport, freeze_step=1)
                for _ in range(2):
                    params[0].grad = torch.ones(2000)
                    optimizer.step()
                assert optimizer.stats.stage == "compression"
                alive.append(weakref.ref(optimizer))
                alive.append(weakref.ref(optimizer._onebit))
            return alive

        every = [each for alive in on_ranks(2, work) for each in alive]
        gc.collect()
        return every

    make_and_drop(50)
    before = resident_kilobytes()
    alive = make_and_drop(500)
    assert not any(each() is not None for each in alive)
    # of a thousand each would hold 40 kB
    assert resident_kilobytes() - before < 10_000
