"""How many threads a rank's kernels may use."""

from __future__ import annotations

import os

import pytest

from hvd_onebit import kernels
from hvd_onebit.codec import HostCodec
from hvd_onebit.threads import num_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    for name in ("OMP_NUM_THREADS", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "framework", "expected"),
    [
        ({}, None, 8),
        ({}, 3, 3),
        ({}, 20, 8),
        ({"OMP_NUM_THREADS": "4"}, None, 4),
        ({"OMP_NUM_THREADS": "4"}, 2, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 6, 4),
        ({"OMP_NUM_THREADS": "40"}, None, 8),
        ({"OMP_NUM_THREADS": "all"}, None, 8),
        ({"OMP_NUM_THREADS": ""}, None, 8),
        ({"HOROVOD_LOCAL_SIZE": "4"}, None, 2),
        ({"HOROVOD_LOCAL_SIZE": "3"}, None, 2),
        ({"HOROVOD_LOCAL_SIZE": "16"}, None, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, 4),
        ({"HOROVOD_LOCAL_SIZE": "4", "OMP_NUM_THREADS": "6"}, None, 6),
        ({"OMP_NUM_THREADS": "0", "HOROVOD_LOCAL_SIZE": "0"}, None, 8),
    ],
)
def test_the_framework_s_setting_and_the_rank_s_share_bound_it(
    environment: dict[str, str], framework: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert num_threads(framework) == expected


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_threads() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_threads() == 1


def test_the_codecs_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kernels, "_num_parts", lambda threads, _size: asked.append(threads) or 1)
    codec = HostCodec(lambda: 3)
    values, message = codec.zeros(8), codec.empty_bytes(5)
    codec.compress(values, None, 0.0, None, message, block=8, scale="rms", live=None)
    codec.reduce([message], None, codec.empty_bytes(5), num_elements=8, block=8, scale="rms", live=None)
    codec.average([message], values, block=8, live=None)
    assert asked == [3, 3, 3]
    HostCodec().average([message], values, block=8, live=None)
    assert asked[3:] == [8], "the process's own number"


def test_torch_s_own_setting_is_never_exceeded() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    from hvd_onebit.torch import codec

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert codec.num_threads() == 1
        torch.set_num_threads(5)
        assert codec.num_threads() == 5
        torch.set_num_threads(20)
        assert codec.num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_tensorflow_s_own_setting_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("horovod.tensorflow")
    from hvd_onebit.tensorflow import codec

    for setting, expected in [(0, 8), (3, 3), (20, 8)]:  # 0: it decides by itself
        monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda setting=setting: setting)
        assert codec.num_threads() == expected
