"""What DistributedOptimizer and the callbacks take, and what they refuse, each with the reason."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from tf_training import SHAPES, distribute, on_ranks, train, variables

import hvd_onebit.tensorflow as onebit
from hvd_onebit.errors import OneBitError
from hvd_onebit.transport.local import LocalTransport

Adam = keras.optimizers.Adam


def _alone(optimizer: Any, **options: Any) -> Any:
    return on_ranks(1, lambda transport: distribute(optimizer, transport, **options))[0]


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (lambda: Adam(), {"freeze_steps": 3}, TypeError, "did you mean 'freeze_step'"),
        (lambda: Adam(), {"freeze_step": 0}, ValueError, "at least 1"),
        (lambda: Adam(), {"freeze_step": "soon"}, TypeError, "freeze_step"),
        (lambda: Adam(), {"backward_passes_per_step": 0}, ValueError, "at least 1"),
        (lambda: Adam(gradient_accumulation_steps=2), {"backward_passes_per_step": 2}, ValueError, "multiply"),
        (
            lambda: keras.optimizers.RMSprop(),
            {},
            TypeError,
            "serves Adam, AdamW, SGD, Lamb, .*, not RMSprop",
        ),
        (lambda: Adam(beta_1=lambda: 0.9), {}, TypeError, "beta_1 must be a number"),
        (lambda: Adam(), {"groups": [[1]]}, TypeError, "number of groups"),
    ],
)
def test_what_cannot_be_served_is_refused(make: Any, options: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        _alone(make(), **options)


def test_one_bit_adam_checks_its_options() -> None:
    with pytest.raises(TypeError, match="did you mean 'freeze_step'"):
        onebit.OneBitAdam(freeze_stp=3)
    with pytest.raises(ValueError, match="scale must be one of"):
        onebit.OneBitAdam(scale="max")


def test_the_hierarchical_exchange_is_refused_where_ranks_do_not_lie_for_it() -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(ValueError, match="but all 2 ranks are on one host"):
            onebit.DistributedOptimizer(Adam(0.1), transport=transport, hierarchical=True).build([keras.Variable(1.0)])

    on_ranks(2, work)


def test_it_is_wrapped_once() -> None:
    optimizer = _alone(Adam())
    with pytest.raises(TypeError, match="distributed already"):
        _alone(optimizer)


def test_horovod_must_be_initialised() -> None:
    with pytest.raises(OneBitError, match=r"call hvd\.init\(\) before"):
        onebit.DistributedOptimizer(Adam())


def test_a_sparse_gradient_needs_sparse_as_dense() -> None:
    slices = tf.IndexedSlices(tf.ones([3, 5]), tf.constant([1, 1, 7]), tf.constant([8, 5]))
    trained = variables([(8, 5)])
    with pytest.raises(TypeError, match="sparse_as_dense=True"):
        _alone(Adam()).apply([slices], trained)
    optimizer = _alone(Adam(), sparse_as_dense=True)
    optimizer.apply([slices], trained)
    momentum = optimizer.momentum_of(0).numpy()
    assert momentum[1].tolist() == pytest.approx([0.2] * 5)
    assert not momentum[2].any()


def test_variables_added_after_build_are_refused() -> None:
    optimizer, trained = _alone(Adam()), variables()
    train(optimizer, trained, [0], 0)
    with pytest.raises(ValueError, match="not among those that the optimizer was built on"):
        train(optimizer, [*trained[1:], keras.Variable([1.0], name="late")], [1], 0)


def test_a_part_of_the_variables_will_do() -> None:
    optimizer, trained = _alone(Adam()), variables()
    optimizer.build(trained)
    optimizer.apply([tf.ones(SHAPES[1])], [trained[1]])
    assert optimizer.momentum_of(1).numpy().all()
    assert not optimizer.momentum_of(0).numpy().any()


def test_jit_compile_is_refused() -> None:
    optimizer, trained = _alone(Adam()), variables()
    optimizer.build(trained)

    @tf.function(jit_compile=True)
    def step() -> None:
        optimizer.apply([tf.ones(shape) for shape in SHAPES])

    with pytest.raises(ValueError, match="jit_compile=True cannot be served"):
        step()


def test_a_transport_serves_eager_code_only() -> None:
    def work(transport: Any) -> None:
        optimizer, trained = distribute(Adam(), transport, freeze_step=2), variables()
        optimizer.build(trained)
        step = tf.function(lambda: optimizer.apply([tf.ones(shape) for shape in SHAPES]), autograph=False)
        with pytest.raises(OneBitError, match="run_eagerly=True"):
            step()

    on_ranks(2, work)


def test_a_distribution_strategy_is_refused() -> None:
    # strategies are entered a thread: the transport's would not see this one
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(ValueError, match="average twice"):
        onebit.DistributedOptimizer(Adam())


def test_kerass_own_loss_scaling_around_it_is_refused() -> None:
    optimizer, trained = keras.optimizers.LossScaleOptimizer(_alone(Adam())), variables()
    with pytest.raises(TypeError, match="Wrap in the other order"):
        train(optimizer, trained, [0], 0)


def test_loss_scaling_unscales_before_the_momentum_and_skips_together() -> None:
    def work(transport: Any) -> tuple[Any, float]:
        trained = variables([(20,)])
        scaling = keras.optimizers.LossScaleOptimizer(Adam(0.01), initial_scale=8.0)
        optimizer = distribute(scaling, transport, freeze_step=2)
        for step in range(6):
            bad = step in (1, 4) and transport.rank == 1
            optimizer.apply([tf.fill([20], float("inf")) if bad else tf.fill([20], 8.0 * (1 + step))], trained)
        assert optimizer.stats.steps_skipped == 2
        assert optimizer.stats.step == 4
        return optimizer.inner_optimizer.momentum_of(0).numpy(), float(optimizer.dynamic_scale.numpy())

    results = on_ranks(2, work)
    assert results[0][1] == results[1][1] == 2.0
    for momentum, _ in results:
        # 1, 3 with scale 8 and 4; then 4 of scale 4 and 6 of scale 2
        expected = 0.0
        for gradient in (1.0, 3 * 2.0, 4 * 2.0, 6 * 4.0):
            expected = 0.9 * expected + 0.1 * gradient
        assert momentum == pytest.approx([expected] * 20, rel=1e-5)


def test_the_configuration_of_one_bit_adam_makes_the_same_again() -> None:
    options = {"freeze_step": 7, "full_precision": ["*bias"], "bias_correction": False, "weight_decay": 0.1}
    optimizer = onebit.OneBitAdam(0.01, **options)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is onebit.OneBitAdam
    assert again.get_config() == optimizer.get_config()
    assert again.compression_options == optimizer.compression_options


def test_the_public_names_are_those_of_the_torch_module() -> None:
    pytest.importorskip("torch")
    import hvd_onebit.torch as other

    assert set(onebit.__all__) - {"callbacks"} == set(other.__all__)
