"""What must not be lost in TensorFlow when something goes wrong: at the freeze, in the user's own code, over time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras
import tensorflow as tf
from memory import resident_kilobytes
from test_tf_family import FAMILY, FREEZE, SHAPES, STEPS
from tf_training import (
    assert_bit_equal,
    assert_replicas_equal,
    buckets_of,
    distribute,
    gradient,
    on_ranks,
    snapshot,
    train,
    variables,
)

import hvd_onebit.tensorflow as onebit
from hvd_onebit import __version__
from hvd_onebit.agreement import digest
from hvd_onebit.errors import OneBitError
from hvd_onebit.stats import COMPRESSION, WARM_UP
from hvd_onebit.tensorflow.engine import owes, relative_paths, unpack_errors
from hvd_onebit.tensorflow.transport import HostFunctions, on_host
from hvd_onebit.transport.local import LocalTransport

FREEZING: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(0.01, beta_2=0.95),
    "OneBitAdam": lambda: onebit.OneBitAdam(0.01, beta_2=0.95, amsgrad=True),
    **FAMILY,
}


def make(name: str, transport: LocalTransport, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables(SHAPES)
    given = {"freeze_step": FREEZE, "block": 16, "bucket_elements": 50, "exchange": "two_phase", **options}
    optimizer = distribute(FREEZING[name](), transport, **given)
    optimizer.build(trained)
    return optimizer, trained


def fail(*_: Any) -> Any:
    raise MemoryError("injected")


# -- at the freeze -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "moment"), [*((name, "_frozen_arrays") for name in FREEZING), ("Adam", "_find_ready"), ("Adam", "reserve")]
)
def test_a_rank_that_cannot_freeze_is_the_same_error_on_all_and_nothing_is_lost(name: str, moment: str) -> None:
    """Training goes on, or resumes from what is saved then, as if it had been meant to freeze a step later."""

    def fails(transport: LocalTransport) -> tuple[str, list[Any], list[Any]]:
        optimizer, trained = make(name, transport)
        train(optimizer, trained, range(FREEZE - 1), transport.rank)
        fails = buckets_of(optimizer)[-1]._memory if moment == "reserve" else optimizer._engine.value
        if transport.rank == 1:
            setattr(fails, moment, fail)
        with pytest.raises(onebit.OneBitError) as caught:
            train(optimizer, trained, [FREEZE - 1], transport.rank)
        fails.__dict__.pop(moment, None)
        assert (optimizer.stats.stage, int(optimizer.iterations.numpy())) == (WARM_UP, FREEZE)
        store: dict[str, Any] = {}
        optimizer.save_own_variables(store)
        resumed, others = make(name, transport)
        for mine, theirs in zip(others, trained, strict=True):
            mine.assign(theirs)
        resumed.load_own_variables({key: np.array(array) for key, array in store.items()})
        train(optimizer, trained, range(FREEZE, STEPS), transport.rank)
        train(resumed, others, range(FREEZE, STEPS), transport.rank)
        assert optimizer.stats.frozen_step == resumed.stats.frozen_step == FREEZE + 1
        return str(caught.value), snapshot(trained), snapshot(others)

    def later(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make(name, transport, freeze_step=FREEZE + 1)
        train(optimizer, trained, range(STEPS), transport.rank)
        return snapshot(trained)

    results, undisturbed = on_ranks(2, fails), on_ranks(2, later)
    assert results[0][0] == results[1][0]
    assert results[0][0].endswith("(rank 1: MemoryError: injected)")
    for _, went_on, resumed in results:
        assert_bit_equal(went_on, undisturbed[0])
        assert_bit_equal(resumed, undisturbed[0])


def test_a_freeze_that_fails_leaves_no_pass_counted_twice() -> None:
    def work(transport: LocalTransport, *, fails: bool) -> list[Any]:
        options = {"freeze_step": FREEZE if fails else FREEZE + 1, "backward_passes_per_step": 2}
        optimizer, trained = make("Adam", transport, **options)
        for step in range(2 * STEPS):
            if fails and step == 2 * FREEZE - 1:
                optimizer._engine.value._frozen_arrays = fail  # on all ranks, for the same reason
                with pytest.raises(onebit.OneBitError, match="rank 0: MemoryError: injected; rank 1: MemoryError"):
                    train(optimizer, trained, [step], transport.rank)
                del optimizer._engine.value._frozen_arrays
            else:
                train(optimizer, trained, [step], transport.rank)
        return snapshot(trained)

    assert_bit_equal(on_ranks(2, lambda t: work(t, fails=True))[0], on_ranks(2, lambda t: work(t, fails=False))[0])


def test_ranks_of_which_one_sees_nothing_to_freeze_all_raise() -> None:
    """It is in its next step by then: they meet in the collective that begins one."""

    def work(transport: LocalTransport) -> str:
        optimizer, trained = make("Adam", transport)
        train(optimizer, trained, range(FREEZE - 1), transport.rank)
        if transport.rank == 1:
            for i in range(len(SHAPES)):
                optimizer.variance_of(i).assign(tf.fill(SHAPES[i], np.float32(np.inf)))
        with pytest.raises(onebit.OneBitError) as caught:
            train(optimizer, trained, [FREEZE - 1, FREEZE], transport.rank)
        assert optimizer.stats.stage == WARM_UP
        return str(caught.value)

    messages = on_ranks(2, work)
    assert messages[0] == messages[1]
    assert 'stage: rank 0: "compression"; rank 1: "warm-up"' in messages[0]


def test_a_late_freeze_leaves_what_is_frozen_as_it_was() -> None:
    """LAMB's variance that goes on after the freeze must not start again when another tensor freezes."""

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("OneBitLamb", transport)
        late = FREEZE + 2  # the last variable has no gradient before

        def step_once(step: int) -> None:
            grads = [gradient(step, transport.rank, i, shape) for i, shape in enumerate(SHAPES)]
            optimizer.apply([tf.constant(g * (i < 2 or step >= late)) for i, g in enumerate(grads)], trained)

        for step in range(late + FREEZE):
            assert optimizer.stats.compressed_elements == (65 if step >= FREEZE else 0)
            step_once(step)
        assert optimizer.stats.compressed_elements == 105
        engine = optimizer._engine.value
        for i in range(2):
            assert not np.array_equal(engine.fresh[i].numpy(), optimizer.variance_of(i).numpy())
        assert_bit_equal([engine.fresh[2].numpy()], [optimizer.variance_of(2).numpy()])
        step_once(late + FREEZE)
        assert optimizer.stats.stage == COMPRESSION
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


