"""Horovod Elastic: a state object whose optimizers keep what training owes when ranks come and go.

    state = onebit.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    train(state)  # decorated with hvd.elastic.run

Horovod's own state object would give rank 0's compression errors to every rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic.state import StateHandler
from torch import Tensor

from hvd_onebit import notices
from hvd_onebit.state import weight_of_owed
from hvd_onebit.torch.distributed import forget_names

__all__ = ["OptimizerStateHandler", "TorchState"]

_SMALL = 256  # elements of a tensor that travels inside the pickled state

State = dict[str, Any]


class TorchState(hvd.elastic.TorchState):
    """As hvd.elastic.TorchState, with our own handler for the optimizers of `DistributedOptimizer`.

    What the ranks' error feedback still owes survives a change of ranks:

    * When ranks are added or removed in an orderly way, the ranks share their errors before the old world ends, and
      each goes on with the mean: nothing is lost.
    * When a rank dies, its errors are lost with it, and the log says so. What a survivor owes keeps the weight that it
      had, 1/n of the old n ranks: it was to be delivered with that weight, and a heavier one would deliver gradients
      that nobody has computed.
    * A newcomer owes nothing.

    `commit()` keeps the optimizer's state with this rank's errors, `restore()` brings back just that.

    Args:
        model: as in Horovod.
        optimizer: as in Horovod.
        **kwargs: as in Horovod: further models, optimizers, samplers, and plain attributes.

    Raises:
        ValueError: an optimizer on a process set other than the global one, or on a transport of its own.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        for name, handler in self._handlers.items():
            if hasattr(type(handler.value), "_onebit_base"):
                self._handlers[name] = OptimizerStateHandler(handler.value, name)

    def check_host_updates(self) -> None:
        """Collective: as Horovod's; before it interrupts training, the ranks share what they owe."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            for handler in self._onebit_handlers():
                handler.share()
            raise

    def reset(self) -> None:
        """Takes up a new world. Not collective: newcomers do not come here."""
        super().reset()
        forget_names()
        for handler in self._onebit_handlers():
            handler.reset()

    def _onebit_handlers(self) -> list[OptimizerStateHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, OptimizerStateHandler)]


class OptimizerStateHandler(StateHandler):
    """Saves, restores and synchronises an optimizer made by `hvd_onebit.torch.DistributedOptimizer`.

    Args:
        value: the optimizer.
        name: its name in the state object, the same on every rank.
    """

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value)
        self._name = name
        self._owed: State | None = None  # of a world that is gone, until the next sync()
        self._enter_world()
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value._forget_handles()  # what was under way when a rank died never arrives
        errors = self._saved["onebit"]
        transport = self.value._transport
        if errors["shared"] or (errors["rank"], errors["size"]) == (transport.rank, transport.size):
            self.value.load_state_dict(self._saved)
            self._owed = None
        else:
            self.value.load_state_dict({**self._saved, "onebit": {**errors, "errors": {}}})
            self._owed = errors

    def set_value(self, value: Any) -> None:
        self.value = value
        self._enter_world()
        self.save()

    def share(self) -> None:
        """Collective: gives every rank the mean of what the ranks owe, while they are still together."""
        self.value.synchronize_for_checkpoint()

    def reset(self) -> None:
        """Takes up a new world. Not collective."""
        if self._owed is None:
            errors = self.value._onebit.state()
            self._owed = None if errors["shared"] else errors
        self._enter_world(self._owed)

    def sync(self) -> None:
        """Collective: rank 0's state for everybody, and the mean of what the ranks owe."""
        engine = self.value._onebit
        errors = engine.state() if self._owed is None else self._owed
        self._owed = None
        mine = {"step": engine.step, "size": errors["size"], "shared": errors["shared"], "owes": bool(errors["errors"])}
        state = self.value.state_dict()
        del state["onebit"]
        root, state = _broadcast((mine, state), self._name)
        if hvd.rank() != 0:
            self.value.load_state_dict(state)
        weight = weight_of_owed(mine, root, rank=hvd.rank(), size=hvd.size())
        engine.share_owed(errors["errors"], errors["size"], weight)
        given = sum(hvd.allgather_object(bool(weight), name=f"{self._name}.given"))
        if hvd.rank() == 0 and root["owes"] and not root["shared"] and given < root["size"]:
            notices.errors_lost_with_ranks(root["size"] - given, root["size"])

    def _enter_world(self, old: State | None = None) -> None:
        settings = self.value._settings
        if settings.transport is not None or settings.process_set.process_set_id != 0:
            raise ValueError(
                f"{self._name}: Horovod Elastic changes the whole world, so its optimizers average over all of it: "
                "leave process_set and transport out of DistributedOptimizer"
            )
        self.value._enter_world(f"onebit.elastic.{self._name}", old)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor that is broadcast by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _broadcast(value: Any, name: str) -> Any:
    """Rank 0's value; tensors, large ones, travel as they lie in memory and arrive on the host."""
    tensors: list[Tensor] = []

    def dig(each: Any) -> Any:
        if isinstance(each, Tensor) and each.numel() > _SMALL:
            tensors.append(each.detach().cpu().contiguous())
            return _Hole(tuple(each.shape), each.dtype)
        return _mapped(each, dig)

    def fill(each: Any) -> Any:
        return tensors.pop(0) if isinstance(each, _Hole) else _mapped(each, fill)

    is_root = hvd.rank() == 0
    skeleton = hvd.broadcast_object(dig(value) if is_root else None, 0, name=f"{name}.state")
    if not is_root:

        def allocate(each: Any) -> Any:
            if isinstance(each, _Hole):
                tensors.append(torch.empty(each.shape, dtype=each.dtype))
            return _mapped(each, allocate)

        allocate(skeleton)
    handles = [
        # as bytes: Horovod knows no bfloat16
        hvd.broadcast_async_(tensor.view(-1).view(torch.uint8), 0, name=f"{name}.state.{i}")
        for i, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)
    return value if is_root else fill(skeleton)


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(function(each) for each in value)
    return value
