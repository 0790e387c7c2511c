"""The oracle: n workers simulated in float64, straight from the papers' equations, slow and plain.

It shares no code with the fast path, so that a fault in one shows against the other. Tang et al. 2021,
arXiv 2102.02888 (1-bit Adam).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Adam", "OneBitAdam", "compress", "compressed_allreduce_one_shot", "compressed_allreduce_two_phase"]

Vector = npt.NDArray[np.float64]


def compress(z: Vector, block: int, scale: str = "rms") -> Vector:
    """C(z) = s * sgn(z), sgn(0) = +1, one scale a block; the last block may be short."""
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
    """Algorithm 1's compressed_allreduce: chunk j = [cuts[j], cuts[j+1]) is averaged and compressed again by server j."""
    sent = []
    for i, b in enumerate(inputs):
        z = b + worker_errors[i]
        c = np.empty_like(z)
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            c[low:high] = compress(z[low:high], block, scale)
        worker_errors[i] = z - c
        sent.append(c)
    out = np.empty_like(inputs[0])
    for j, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
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
        self.server_errors = [np.zeros(high - low) for low, high in zip(cuts[:-1], cuts[1:], strict=True)] if cuts else []

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