# -- a step that is given up -------------------------------------------------------------------------------------------


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """The user's own code, called by `apply`."""

    fails = False

    def __call__(self, step: Any) -> Any:
        if self.fails:
            raise ZeroDivisionError("the user's own fault")
        return 0.01

    def get_config(self) -> dict[str, Any]:
        return {}


def _saved(optimizer: Any, trained: list[Any]) -> list[Any]:
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return [*snapshot(trained), *(np.array(store[key]) for key in sorted(store))]


def test_an_error_in_the_users_code_leaves_everything_as_it_was() -> None:
    """`apply` is one call: what can fail in it of the user's own does so before anything is compressed."""

    def work(transport: LocalTransport, *, fails: bool) -> list[Any]:
        schedule, trained = _Schedule(), variables(SHAPES)
        optimizer = distribute(keras.optimizers.Adam(schedule), transport, freeze_step=FREEZE, exchange="two_phase")
        for step in range(STEPS):
            if fails and step:
                before = _saved(optimizer, trained)
                schedule.fails = True
                with pytest.raises(ZeroDivisionError):
                    train(optimizer, trained, [step], transport.rank)
                schedule.fails = False
                assert_bit_equal(_saved(optimizer, trained), before)
            train(optimizer, trained, [step], transport.rank)
        return snapshot(trained)

    assert_bit_equal(on_ranks(2, lambda t: work(t, fails=True))[1], on_ranks(2, lambda t: work(t, fails=False))[0])


