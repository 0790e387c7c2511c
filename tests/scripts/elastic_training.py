"""Training that changes its own ranks: python elastic_training.py FOLDER FREEZE_STEP LAST_STEP EVENT@STEP...

An event is "hosts=A,B" (what the discovery script is to find from now on; training waits for the change), or "kill"
(the last rank ends without a word, in the middle of its backward pass). Every rank writes what it saw in each step to
FOLDER/PID.jsonl.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from elastic_log import change_hosts, write_note
from torch_training import gradient, parameters

import hvd_onebit.torch as onebit
from hvd_onebit.state import owed_by_parameter

FOLDER = Path(sys.argv[1])
FREEZE_STEP, LAST_STEP = int(sys.argv[2]), int(sys.argv[3])
EVENTS = {int(each.split("@")[1]): each.split("@")[0] for each in sys.argv[4:]}
SHAPES = ((5, 8), (31,), (3,))
WAIT_SECONDS = 60.0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(parameters(SHAPES))

    def loss(self, step: int) -> torch.Tensor:
        """Falls towards 0: every parameter is drawn to 0, with noise of this rank's own."""
        terms = [
            (0.5 * p.square() + 0.1 * p * gradient(step, hvd.rank(), i, p)).sum() for i, p in enumerate(self.layers)
        ]
        return torch.stack(terms).sum()


def happens_first(event: str, step: int) -> bool:
    """True for the first process that asks."""
    try:
        (FOLDER / f"{event.split('=')[0]}.{step}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def mine(optimizer: Any) -> list[float]:
    """What this rank owes: the mean over the ranks is what training owes."""
    extra = optimizer.state_dict()["onebit"]
    owed = owed_by_parameter(extra["errors"], extra["size"])
    return torch.cat([owed[name] for name in sorted(owed)]).tolist() if owed else []


def note(kind: str, state: Any) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in state.model.parameters()]).tolist()
    write_note(FOLDER, kind, state, hvd, parameters=flat, owes=mine(state.optimizer))


@hvd.elastic.run
def train(state: Any) -> None:
    note("entered", state)
    while state.step < LAST_STEP:
        event = EVENTS.get(state.step, "")
        if event.startswith("hosts") and hvd.size() != 1 + event.count(","):
            if hvd.rank() == 0 and happens_first(event, state.step):
                change_hosts(FOLDER, event.removeprefix("hosts="))
            if hvd.size() > 1 + event.count(","):
                # nobody has to start first: from now on Horovod need not wait long, also for a rank that is dead
                os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "8"
            deadline = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.1)
                state.check_host_updates()
            raise TimeoutError(f"the ranks did not change at step {state.step}")
        state.optimizer.zero_grad()
        dies = event == "kill" and hvd.rank() == hvd.size() - 1 and happens_first(event, state.step)
        if dies:
            state.model.layers[1].register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        state.model.loss(state.step).backward()
        state.optimizer.step()
        state.step += 1
        note("step", state)
        state.commit()


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Horovod's own, on every interpreter of today
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    hvd.init()
    model = Model()
    optimizer = onebit.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.03),
        named_parameters=model.named_parameters(),
        freeze_step=FREEZE_STEP,
        exchange="two_phase",
        block=8,
        check_every=1,
    )
    train(onebit.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
