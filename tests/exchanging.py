"""What the tests of the exchange share: one bucket a rank, inputs for it, and what all ranks must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.hosts import HostGroups, hierarchical_place
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.stats import COMPRESSION, Stats
from hvd_onebit.step import Inputs, StepExchange
from hvd_onebit.transport.local import LocalTransport

__all__ = ["ALGORITHMS", "BUCKET", "EPS", "Array", "Worker", "assert_same_on_all_ranks", "inputs"]

Array = npt.NDArray[Any]

ALGORITHMS = ("one_shot", "two_phase")
SIZES = (300, 1, 64, 0, 2500, 9)  # of the tensors in the bucket
BUCKET = Bucket("bucket", tuple(f"p{i}" for i in range(len(SIZES))), SIZES)
EPS = 2.0**-24


class Worker:
    """One rank with one bucket, which exchanges what it is given: inside its host first, if the options say so."""

    def __init__(self, transport: LocalTransport, options: CompressionOptions, bucket: Bucket = BUCKET) -> None:
        self.transport = transport
        self.place = hierarchical_place(options, transport.place)
        self.groups = None if self.place is None else HostGroups[Array](transport, self.place)
        if self.groups is not None:
            self.groups.connect()
        self.stats = Stats()
        self.step = StepExchange[Array](transport, self.stats, self.groups)
        self.exchange = CompressedAllreduce[Array](
            bucket, rank=transport.rank, size=transport.size, codec=HostCodec(), options=options, place=self.place
        )

    def start(self, gradient: Array, momentum: Array | None = None, beta1: float = 0.0) -> None:
        self.step.start(self.exchange, Inputs.of(gradient, momentum, beta1))

    def mean(self) -> Array:
        values = np.empty(self.exchange.bucket.num_elements, np.float32)
        self.exchange.average(values)
        return values

    def run(self, gradient: Array, momentum: Array | None = None, beta1: float = 0.0) -> Array:
        self.start(gradient, momentum, beta1)
        assert self.step.finish()
        values = self.mean()
        self.step.commit()
        self.stats.end_step(COMPRESSION, skipped=False)
        return values

    def errors(self) -> tuple[Array, Array]:
        """Copies of the worker's and the server's error, empty without one."""
        none = np.empty(0, np.float32)
        worker, server = self.exchange.worker_error, self.exchange.server_error
        return (none if worker is None else worker.copy()), (none if server is None else server.copy())


def inputs(seed: int, rank: int, num_elements: int = BUCKET.num_elements) -> Array:
    """Values of mixed magnitude, other ones on every rank."""
    rng = np.random.default_rng([seed, rank])
    return (rng.normal(size=num_elements) * 10.0 ** rng.uniform(-3, 1, num_elements)).astype(np.float32)


def assert_same_on_all_ranks(results: Sequence[Array]) -> None:
    """Raises AssertionError unless all ranks have the same bits."""
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32), err_msg=f"rank {rank}")
