"""The oracle: n workers simulated in float64, straight from the papers' equations, slow and plain.

It shares no code with the fast path, so that a fault in one shows against the other. Tang et al. 2021,
arXiv 2102.02888 (1-bit Adam).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "Adam",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitSGD",
    "ZeroOneAdam",
    "compress",
    "compressed_allreduce_one_shot",
    "compressed_allreduce_two_phase",
]

Vector = npt.NDArray[np.float64]


def compress(z: Vector, block: int, scale: str = "rms") -> Vector:
    """The compressed vector C(z) = s * sgn(z), sgn(0) = +1, one scale a block; the last block may be short."""
    out = np.empty_like(z)
    for start in range(0, len(z), block):
        part = z[start : start + block]
        s = np.sqrt(np.mean(part**2)) if scale == "rms" else np.mean(np.abs(part))
        out[start : start + block] = np.where(part >= 0, s, -s)
    return out


def compressed_allreduce_one_shot(
    inputs: Sequence[Vector], worker_errors: list[Vector], block: int, scale: str = "rms"
) -> Vector:
    """Mean over workers of C(b_i + e_i); worker_errors are replaced in the list."""
    total = np.zeros_like(inputs[0])
    for i, b in enumerate(inputs):
        z = b + worker_errors[i]
        sent = compress(z, block, scale)
        worker_errors[i] = z - sent
        total += sent
    return total / len(inputs)


def compressed_allreduce_two_phase(
    inputs: Sequence[Vector],
    worker_errors: list[Vector],
    server_errors: list[Vector],
    cuts: Sequence[int],
    block: int,
    scale: str = "rms",
) -> Vector:
    """Algorithm 1's compressed_allreduce: server j averages chunk [cuts[j], cuts[j+1]) and compresses it again."""
    sent = []
    for i, b in enumerate(inputs):
        z = b + worker_errors[i]
        c = np.empty_like(z)
        for low, high in itertools.pairwise(cuts):
            c[low:high] = compress(z[low:high], block, scale)
        worker_errors[i] = z - c
        sent.append(c)
    out = np.empty_like(inputs[0])
    for j, (low, high) in enumerate(itertools.pairwise(cuts)):
        y = np.mean([c[low:high] for c in sent], axis=0) + server_errors[j]
        out[low:high] = compress(y, block, scale)
        server_errors[j] = y - out[low:high]
    return out


class Adam:
    """Adam and AdamW on one vector (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

    def __init__(
        self,
        x: Vector,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self.x = np.array(x, np.float64)
        self.m = np.zeros_like(self.x)
        self.v = np.zeros_like(self.x)
        self.t = 0
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.decoupled = weight_decay, decoupled

    def decayed(self, g: Vector) -> Vector:
        """The gradient with coupled weight decay."""
        return g if self.decoupled else g + self.weight_decay * self.x

    def step(self, g: Vector) -> None:
        b1, b2 = self.betas
        g = self.decayed(g)
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        self._move(self.t)

    def _move(self, variance_steps: int) -> None:
        b1, b2 = self.betas
        m = self.m / (1 - b1**self.t)
        v = self.v / (1 - b2**variance_steps)
        if self.decoupled:
            self.x = self.x - self.lr * self.weight_decay * self.x
        self.x = self.x - self.lr * m / (np.sqrt(v) + self.eps)


class OneBitAdam(Adam):
    """1-bit Adam with n simulated workers: `freeze_step` updates of Adam, then frozen v and compressed momentum."""

    def __init__(
        self,
        x: Vector,
        *,
        num_workers: int,
        freeze_step: int,
        cuts: Sequence[int] | None = None,
        block: int = 2048,
        scale: str = "rms",
        variance_floor: float = 0.01,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        super().__init__(x, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
        self.freeze_step, self.block, self.scale, self.variance_floor = freeze_step, block, scale, variance_floor
        self.cuts = cuts
        self.worker_errors = [np.zeros_like(self.x) for _ in range(num_workers)]
        self.server_errors = [np.zeros(high - low) for low, high in itertools.pairwise(cuts)] if cuts else []

    def step_workers(self, gradients: Sequence[Vector]) -> None:
        """One step from every worker's own gradient."""
        if self.t < self.freeze_step:
            self.step(np.mean(gradients, axis=0))
            if self.t == self.freeze_step:
                self.v = np.maximum(self.v, self.variance_floor * np.mean(self.v))
            return
        b1 = self.betas[0]
        inputs = [b1 * self.m + (1 - b1) * self.decayed(np.asarray(g, np.float64)) for g in gradients]
        if self.cuts is None:
            self.m = compressed_allreduce_one_shot(inputs, self.worker_errors, self.block, self.scale)
        else:
            self.m = compressed_allreduce_two_phase(
                inputs, self.worker_errors, self.server_errors, self.cuts, self.block, self.scale
            )
        self.t += 1
        self._move(self.freeze_step)


