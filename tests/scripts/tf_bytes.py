"""Counts what the loopback interface carries in TensorFlow's compression stage: python tf_bytes.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from loopback import measure

import hvd_onebit.tensorflow as onebit

NUM_ELEMENTS = 2_000_000


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    variables = [keras.Variable(np.ones((NUM_ELEMENTS // 2000, 1000), np.float32), name=name) for name in ("a", "b")]
    optimizer = onebit.DistributedOptimizer(keras.optimizers.Adam(), freeze_step=1, check_every=0, measure=False)
    optimizer.build(variables)
    generator = np.random.default_rng(hvd.rank())
    grads = [tf.constant(generator.standard_normal(v.shape).astype(np.float32)) for v in variables]

    def barrier() -> None:
        hvd.allreduce(tf.zeros([]), name="barrier")

    def step() -> None:
        optimizer.apply(grads, variables)

    measure(step, barrier, hvd, optimizer.stats, NUM_ELEMENTS, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
