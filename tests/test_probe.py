"""What is measured in a run is what its network does, the same on every rank, and decides only what was left to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvd_onebit import notices, probe
from hvd_onebit.codec import HostCodec
from hvd_onebit.hosts import HostGroups, Place
from hvd_onebit.options import CompressionOptions, options_from
from hvd_onebit.planner import Cluster, KernelSpeeds, Measurement, choose, plan_run
from hvd_onebit.transport.local import LocalTransport, run_ranks

MILLION = 1_000_000
SPEEDS = KernelSpeeds(compress=1e-9, decode=0.2e-9, reduce=0.1e-9)


def measurement(size: int, rate: float, latency: float = 50e-6) -> Measurement:
    return Measurement(Cluster(size, 1, rate, latency).network(), SPEEDS, 0.25)


class SimulatedRanks:
    """Ranks whose collectives take what a network is said to cost, on a clock of their own."""

    rank = 0

    def __init__(self, cluster: Cluster) -> None:
        self.size = cluster.size
        self.now = 0.0
        self._network = cluster.network()

    def perf_counter(self) -> float:
        return self.now

    def allreduce(self, values: Any, *, name: str) -> Any:
        return self._took(self._network.allreduce.seconds(self._network.allreduce_bytes(values.nbytes)), values)

    def allgather(self, message: Any, receive_bytes: Sequence[int], *, name: str) -> Any:
        assert [message.nbytes] * self.size == list(receive_bytes)
        seconds = self._network.allgather.seconds(self._network.allgather_bytes(message.nbytes))
        return self._took(seconds, np.tile(message, self.size))

    def alltoall(self, message: Any, send_bytes: Sequence[int], receive_bytes: Sequence[int], *, name: str) -> Any:
        assert sum(send_bytes) == message.nbytes
        return self._took(self._network.alltoall.seconds(self._network.alltoall_bytes(message.nbytes)), message)

    def _took(self, seconds: float, result: Any) -> Any:
        ranks = self

        class Pending:
            def wait(self) -> Any:
                ranks.now += seconds
                return result

        return Pending()


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (3, 1), (2, 4), (4, 4)])
def test_it_finds_what_the_network_does(
    num_hosts: int, ranks_per_host: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(num_hosts, ranks_per_host, rate, latency_seconds=1e-4)
    ranks = SimulatedRanks(cluster)
    monkeypatch.setattr(probe, "time", ranks)
    found = probe.measure(ranks, HostCodec(), Place(0, num_hosts, 0, ranks_per_host))
    true = cluster.network()
    for name in ("allreduce", "allgather", "alltoall"):
        cost, really = getattr(found.network, name), getattr(true, name)
        assert cost.seconds_per_byte == pytest.approx(really.seconds_per_byte, rel=1e-3), name
        assert (
            really.first_seconds <= cost.first_seconds < 1.1 * really.first_seconds + ranks_per_host * 2048 * 8 / rate
        ), name
    assert found.seconds == pytest.approx(ranks.now, rel=0.1)
    most = {1e7: 4.0, 1e8: 1.0}.get(rate, 0.7)
    assert ranks.now < most * ranks_per_host


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, None), (3, None), (4, 2)])
def test_every_rank_finds_the_same(size: int, ranks_per_host: int | None) -> None:
    def work(transport: LocalTransport) -> Measurement:
        groups = None
        if ranks_per_host:
            groups = HostGroups(transport, transport.place)
            groups.connect()
        return probe.measure(transport, HostCodec(), transport.place, groups)

    first, *others = run_ranks(size, work, ranks_per_host=ranks_per_host)
    assert all(each == first for each in others)
    assert first.speeds.compress > 0
    assert (first.network.inside is not None) == bool(ranks_per_host)
    assert first.network.num_peers == (2 if ranks_per_host else size)
    plan = plan_run(first, MILLION, CompressionOptions())
    assert plan.best.method == CompressionOptions().algorithm(first.network.num_peers)
    assert plan.best.kernel_seconds > 0


def test_only_what_was_left_open_is_chosen() -> None:
    fast, slow = measurement(3, 1e11, 1e-2), measurement(8, 1e8)
    open_ = CompressionOptions(exchange="measured", bucket_elements="measured")
    assert choose(fast, MILLION, open_).exchange == "one_shot"
    assert choose(slow, 100 * MILLION, open_).exchange == "two_phase"
    for size in (2**20, 7):
        given = CompressionOptions(exchange="measured", bucket_elements=size)
        assert choose(fast, MILLION, given) == replace(given, exchange="one_shot")
    given = CompressionOptions(exchange="two_phase", bucket_elements="measured")
    chosen = choose(fast, 100 * MILLION, given)
    assert chosen.exchange == "two_phase"
    assert isinstance(chosen.bucket_elements, int)
    for exchange in ("auto", "one_shot", "two_phase"):
        given = CompressionOptions(exchange=exchange)
        assert choose(fast, MILLION, given) == given


def test_a_large_latency_makes_large_buckets() -> None:
    options = CompressionOptions(exchange="two_phase", bucket_elements="measured")
    assert choose(measurement(4, 1e10, 20e-3), 100 * MILLION, options).bucket_elements == 2**24
    quick = choose(measurement(4, 2e9, 1e-6), 8 * MILLION, options).bucket_elements
    assert quick == 2**20


def test_what_gains_little_is_left_as_it_is() -> None:
    """A measurement has noise: near the border it must not change from run to run."""
    options = CompressionOptions(exchange="measured", bucket_elements=2**22)
    costs = []
    for latency in np.geomspace(1e-6, 1e-1, 60):
        found = measurement(4, 1e8, float(latency))
        chosen = choose(found, MILLION, options)
        used = {
            name: plan_run(found, MILLION, replace(options, exchange=name)).best.seconds
            for name in ("one_shot", "two_phase")
        }
        costs.append(used["two_phase"] / used["one_shot"])
        assert chosen.exchange == ("one_shot" if costs[-1] >= 1.1 else "two_phase")
    assert min(costs) < 1.0 < 1.1 < max(costs)


def test_the_run_is_told_whether_it_pays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_onebit")
    auto = CompressionOptions()
    notices.measured(plan_run(measurement(2, 1e9), 100 * MILLION, auto), auto)
    told = [
        record for record in caplog.records if "float32" in record.getMessage() and "Expected" in record.getMessage()
    ]
    assert [record.levelname for record in told] == ["INFO"]
    assert "Compression pays: one_shot is" in told[0].getMessage()
    assert "allreduce 1 Gbit/s a host" in caplog.text
    caplog.clear()
    plan = plan_run(measurement(3, 1e11, 1e-2), 1000, auto)
    notices.measured(plan, auto)
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Compression makes little difference here: two_phase is expected to take" in warned
    assert f"is expected to take {-1e3 * plan.saved_seconds:,.1f} ms a step more than float32" in warned
    assert "compressed all the same" in warned
    assert plan.faster is not None
    assert 'exchange="one_shot"' in warned
    caplog.clear()
    measured = CompressionOptions(exchange="measured")
    notices.measured(
        plan_run(measurement(2, 1e9), 100 * MILLION, choose(measurement(2, 1e9), 100 * MILLION, measured)), measured
    )
    assert 'for the same bits in every run pass exchange="one_shot", bucket_elements=8388608' in caplog.text


def test_there_must_be_a_warm_up_to_measure_in() -> None:
    with pytest.raises(ValueError, match="need a warm-up to measure in"):
        options_from({"exchange": "measured", "freeze_step": 0})
    with pytest.raises(ValueError, match="need a warm-up to measure in"):
        options_from({"bucket_elements": "measured", "freeze_step": 0})
    with pytest.raises(ValueError, match="need measure=True"):
        options_from({"exchange": "measured", "measure": False})
    with pytest.raises(TypeError, match='or "measured"'):
        options_from({"bucket_elements": "many"})


def test_a_choice_of_other_ranks_keeps_the_buckets_only() -> None:
    options = CompressionOptions(exchange="measured", bucket_elements="measured")
    choice = replace(options, exchange="one_shot", bucket_elements=2**20).choice_of(4)
    assert options.with_choice(choice, 4) == replace(options, exchange="one_shot", bucket_elements=2**20)
    assert options.with_choice(choice, 8) == replace(options, exchange="two_phase", bucket_elements=2**20)
    assert options.with_choice({}, 8) == replace(options, exchange="two_phase", bucket_elements="auto")
    named = CompressionOptions(exchange="two_phase", bucket_elements=5)
    assert named.with_choice(choice, 4) == named
