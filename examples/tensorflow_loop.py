"""Handwritten digits with 1-bit Adam in a loop of one's own: tf.GradientTape inside tf.function.

    python examples/tensorflow_loop.py                        one process
    horovodrun -np 2 python examples/tensorflow_loop.py       two ranks; --gloo or --mpi chooses the controller
    mpirun -np 2 python examples/tensorflow_loop.py           two ranks, without horovodrun

The data and the model are those of keras_mnist.py.
"""

from __future__ import annotations

import argparse
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras_mnist import load_digits, make_model

import hvd_onebit.tensorflow as onebit


def main() -> None:
    args = parse_arguments()
    if not any(name in os.environ for name in ("HOROVOD_RANK", "PMIX_RANK", "PMI_RANK")):
        # without a launcher: Open MPI from PyPI cannot start a single process by itself
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the cores of their machine
    tf.config.threading.set_inter_op_parallelism_threads(2)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keras.utils.set_random_seed(hvd.rank())
    (images, labels), test_set = load_digits()
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels)).repeat().batch(args.batch_size)

    model = make_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # The changed line. It was: keras.optimizers.Adam(args.lr)
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(args.lr), freeze_step=args.freeze_step)
    # Horovod's part: all variables exist, and all ranks start from those of one
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([v.value for v in (*model.weights, *optimizer.variables)], root_rank=0)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for step, (x, y) in enumerate(batches.take(args.steps), 1):
        loss = train_step(x, y)
        if step % 100 == 0 and hvd.rank() == 0:
            stats = optimizer.stats
            sent = " and ".join(f"{sent:,.0f} in {stage}" for stage, sent in stats.bytes_per_step.items() if sent)
            print(f"step {step}: loss {loss:.4f}, bytes a step: {sent or 'none'}")

    accuracy = tf.reduce_mean(tf.cast(tf.argmax(model(test_set[0]), 1) == test_set[1], tf.float32))
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.1%}, {optimizer.stats.ratio:.1f} times fewer bytes than float32")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains on handwritten digits with 1-bit Adam and tf.GradientTape, on one rank or many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=800, metavar="N", help="updates to train for")
    parser.add_argument("--freeze-step", type=int, default=200, metavar="N", help="updates in full precision")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="digits a rank and update")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