def test_local_clipping_bounds_the_averaged_momentum() -> None:
    """In both stages, but for what error feedback makes up for: why Keras has no other clipping of it."""

    def work(transport: LocalTransport) -> None:
        trained = variables(SHAPES)
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=FREEZE, local_clip_norm=0.1)
        for step in range(3 * STEPS):
            train(optimizer, trained, [step], transport.rank)
            momenta = [optimizer.momentum_of(i).numpy() for i in range(len(SHAPES))]
            norm = np.sqrt(sum(np.square(m, dtype=np.float64).sum() for m in momenta))
            assert 0.005 < norm < (0.1 if step < FREEZE else 0.2)

    on_ranks(2, work)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def _network(layers: int = 2) -> keras.Model:
    """Layers that only their names tell apart, before training."""
    dense = [keras.layers.Dense(4, kernel_initializer="ones") for _ in range(layers)]
    return keras.Sequential([keras.Input((4,)), *dense])


def _other_order(odd: bool) -> list[Any]:
    trained = _network().trainable_variables
    return trained[2:] + trained[:2] if odd else trained


def _other_dtype(odd: bool) -> list[Any]:
    return variables([(4, 3), (5,)], dtype="float16" if odd else "bfloat16")


DIFFERENT: dict[str, tuple[Callable[[bool], list[Any]], str]] = {
    "order": (_other_order, 'parameter 0: rank 0: "dense.0/kernel (4, 4) float32"; rank 1: "dense.1/kernel'),
    "dtype": (_other_dtype, 'parameter 1: rank 0: "p1 (5,) bfloat16"; rank 1: "p1 (5,) float16"'),
}


def _errors_of_the_first_step(make_variables: Callable[[bool], list[Any]], prepare: Callable[[Any], Any]) -> list[str]:
    def work(transport: LocalTransport) -> str:
        trained = make_variables(bool(transport.rank))
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=3)
        optimizer.build(trained)
        if transport.rank:
            prepare(optimizer._engine.value)
        before = snapshot(trained)
        with pytest.raises(onebit.OneBitError) as caught:
            train(optimizer, trained, [0], transport.rank)
        assert_bit_equal(snapshot(trained), before)
        return str(caught.value)

    return on_ranks(2, work)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_whose_variables_differ_all_raise_before_anything_is_mixed(what: str) -> None:
    make_variables, says = DIFFERENT[what]
    messages = _errors_of_the_first_step(make_variables, lambda engine: None)
    assert messages[0] == messages[1]
    assert says in messages[0]


def test_ranks_with_another_version_all_raise() -> None:
    def pretend(engine: Any) -> None:
        engine._static_fields["version of hvd_onebit"] = "0.0.9"
        engine._static_digest = digest(engine._static_fields).hex()

    messages = _errors_of_the_first_step(lambda odd: variables(), pretend)
    assert messages[0] == messages[1]
    assert f'version of hvd_onebit: rank 0: "{__version__}"; rank 1: "0.0.9"' in messages[0]


def test_models_that_were_built_before_make_no_difference() -> None:
    def work(transport: LocalTransport) -> list[Any]:
        for _ in range(3 * transport.rank):
            _network(1)
        trained = _network().trainable_variables
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=1)
        train(optimizer, trained, range(3), transport.rank)
        return snapshot(trained)

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["p"], ["p"]),
        (["model_7/a_3/b", "model_7/a_11/b"], ["a.0/b", "a.1/b"]),
        (["a_2/q/b", "a/q/b", "c_5/b"], ["a.1/q/b", "a.0/q/b", "c/b"]),
        (["a_x/b", "a_/b"], ["a_x/b", "a_/b"]),
    ],
)
def test_paths_without_what_keras_counts(paths: list[str], expected: list[str]) -> None:
    assert relative_paths(paths) == expected


