"""The update rules: the oracle's numbers, on any array type, the same bits as the fused kernel."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_onebit import kernels, reference
from hvd_onebit.options import CompressionOptions
from hvd_onebit.rules import adam_step, adam_update, bias_correction
from hvd_onebit.wire import message_num_bytes


@pytest.mark.parametrize("bias_corrected", [True, False])
@pytest.mark.parametrize("decoupled", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 7, 100_000])
def test_one_update_is_the_formula_written_out(step: int, decoupled: float, bias_corrected: bool) -> None:
    rng = np.random.default_rng(step)
    x, m, v = rng.normal(size=9), rng.normal(size=9), rng.random(9)
    numbers = adam_step(
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-6,
        step=step,
        variance_steps=5,
        decoupled_weight_decay=decoupled,
        bias_corrected=bias_corrected,
    )
    m_hat = m / (1 - 0.9**step) if bias_corrected else m
    v_hat = v / (1 - 0.99**5) if bias_corrected else v
    expected = x - 0.01 * decoupled * x - 0.01 * m_hat / (np.sqrt(v_hat) + 1e-6)
    assert adam_update(x, m, v, numbers, np.sqrt) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_the_step_size_does_not_drift_after_the_freeze() -> None:
    sizes = [
        adam_step(lr=1.0, betas=(0.9, 0.999), eps=0.0, step=step, variance_steps=100).variance_correction
        for step in (101, 1000, 100_000)
    ]
    assert len(set(sizes)) == 1


@pytest.mark.parametrize(("beta", "steps", "value"), [(0.9, 1, 0.1), (0.5, 2, 0.75), (0.0, 3, 1.0), (0.9, 0, 0.0)])
def test_bias_correction(beta: float, steps: int, value: float) -> None:
    assert bias_correction(beta, steps) == pytest.approx(value)


@pytest.mark.parametrize("num_elements", [1, 7, 64, 1023, 5000])
@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_the_fused_kernel_gives_the_rules_bits(num_elements: int, decay: float) -> None:
    rng = np.random.default_rng(num_elements)
    x, g = (rng.normal(size=num_elements).astype(np.float32) for _ in range(2))
    v = rng.random(num_elements).astype(np.float32)
    message = np.empty(message_num_bytes(num_elements, 100), np.uint8)
    kernels.compress(g, None, 0.0, None, message, block=100, scale="rms")
    m = np.empty_like(x)
    kernels.decompress(message, m, block=100)
    numbers = adam_step(
        lr=0.003,
        betas=(0.9, 0.999),
        eps=1e-8,
        step=11,
        variance_steps=10,
        decoupled_weight_decay=(1 - decay) / 0.003,
    )
    expected = adam_update(x, m, v, numbers, np.sqrt)
    momentum = np.zeros_like(x)
    kernels.adam_apply(
        [message],
        0,
        x,
        momentum,
        v,
        num_elements=num_elements,
        block=100,
        step_size=numbers.step_size,
        eps=numbers.eps,
        variance_correction=numbers.variance_correction,
        decay=numbers.decay,
        hold=False,
    )
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(momentum, m)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_rule_follows_the_oracle_through_a_freeze(decoupled: bool) -> None:
    """Uncompressed: one worker of a compressor without loss, so only the rule is compared."""
    rng = np.random.default_rng(3)
    start = rng.normal(size=4)
    oracle = reference.OneBitAdam(
        start, num_workers=1, freeze_step=3, block=1, lr=0.01, weight_decay=0.1, decoupled=decoupled
    )
    x, m, v = start.copy(), np.zeros(4), np.zeros(4)
    floor = CompressionOptions().variance_floor
    for step in range(1, 12):
        g = rng.normal(size=4)
        oracle.step_workers([g])
        g = g if decoupled else g + 0.1 * x
        m = 0.9 * m + (1 - 0.9) * g
        if step <= 3:
            v = 0.999 * v + (1 - 0.999) * g**2
        variance = v if step <= 3 else np.maximum(v, floor * v.mean())
        numbers = adam_step(
            lr=0.01,
            betas=(0.9, 0.999),
            eps=1e-8,
            step=step,
            variance_steps=min(step, 3),
            decoupled_weight_decay=0.1 if decoupled else 0.0,
        )
        x = adam_update(x, m, variance, numbers, np.sqrt)
        assert x == pytest.approx(oracle.x, rel=1e-12), step
