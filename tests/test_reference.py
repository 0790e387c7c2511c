"""The oracle itself, against arithmetic done by hand and the papers' invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_onebit import reference


def test_compress_by_hand() -> None:
    z = np.array([3.0, -4.0, 0.0, -0.0, 1.0])
    assert reference.compress(z, 2, "rms") == pytest.approx([12.5**0.5, -(12.5**0.5), 0, 0, 1])
    assert reference.compress(z, 2, "mean") == pytest.approx([3.5, -3.5, 0, 0, 1])
    assert reference.compress(z, 99, "mean") == pytest.approx([1.6, -1.6, 1.6, 1.6, 1.6])


@pytest.mark.parametrize(("scale", "bound"), [("mean", lambda rho: 1 - rho**2), ("rms", lambda rho: 2 * (1 - rho))])
def test_relative_error_of_compression(scale: str, bound: object) -> None:
    z = np.random.default_rng(0).normal(size=1000)
    rho = np.abs(z).sum() / (np.sqrt(len(z)) * np.linalg.norm(z))
    relative = np.linalg.norm(z - reference.compress(z, len(z), scale)) ** 2 / np.linalg.norm(z) ** 2
    assert relative == pytest.approx(bound(rho))  # type: ignore[operator]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("two_phase", [False, True])
def test_the_error_telescopes(size: int, two_phase: bool) -> None:
    rng = np.random.default_rng(size)
    d = 50
    cuts = [d * i // size for i in range(size + 1)]
    worker = [np.zeros(d) for _ in range(size)]
    server = [np.zeros(high - low) for low, high in itertools.pairwise(cuts)]
    given, received = np.zeros(d), np.zeros(d)
    for _ in range(100):
        inputs = [rng.normal(size=d) for _ in range(size)]
        given += np.mean(inputs, axis=0)
        if two_phase:
            received += reference.compressed_allreduce_two_phase(inputs, worker, server, cuts, 8)
        else:
            received += reference.compressed_allreduce_one_shot(inputs, worker, 8)
    owed = np.mean(worker, axis=0) + (np.concatenate(server) if two_phase else 0)
    assert received + owed == pytest.approx(given, abs=1e-10)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_against_two_steps_by_hand(decoupled: bool) -> None:
    adam = reference.Adam(np.array([1.0]), lr=0.1, betas=(0.5, 0.5), eps=0.0, weight_decay=0.2, decoupled=decoupled)
    adam.step(np.array([2.0]))
    assert adam.x == pytest.approx([0.88 if decoupled else 0.9])  # the first step is lr*sign(g), plus decay
    g = 2.0 if decoupled else 2.0 + 0.2 * 0.9
    adam.step(np.array([2.0]))
    first = 2.0 if decoupled else 2.2
    m = (0.25 * first + 0.5 * g) / 0.75
    v = (0.25 * first**2 + 0.5 * g**2) / 0.75
    before = 0.88 * 0.98 if decoupled else 0.9
    assert adam.x == pytest.approx([before - 0.1 * m / v**0.5])


@pytest.mark.parametrize("freeze_step", [1, 2, 5])
def test_onebit_adam_makes_exactly_freeze_step_full_updates(freeze_step: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    plain = reference.Adam(x, lr=0.01)
    onebit = reference.OneBitAdam(x, num_workers=3, freeze_step=freeze_step, lr=0.01, variance_floor=0.0)
    for step in range(1, 8):
        gradients = [rng.normal(size=20) for _ in range(3)]
        onebit.step_workers(gradients)
        plain.step(np.mean(gradients, axis=0))
        assert np.array_equal(onebit.x, plain.x) is (step <= freeze_step)
        if step == freeze_step:
            frozen = onebit.v.copy()
        if step >= freeze_step:
            assert np.array_equal(onebit.v, frozen)
