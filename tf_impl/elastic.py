"""Horovod Elastic for Keras 3: a state object that keeps what training owes when ranks come and go.

    state = onebit.elastic.TensorFlowKerasState(model, epoch=0)
    train(state)  # decorated with onebit.elastic.run

Horovod's own state object does not know Keras 3, and its `run` takes most errors for a good end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvd_onebit import notices
from hvd_onebit.state import weight_of_owed
from hvd_onebit.tensorflow.callbacks import broadcast_variables
from hvd_onebit.tensorflow.distributed import forget_names, is_distributed
from hvd_onebit.tensorflow.engine import CompressionEngine, native, owes, unpack_errors

__all__ = ["TensorFlowKerasState", "run"]

_PREFIX = "onebit.elastic"
# graphs name a failed operation by its own name, and where it was made; eager code by its kind
_OPERATION = re.compile(r"Horovod has been shut down|horovod_?(allreduce|allgather|alltoall|broadcast)", re.IGNORECASE)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """As hvd.elastic.run: the function starts again, with its state synchronised, whenever ranks come or go.

    It knows the errors of all of Horovod's operations, and hides no other error. Make any tf.function of your own
    inside the function: its graph holds the numbers of the ranks that it was traced for. The model's own are made anew.
    """

    @functools.wraps(function)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        with _horovods_errors():
            return function(state, *args, **kwargs)

    wrapped: Callable[..., Any] = run_fn(guarded, _reset)
    return wrapped


def _reset() -> None:
    hvd.shutdown()
    hvd.init()


@contextmanager
def _horovods_errors() -> Iterator[None]:
    """Turns TensorFlow's errors into Horovod's where another rank is what failed."""
    try:
        yield
    except tf.errors.OpError as error:
        if "OneBitError" in error.message or not _OPERATION.search(error.message):
            raise
        raise HorovodInternalError(error.message) from error


class TensorFlowKerasState(ObjectState):
    """The state of a Keras model and its optimizer, made by `DistributedOptimizer`.

    What the ranks' error feedback still owes survives a change of ranks:

    * When ranks are added or removed in an orderly way, the ranks share their errors before the old world ends, and
      each goes on with the mean: nothing is lost.
    * When a rank dies, its errors are lost with it, and the log says so. What a survivor owes keeps the weight that it
      had, 1/n of the old n ranks.
    * A newcomer owes nothing.

    `commit()` keeps the variables and this rank's errors, `restore()` brings back just that.

    Args:
        model: built.
        optimizer: the model's own by default.
        **kwargs: as in Horovod: plain attributes that are kept and synchronised, too.

    Raises:
        TypeError: an optimizer that averages nothing.
        ValueError: a model that is not built; an optimizer on a process set other than the global one, or on a
            transport of its own.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if not model.built:
            raise ValueError("the model must be built first: give it a keras.Input, or call model.build(input_shape)")
        if not is_distributed(self.optimizer):
            raise TypeError(f"{type(self.optimizer).__name__} averages nothing: wrap it in DistributedOptimizer first")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        settings = self._inner._settings.value
        if settings.transport is not None or settings.process_set.process_set_id != 0:
            raise ValueError(
                "Horovod Elastic changes the whole world, so its optimizers average over all of it: leave process_set "
                "and transport out of DistributedOptimizer"
            )
        self._owed: dict[str, Any] | None = None  # of a world that is gone, until the next sync()
        self.optimizer.enter_world(_PREFIX)
        self._keep()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Keeps everything in host memory. Not collective."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Brings back what was kept. Not collective."""
        for variable, value in zip(self._variables, self._saved_variables, strict=True):
            native(variable).assign(value)
        about, _ = unpack_errors(self._saved_errors)
        transport = self._engine.transport
        fits = about["shared"] or (about["rank"], about["size"]) == (transport.rank, transport.size)
        self._engine.load(self._saved_errors if fits else None)
        self._owed = None if fits else self._saved_errors
        super().restore()

    def check_host_updates(self) -> None:
        """Collective: as Horovod's; before it interrupts training, the ranks share what they owe."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.optimizer.synchronize_for_checkpoint()
            raise

    def reset(self) -> None:
        """Takes up a new world. Not collective: newcomers do not come here."""
        super().reset()
        forget_names()
        if self._owed is None:
            errors = self._engine.state()
            self._owed = None if unpack_errors(errors)[0]["shared"] else errors
        self.optimizer.enter_world(_PREFIX, self._owed)
        if self.model.train_function is not None:
            self.model.make_train_function(force=True)

    def sync(self) -> None:
        """Collective: rank 0's state for everybody, and the mean of what the ranks owe."""
        with _horovods_errors():
            self._sync()
            self._keep()
            super().sync()

    def _sync(self) -> None:
        about, errors = unpack_errors(self._engine.state() if self._owed is None else self._owed)
        self._owed = None
        step = int(native(self._inner.iterations))
        mine = {"step": step, "size": about["size"], "shared": about["shared"], "owes": owes(errors)}
        root = hvd.broadcast_object(mine, 0, name=f"{_PREFIX}.root")
        broadcast_variables(self._variables, 0, hvd.global_process_set)
        if hvd.rank() != 0:
            self._engine.load(None)
        weight = weight_of_owed(mine, root, rank=hvd.rank(), size=hvd.size())
        self._engine.share_owed(errors, about["size"], weight)
        given = sum(hvd.allgather_object(bool(weight), name=f"{_PREFIX}.given"))
        if hvd.rank() == 0 and root["owes"] and not root["shared"] and given < root["size"]:
            notices.errors_lost_with_ranks(root["size"] - given, root["size"])

    def _keep(self) -> None:
        self._saved_variables = [np.array(native(v).numpy()) for v in self._variables]
        self._saved_errors = self._engine.state()

    @property
    def _inner(self) -> Any:
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    @property
    def _engine(self) -> CompressionEngine:
        engine: CompressionEngine = self._inner._engine.value
        return engine

    @property
    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]
