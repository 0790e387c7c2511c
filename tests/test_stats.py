"""What was counted is a line that people can read."""

from __future__ import annotations

from hvd_onebit.options import CompressionOptions
from hvd_onebit.planner import Cluster, KernelSpeeds, Measurement, plan_run, verdict
from hvd_onebit.stats import COMPRESSION, WARM_UP, Stats

SPEEDS = KernelSpeeds(compress=1e-9, decode=3e-10, reduce=1e-10)


def test_printed_they_are_a_line_for_people() -> None:
    stats = Stats(uncompressed_bytes_per_step=420_776.0)
    assert str(stats) == "<step 0, warm-up in full precision>"
    stats.count(420_776)
    stats.end_step(WARM_UP, skipped=False)
    assert str(stats) == "<step 1, warm-up in full precision, 420,776 bytes a step>"
    stats.stage, stats.frozen_step, stats.compressed_elements = COMPRESSION, 1, 105_194
    stats.count(13_358)
    stats.end_step(COMPRESSION, skipped=True)
    assert str(stats) == (
        "<step 1, compression since step 1, 13,358 bytes a step (31.5 times fewer than float32), "
        "105,194 elements as one bit, 0 in full precision, 1 step skipped>"
    )
    stats.plan = plan_run(Measurement(Cluster(2, 1, 1e9).network(), SPEEDS, 0.1), 105_194, CompressionOptions())
    assert f"skipped, an exchange expected {stats.plan.speed_up:.1f} times as fast as float32's>" in str(stats)
    assert str(stats.plan) == verdict(stats.plan)


def test_a_step_that_is_given_up_leaves_nothing_to_the_next() -> None:
    stats = Stats()
    stats.count(100, inside=60)
    stats.give_up_step(COMPRESSION)
    stats.count(10, inside=6)
    stats.end_step(COMPRESSION, skipped=False)
    assert stats.bytes_sent[COMPRESSION] == 110
    assert stats.bytes_per_step[COMPRESSION] == 10
    assert stats.inside_bytes_per_step[COMPRESSION] == 6
