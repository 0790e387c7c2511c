"""Keras 3 callbacks for Horovod: start equal, average metrics, watch the compression.

Horovod's own Keras callbacks don't work with Keras 3. Put these before other callbacks in the list: those that follow,
and Keras's progress bar, see the metrics as these leave them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_onebit import notices
from hvd_onebit.errors import OneBitError
from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.tensorflow.distributed import is_distributed
from hvd_onebit.tensorflow.engine import native

__all__ = ["BroadcastGlobalVariablesCallback", "CompressionMonitor", "MetricAverageCallback", "broadcast_variables"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Makes all ranks go on from one rank's weights and optimizer state.

    That happens when training begins, or after the first batch: Keras builds a model without an Input layer at its
    first batch; until then there's nothing to broadcast. A
    checkpoint that only one rank has restored takes a model that's built everywhere, since ranks compare their state at
    every step.

    Compression errors stay each rank's own. What random generators hold isn't broadcast either: ranks that drew the
    same numbers would drop the same units.

    Args:
        root_rank: the rank to start from.
        process_set: as in Horovod.
    """

    def __init__(self, root_rank: int, process_set: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Collective.

        Raises:
            OneBitError: on all ranks, when the model is built on some of them only.
        """
        if self._done:
            return
        hvd, process_set = _horovod(self._process_set)
        optimizer = self.model.optimizer
        if process_set.size() > 1 and process_set.rank() == 0 and not is_distributed(optimizer):
            notices.not_distributed(type(optimizer).__name__)
        built = hvd.allgather(
            tf.constant([int(self.model.built)], tf.int32), name="onebit.built", process_set=process_set
        ).numpy()
        if built.all():
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()
        elif built.any():
            ranks = ", ".join(map(str, np.flatnonzero(built)))
            raise OneBitError(
                f"the model is built on rank {ranks} only, so that there is nothing to broadcast to: give it a "
                "keras.Input or call model.build(input_shape), on all ranks"
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Collective at the first batch of a model that was not built before."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        _, process_set = _horovod(self._process_set)
        broadcast_variables([*self.model.weights, *self.model.optimizer.variables], self._root_rank, process_set)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's metrics by their mean over ranks.

    Args:
        process_set: as in Horovod.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collective: every rank has the same metrics."""
        hvd, process_set = _horovod(self._process_set)
        if not logs or process_set.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = hvd.allreduce(values, op=hvd.Average, name="onebit.metrics", process_set=process_set)
        for name, mean in zip(names, means.numpy(), strict=True):
            logs[name] = float(mean)


class CompressionMonitor(keras.callbacks.Callback):
    """Adds the optimizer's counters to Keras's logs: the progress bar, TensorBoard and CSVLogger show them.

    onebit_stage is 0 in warm-up and 1 in the compression stage, onebit_bytes what this rank sent in the last step,
    onebit_ratio how many times fewer bytes that is than float32.
    """

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the progress bar's numbers."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the epoch's numbers."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        stats = getattr(self.model.optimizer, "stats", None)
        if logs is None or stats is None:
            return
        # right after the freeze nothing was sent in the new stage yet
        sent = stats.bytes_per_step[stats.stage] or stats.bytes_per_step[WARM_UP]
        logs["onebit_stage"] = float(stats.stage == COMPRESSION)
        logs["onebit_bytes"] = float(sent)
        logs["onebit_ratio"] = stats.uncompressed_bytes_per_step / sent if sent else 1.0


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: Any) -> None:
    """Collective: gives every rank the values of one.

    Raises:
        OneBitError: on all ranks, when the variables differ in number, shape or dtype.
    """
    import horovod.tensorflow as hvd

    variables = [native(v) for v in variables]
    shapes = repr([(tuple(v.shape), v.dtype.name) for v in variables]).encode()
    digests = hvd.allgather(
        tf.constant([zlib.crc32(shapes)], tf.int64), name="onebit.broadcast.shapes", process_set=process_set
    ).numpy()
    if len(set(digests.tolist())) > 1:
        raise OneBitError("the ranks' models or optimizers differ in their variables: build the same on every rank")

    # not by hvd.broadcast_variables: its names hold those that Keras counts up, "adam_2" may be "adam_1" elsewhere
    @tf.function(autograph=False)
    def broadcast() -> None:
        for i, variable in enumerate(variables):
            # Horovod's operations do not know bfloat16; these bits are not looked at
            value = tf.bitcast(variable, tf.float16) if variable.dtype == tf.bfloat16 else variable
            value = hvd.broadcast(
                value, root_rank, name=f"onebit.broadcast.{i}", ignore_name_scope=True, process_set=process_set
            )
            variable.assign(tf.bitcast(value, variable.dtype) if variable.dtype == tf.bfloat16 else value)

    broadcast()


def _horovod(process_set: Any) -> tuple[Any, Any]:
    import horovod.tensorflow as hvd

    return hvd, hvd.global_process_set if process_set is None else process_set