def test_elements_are_counted_once_after_a_change_of_stages() -> None:
    def work(transport: LocalTransport) -> None:
        optimizer, trained = make("Adam", transport)
        engine, counted = optimizer._engine.value, []
        count = engine._count_elements
        engine._count_elements = lambda frozen: (counted.append(optimizer.stats.step), count(frozen))
        train(optimizer, trained, range(STEPS), transport.rank)
        assert counted == [0, FREEZE]
        assert optimizer.stats.compressed_elements == 105
        assert optimizer.stats.bytes_per_step[COMPRESSION] < optimizer.stats.bytes_per_step[WARM_UP] / 4

    on_ranks(2, work)


# -- float64 -----------------------------------------------------------------------------------------------------------


def test_float64_variables_stay_in_full_precision_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        wide, plain = (keras.Variable(np.ones(40), dtype="float64", name="wide") for _ in range(2))
        narrow = keras.Variable(np.ones(40), dtype="float32", name="narrow")
        optimizer = distribute(keras.optimizers.Adam(0.01), transport, freeze_step=2)
        reference = keras.optimizers.Adam(0.01)
        for step in range(6):
            # thirds have no form in float32
            every = [gradient(step, rank, 0, (40,)).astype(np.float64) / 3.0 for rank in range(2)]
            own = every[transport.rank]
            optimizer.apply([tf.constant(own), tf.constant(own.astype(np.float32))], [wide, narrow])
            reference.apply([tf.constant((every[0] + every[1]) / 2.0)], [plain])
        assert optimizer.stats.stage == COMPRESSION
        assert optimizer.stats.full_precision_names == ("wide",)
        assert_bit_equal(snapshot([wide]), snapshot([plain]))
        return snapshot([wide, narrow])

    assert_replicas_equal(on_ranks(2, work))
    assert caplog.text.count("float64 parameters stay in full precision") == 1
    assert ": wide; make them float32" in caplog.text


# -- tf.train.Checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "OneBitLamb", "ZeroOneAdam"])
def test_a_tf_checkpoint_holds_the_compression_errors(name: str, tmp_path: Path) -> None:
    """Restored into a new optimizer, and into the one that went on: bit for bit."""
    stop = 6

    def new(transport: LocalTransport) -> tuple[Any, list[Any], Any]:
        if name == "ZeroOneAdam":
            trained = variables(SHAPES)
            optimizer = distribute(onebit.ZeroOneAdam(0.01, var_freeze_step=4, block=16), transport)
        else:
            optimizer, trained = make(name, transport)
        optimizer.build(trained)
        return optimizer, trained, tf.train.Checkpoint(optimizer=optimizer, model=[v.value for v in trained])

    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained, checkpoint = new(transport)
        train(optimizer, trained, range(stop), transport.rank)
        path = checkpoint.write(str(tmp_path / str(transport.rank)))
        train(optimizer, trained, range(stop, STEPS), transport.rank)
        expected = snapshot(trained)
        checkpoint.read(path)
        train(optimizer, trained, range(stop, STEPS), transport.rank)
        assert_bit_equal(snapshot(trained), expected)
        optimizer, trained, checkpoint = new(transport)
        checkpoint.read(path).assert_consumed()
        assert owes(unpack_errors(optimizer._engine.value.state())[1]), "as it would be saved before a step"
        train(optimizer, trained, range(stop, STEPS), transport.rank)
        assert_bit_equal(snapshot(trained), expected)
        return expected

    assert_replicas_equal(on_ranks(2, work))


@pytest.mark.parametrize("name", ["Adam", "ZeroOneAdam"])
def test_a_tf_checkpoint_of_one_rank_goes_on_there(name: str, tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        def new() -> tuple[Any, list[Any]]:
            if name == "Adam":
                return make(name, transport)
            trained = variables(SHAPES)
            optimizer = distribute(onebit.ZeroOneAdam(0.01, var_freeze_step=4, block=16), transport)
            optimizer.build(trained)
            return optimizer, trained

        optimizer, trained = new()
        train(optimizer, trained, range(6), 0)
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "0"))
        resumed, others = new()
        for mine, theirs in zip(others, trained, strict=True):
            mine.assign(theirs)
        tf.train.Checkpoint(optimizer=resumed).read(path)
        train(optimizer, trained, range(6, STEPS), 0)
        train(resumed, others, range(6, STEPS), 0)
        assert_bit_equal(snapshot(others), snapshot(trained))

    on_ranks(1, work)