class OneBitSGD:
    """SGD with momentum whose momentum travels compressed after `freeze_step` updates, n simulated workers."""

    def __init__(
        self,
        x: Vector,
        *,
        num_workers: int,
        freeze_step: int,
        lr: float,
        momentum: float,
        block: int = 2048,
        scale: str = "rms",
        weight_decay: float = 0.0,
    ) -> None:
        self.x = np.array(x, np.float64)
        self.m = np.zeros_like(self.x)
        self.t = 0
        self.freeze_step, self.lr, self.mu, self.weight_decay = freeze_step, lr, momentum, weight_decay
        self.block, self.scale = block, scale
        self.worker_errors = [np.zeros_like(self.x) for _ in range(num_workers)]

    def step_workers(self, gradients: Sequence[Vector]) -> None:
        inputs = [self.mu * self.m + g + self.weight_decay * self.x for g in gradients]
        if self.t < self.freeze_step:
            self.m = np.mean(inputs, axis=0)
        else:
            self.m = compressed_allreduce_one_shot(inputs, self.worker_errors, self.block, self.scale)
        self.t += 1
        self.x = self.x - self.lr * self.m


class OneBitLamb:
    """1-bit LAMB (Li et al. 2021, arXiv 2104.06069) on a list of tensors, all in one block-scaled buffer.

    `buffer_order` gives the tensors' order in that buffer.
    """

    def __init__(
        self,
        xs: Sequence[Vector],
        *,
        num_workers: int,
        freeze_step: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        block: int = 2048,
        scale: str = "rms",
        variance_floor: float = 0.01,
        buffer_order: Sequence[int],
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        self.xs = [np.array(x, np.float64) for x in xs]
        self.ms = [np.zeros_like(x) for x in self.xs]
        self.vs = [np.zeros_like(x) for x in self.xs]
        self.fresh: list[Vector] = []
        self.t = 0
        self.freeze_step, self.lr, self.betas, self.eps, self.weight_decay = freeze_step, lr, betas, eps, weight_decay
        self.block, self.scale, self.variance_floor, self.order = block, scale, variance_floor, list(buffer_order)
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self.c_avg = [0.0] * len(self.xs)
        self.c_updates = [0] * len(self.xs)
        self.r_last = [1.0] * len(self.xs)
        self.scaling = [1.0] * len(self.xs)
        self.worker_errors = [np.zeros(sum(x.size for x in self.xs)) for _ in range(num_workers)]

    def coefficient(self, k: int) -> float:
        return self.c_avg[k] / (1 - self.coeff_beta ** self.c_updates[k]) if self.c_updates[k] else 1.0

    def step_workers(self, gradients: Sequence[Sequence[Vector]]) -> None:
        """One step; gradients[i][k] is worker i's gradient of tensor k."""
        self.t += 1
        if self.t <= self.freeze_step:
            self._warm_up([np.mean([g[k] for g in gradients], axis=0) for k in range(len(self.xs))])
        else:
            self._compressed(gradients)

    def _warm_up(self, gs: Sequence[Vector]) -> None:
        b1, b2 = self.betas
        for k, g in enumerate(gs):
            self.ms[k] = b1 * self.ms[k] + (1 - b1) * g
            self.vs[k] = b2 * self.vs[k] + (1 - b2) * g**2
            m, v = self.ms[k] / (1 - b1**self.t), self.vs[k] / (1 - b2**self.t)
            u = m / (np.sqrt(v) + self.eps) + self.weight_decay * self.xs[k]
            nx, nu = np.linalg.norm(self.xs[k]), np.linalg.norm(u)
            c = 1.0
            if nx > 0 and nu > 0:
                c = float(np.clip(nx / nu, self.min_coeff, self.max_coeff))
                self.c_avg[k] = self.coeff_beta * self.c_avg[k] + (1 - self.coeff_beta) * c
                self.c_updates[k] += 1
            self.xs[k] = self.xs[k] - self.lr * c * u
        if self.t == self.freeze_step:
            self.vs = [np.maximum(v, self.variance_floor * np.mean(v)) for v in self.vs]
            self.fresh = [v.copy() for v in self.vs]
            q = [float(np.sqrt(np.mean(m**2))) for m in self.ms]
            mean = np.mean([each for each in q if each > 0])
            self.scaling = [float(mean / each) if each > 0 else 1.0 for each in q]

    def _compressed(self, gradients: Sequence[Sequence[Vector]]) -> None:
        b1, b2 = self.betas
        inputs = [
            np.concatenate([(b1 * self.ms[k] + (1 - b1) * g[k]) * self.scaling[k] for k in self.order])
            for g in gradients
        ]
        flat = compressed_allreduce_one_shot(inputs, self.worker_errors, self.block, self.scale)
        cuts = np.cumsum([self.xs[k].size for k in self.order])[:-1]
        for k, part in zip(self.order, np.split(flat, cuts), strict=True):
            m = part / self.scaling[k]
            g = (m - b1 * self.ms[k]) / (1 - b1)
            self.ms[k] = m
            self.fresh[k] = b2 * self.fresh[k] + (1 - b2) * g**2
            frozen = np.sqrt(self.vs[k] / (1 - b2**self.freeze_step)) + self.eps
            fresh = np.sqrt(self.fresh[k] / (1 - b2**self.t)) + self.eps
            r = float(np.max(frozen / fresh))
            direction = m / (1 - b1**self.t) / frozen
            u = direction + self.weight_decay * self.xs[k]
            if self.weight_decay:
                p = min(1.0, float(np.linalg.norm(direction) / np.linalg.norm(u)))
                r = r * p + 1 - p
            r = float(np.clip(r, self.factor_min, self.factor_max))
            last = self.r_last[k]
            r = float(np.clip(r, (1 - self.factor_threshold) * last, (1 + self.factor_threshold) * last))
            self.r_last[k] = r
            self.xs[k] = self.xs[k] - self.lr * r * self.coefficient(k) * u


class ZeroOneAdam:
    """0/1 Adam (Lu et al. 2022, arXiv 2202.06009, algorithm 1) with n simulated workers.

    `variance_steps` and `sync_steps` are T_v and T_u, counted from 1. In a step of T_v the variance is updated before
    it is used, so that the first step does not divide by zero; it is corrected by its number of updates, and floored
    tensor by tensor when it is used (`sizes`: the tensors' elements, in order).
    """

    def __init__(
        self,
        x: Vector,
        *,
        num_workers: int,
        variance_steps: set[int],
        sync_steps: set[int],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        block: int = 2048,
        scale: str = "mean",
        variance_floor: float = 0.01,
        sizes: Sequence[int],
        decoupled_weight_decay: float = 0.0,
    ) -> None:
        n = num_workers
        self.xs = [np.array(x, np.float64) for _ in range(n)]
        self.anchor = np.array(x, np.float64)
        self.ms = [np.zeros_like(self.anchor) for _ in range(n)]
        self.us = [np.zeros_like(self.anchor) for _ in range(n)]
        self.v = np.zeros_like(self.anchor)
        self.t = self.v_updates = 0
        self.lr_sum = 0.0
        self.variance_steps, self.sync_steps, self.sizes = variance_steps, sync_steps, list(sizes)
        self.betas, self.eps, self.block, self.scale, self.variance_floor = betas, eps, block, scale, variance_floor
        self.decay = decoupled_weight_decay
        self.worker_errors = [np.zeros_like(self.anchor) for _ in range(n)]

    def step_workers(self, gradients: Sequence[Vector], lr: float) -> None:
        b1, b2 = self.betas
        self.t += 1
        if self.t in self.variance_steps:
            self.v = b2 * self.v + (1 - b2) * np.mean(gradients, axis=0) ** 2
            self.v_updates += 1
        parts = np.split(self.v, np.cumsum(self.sizes)[:-1])
        floored = np.concatenate([np.maximum(part, self.variance_floor * np.mean(part)) for part in parts])
        root = np.sqrt(floored / (1 - b2**self.v_updates)) + self.eps
        rate = lr / (1 - b1**self.t)
        self.lr_sum += rate
        self.anchor = self.anchor * (1 - lr * self.decay)
        for i, g in enumerate(gradients):
            self.ms[i] = b1 * self.ms[i] + (1 - b1) * g
            self.xs[i] = self.xs[i] * (1 - lr * self.decay) - rate * self.ms[i] / root
            self.us[i] = self.us[i] + rate * self.ms[i]
        if self.t in self.sync_steps and self.lr_sum > 0:
            u = compressed_allreduce_one_shot(self.us, self.worker_errors, self.block, self.scale)
            self.anchor = self.anchor - u / root
            for i in range(len(self.xs)):
                self.ms[i], self.xs[i], self.us[i] = u / self.lr_sum, self.anchor.copy(), np.zeros_like(u)
            self.lr_sum = 0.0
