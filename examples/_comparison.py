"""What `pytorch_mnist.py --compare` trains beside 1-bit Adam."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats, ring_allreduce_bytes
from hvd_onebit.step import Inputs, StepExchange
from hvd_onebit.torch.codec import codec_for
from hvd_onebit.torch.transport import HorovodTransport

__all__ = ["all_methods"]


def all_methods(one_bit_adam: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Each method's name and what makes its optimizer from the model and the command line's arguments."""
    return {
        "Adam": _horovod_adam,
        "1-bit Adam": one_bit_adam,
        "1-bit Adam, no error feedback": partial(one_bit_adam, error_feedback=False),
        "naive 1-bit Adam": _naive_adam,
    }


def _horovod_adam(model: nn.Module, args: argparse.Namespace) -> Any:
    """Horovod's own distributed Adam, all in full precision; counts what it hands to allreduce."""
    stats = Stats()
    optimizer = hvd.DistributedOptimizer(
        _CountedAdam(model.parameters(), lr=args.lr), model.named_parameters(), compression=_Counted(stats)
    )
    optimizer.stats, optimizer.freeze_step = stats, args.freeze_step
    return _with_state(optimizer)


def _with_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with Adam's state at zero: hvd.broadcast_optimizer_state would make an update to create it."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


class _Counted:
    """hvd.Compression.none, counting bytes as a ring's, as hvd_onebit does for its own full-precision stage."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        self._stats.count(ring_allreduce_bytes(tensor.numel() * tensor.element_size(), hvd.size()))
        return tensor, None

    def decompress(self, tensor: Tensor, context: None) -> Tensor:
        return tensor


class _CountedAdam(torch.optim.Adam):
    """torch.optim.Adam that closes the step's count; nothing is compressed after `freeze_step`, only compared."""

    stats: Stats
    freeze_step: int

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.stats.end_step(WARM_UP if self.stats.step < self.freeze_step else COMPRESSION, skipped=False)
        return loss


def _naive_adam(model: nn.Module, args: argparse.Namespace) -> Any:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return _with_state(_NaiveOneBitAdam(names, parameters, lr=args.lr, freeze_step=args.freeze_step))


class _NaiveOneBitAdam(torch.optim.Adam):
    """torch.optim.Adam whose gradients travel as bits, with error feedback, after `freeze_step` updates.

    The obvious idea, and the one that fails: it compresses the gradient instead of the momentum and goes on updating
    the variance from what arrives. A sign has no magnitude, so all coordinates of a block get the same square, and
    Adam loses what makes it adaptive (Tang et al. 2021, arXiv 2102.02888, section 3).
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], *, lr: float, freeze_step: int) -> None:
        super().__init__(parameters, lr=lr)
        self.stats = Stats()
        self._parameters = parameters
        # alone it stays Adam, as 1-bit Adam does
        self._freeze_step = freeze_step if hvd.size() > 1 else float("inf")
        self._transport = HorovodTransport(hvd.global_process_set)
        self._exchange = CompressedAllreduce(
            Bucket("naive", tuple(names), tuple(p.numel() for p in parameters)),
            rank=hvd.rank(),
            size=hvd.size(),
            codec=codec_for(torch.device("cpu")),
            options=CompressionOptions(),
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Collective: one update."""
        gradient = torch.cat([p.grad.flatten() for p in self._parameters])
        stage = WARM_UP if self.stats.step < self._freeze_step else COMPRESSION
        averaged = self._average(gradient) if stage == WARM_UP else self._average_bits(gradient)
        parts = averaged.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            p.grad = part.view_as(p)
        super().step()
        self.stats.end_step(stage, skipped=False)

    def _average(self, gradient: Tensor) -> Tensor:
        self.stats.count(ring_allreduce_bytes(gradient.numel() * gradient.element_size(), hvd.size()))
        return self._transport.allreduce(gradient, name="naive.gradient").wait()

    def _average_bits(self, gradient: Tensor) -> Tensor:
        in_flight = StepExchange(self._transport, self.stats)
        in_flight.start(self._exchange, Inputs.of(gradient))
        in_flight.finish()
        averaged = torch.empty_like(gradient)
        self._exchange.average(averaged)
        in_flight.commit()
        return averaged