def test_a_tf_checkpoint_of_another_rank_drops_the_errors_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LocalTransport) -> list[Any]:
        optimizer, trained = make("Adam", transport)
        train(optimizer, trained, range(FREEZE + 2), transport.rank)
        if transport.rank == 0:
            tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "0"))
        transport.allgather_bytes(b"", name="written").wait()
        resumed, others = make("Adam", transport)
        for mine, theirs in zip(others, trained, strict=True):
            mine.assign(theirs)
        tf.train.Checkpoint(optimizer=resumed).read(str(tmp_path / "0"))
        train(resumed, others, range(FREEZE + 2, STEPS), transport.rank)
        return snapshot(others)

    assert_replicas_equal(on_ranks(2, work))
    assert caplog.text.count("saved by rank 0 of 2, restored on rank 1 of 2") == 1


@pytest.mark.parametrize(
    ("size", "freeze_step", "reason"), [(1, FREEZE, "one rank only"), (2, 40, "freeze_step=40 lies")]
)
def test_a_tf_checkpoint_that_would_go_back_to_warm_up_is_refused(
    size: int, freeze_step: int, reason: str, tmp_path: Path
) -> None:
    """Its variables are restored too late for that: training would go on with the frozen variance, in silence."""

    def save(transport: LocalTransport) -> None:
        optimizer, trained = make("Adam", transport)
        train(optimizer, trained, range(FREEZE + 2), transport.rank)
        tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / str(transport.rank)))

    def restore(transport: LocalTransport) -> None:
        optimizer, trained = make("Adam", transport, freeze_step=freeze_step)
        tf.train.Checkpoint(optimizer=optimizer).read(str(tmp_path / str(transport.rank)))
        before = snapshot(trained)
        with pytest.raises(OneBitError, match=reason):
            train(optimizer, trained, range(1), transport.rank)
        assert_bit_equal(snapshot(trained), before)

    on_ranks(2, save)
    on_ranks(size, restore)


# -- what is made and dropped ------------------------------------------------------------------------------------------


def test_optimizers_that_are_dropped_leave_nothing() -> None:
    """A thousand in eager code, some of them trained into compression, are gone, and so is their memory."""

    def make_and_drop(count: int) -> list[Any]:
        def work(transport: LocalTransport) -> list[Any]:
            trained = [keras.Variable(np.zeros(2000, np.float32), name="p")]
            alive: list[weakref.ref[Any]] = []
            for k in range(count):
                optimizer = distribute(keras.optimizers.Adam(0.01, beta_2=0.9), transport, freeze_step=1)
                optimizer.build(trained)
                for _ in range(0 if k % 20 else 2):
                    optimizer.apply([tf.ones([2000])], trained)
                alive += [weakref.ref(optimizer), weakref.ref(optimizer._engine.value)]
            return alive

        every = [each for alive in on_ranks(2, work) for each in alive]
        gc.collect()
        return every

    # Keras's optimizers are in cycles, and Python collects late: the first half says how much waits for that at most
    make_and_drop(250)
    before, threads = resident_kilobytes(), threading.active_count()
    alive = make_and_drop(250)
    assert not any(each() is not None for each in alive)
    assert threading.active_count() == threads
    # of five hundred each would hold 90 kB
    assert resident_kilobytes() - before < 10_000


def test_a_graph_outlives_its_functions_with_an_error() -> None:
    functions: HostFunctions | None = HostFunctions()

    @tf.function
    def double(x: tf.Tensor) -> tf.Tensor:
        assert functions is not None
        with functions.traced():
            return on_host(lambda array: 2 * array, [x], tf.float32)

    assert float(double(tf.constant(3.0))) == 6.0
    functions = None
    gc.collect()
    with pytest.raises(tf.errors.OpError, match=r"traced for ranks that are gone.*the optimizer is gone"):
        double(tf.constant(3.0))
