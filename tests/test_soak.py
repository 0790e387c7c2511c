"""A long run with skips, saves and resizes: short here, 20,000 steps in `make soak`."""

from __future__ import annotations

import copy
import gc
import os
import random
from typing import Any

import numpy as np
import torch
from memory import resident_kilobytes
from torch_training import assert_replicas_equal, distribute, on_ranks, snapshot

from hvd_onebit.state import owed_by_parameter
from hvd_onebit.transport.local import LocalTransport

STEPS = int(os.environ.get("HVD_ONEBIT_SOAK_STEPS", "1200"))
SHAPES = [(40, 25), (17,), (900,)]
WORLD_STEPS = 100  # then the number of ranks changes
BETA1 = 0.9


def _owed(optimizer: Any) -> np.ndarray[Any, Any]:
    extra = optimizer.state_dict()["onebit"]
    owed = owed_by_parameter(extra["errors"], extra["size"])
    return np.concatenate([owed[f"p{i}"].double().numpy() for i in range(len(SHAPES))])


def _momentum(optimizer: Any, params: list[torch.nn.Parameter]) -> np.ndarray[Any, Any]:
    return np.concatenate([optimizer.state[p]["exp_avg"].double().numpy().reshape(-1) for p in params])


def _world(size: int, first: int, steps: int, saved: Any, values: list[torch.Tensor]) -> list[Any]:
    def work(transport: LocalTransport) -> Any:
        choose = random.Random(first)  # the same on every rank
        params = [torch.nn.Parameter(value.clone()) for value in values]
        make = {"freeze_step": 20, "exchange": "two_phase", "block": 64, "bucket_elements": 1000}
        optimizer = distribute(torch.optim.Adam(params, lr=1e-3, betas=(BETA1, 0.95)), transport, **make)
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved))
        noise = torch.Generator().manual_seed(100 * first + transport.rank)
        missing = 0.0  # sum of inputs minus sum of results, in float64; what is owed must be just that
        start = _owed(optimizer) if optimizer.stats.stage == "compression" else 0.0
        skipped = done = 0
        while done < steps:
            for p, value in zip(params, values, strict=True):
                p.grad = p.detach() - 0.5 * value + 0.3 * torch.randn(p.shape, generator=noise)
            inputs = torch.cat([p.grad.reshape(-1) for p in params]).double().numpy()  # type: ignore[union-attr]
            bad, victim = choose.random() < 0.05, choose.randrange(size)
            if bad and transport.rank == victim:
                params[1].grad[3] = float("nan")  # type: ignore[index]
            compressed = optimizer.stats.stage == "compression"
            before = _momentum(optimizer, params)
            optimizer.step()
            done += not bad
            skipped += bad
            if compressed and not bad:
                missing = missing + BETA1 * before + (1 - BETA1) * inputs - _momentum(optimizer, params)
            elif not compressed:
                start = 0.0
            if choose.random() < 0.02:
                state, now = copy.deepcopy(optimizer.state_dict()), snapshot(params)
                params = [torch.nn.Parameter(value) for value in now]
                optimizer = distribute(torch.optim.Adam(params, lr=1e-3, betas=(BETA1, 0.95)), transport, **make)
                optimizer.load_state_dict(state)
        owed = _owed(optimizer)
        optimizer.synchronize_for_checkpoint()
        return snapshot(params), missing, start, owed, copy.deepcopy(optimizer.state_dict()), skipped

    return on_ranks(size, work)


def test_a_long_run_keeps_replicas_equal_memory_flat_and_owes_what_it_did_not_send() -> None:
    choose = random.Random(0)
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in SHAPES]
    saved: Any = None
    size, done, skipped, resident = 3, 0, 0, 0
    while done < STEPS:
        results = _world(size, done, WORLD_STEPS, saved, values)
        assert_replicas_equal([result[0] for result in results])
        missing, start, owed = (np.mean([result[k] for result in results], axis=0) for k in (1, 2, 3))
        # a rounding of float32 in every step
        np.testing.assert_allclose(owed, start + missing, rtol=0, atol=2e-6 * WORLD_STEPS * np.abs(owed).max())
        values, saved = results[0][0], results[0][4]
        done, skipped = done + WORLD_STEPS, skipped + results[0][5]
        size = choose.choice([2, 3, 3, 4])
        if not resident and done >= STEPS // 3:
            gc.collect()
            resident = resident_kilobytes()
    gc.collect()
    assert skipped > STEPS // 50
    assert resident_kilobytes() - resident < 20_000
