"""The cost model: bytes as they are sent, seconds by hand, and a verdict that can be no."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from hvd_onebit import _plan_command
from hvd_onebit.__main__ import main
from hvd_onebit.codec import HostCodec
from hvd_onebit.exchange import CompressedAllreduce
from hvd_onebit.layout import Bucket
from hvd_onebit.options import CompressionOptions
from hvd_onebit.planner import Cluster, KernelSpeeds, estimates, hierarchical_bytes, make_plan, verdict
from hvd_onebit.wire import message_num_bytes

FAST = KernelSpeeds(compress=1e-9, decode=0.2e-9, reduce=0.1e-9)
MILLION = 1_000_000


def test_two_ranks_by_hand() -> None:
    """1 Gbit/s moves 125 MB a second."""
    options = CompressionOptions(bucket_elements=25 * MILLION)
    cluster = Cluster(2, 1, 1e9, latency_seconds=1e-3)
    float32, one_shot, two_phase = estimates(cluster.network(), 25 * MILLION, FAST, options)
    message = message_num_bytes(25 * MILLION)
    assert float32.link_bytes == 100e6
    assert float32.seconds == pytest.approx(0.8 + 2e-3 + 1e-3)
    assert one_shot.link_bytes == two_phase.link_bytes == message
    assert one_shot.wire_seconds == pytest.approx(message / 125e6 + 2e-3 + 1e-3)
    assert one_shot.kernel_seconds == pytest.approx(25e-3 * 1.4)
    assert one_shot.seconds == pytest.approx(one_shot.wire_seconds + one_shot.kernel_seconds)
    assert two_phase.wire_seconds == pytest.approx(message / 125e6 + 3e-3 + 2e-3)
    assert two_phase.kernel_seconds == pytest.approx(25e-3 * (1.0 + 0.5 + 0.1 + 0.2))


def test_buckets_overlap() -> None:
    cluster = Cluster(2, 1, 1e9, latency_seconds=0.0)
    for num_buckets in (1, 4, 10):
        options = CompressionOptions(bucket_elements=MILLION)
        _, one_shot, _ = estimates(cluster.network(), num_buckets * MILLION, FAST, options)
        shorter, longer = sorted((one_shot.wire_seconds, one_shot.kernel_seconds))
        assert one_shot.seconds == pytest.approx(longer + shorter / num_buckets)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_bytes_are_those_that_ranks_send(size: int) -> None:
    """With one rank a host, a host sends what the exchange counts for a rank."""
    num_elements = 64 * size * 2048
    bucket = Bucket("b", ("p",), (num_elements,))
    _, *compressed = estimates(Cluster(size, 1, 1e9).network(), num_elements, FAST, CompressionOptions())
    for estimate in compressed:
        options = CompressionOptions(exchange=estimate.method)
        exchange = CompressedAllreduce(bucket, rank=0, size=size, codec=HostCodec(), options=options)
        assert estimate.link_bytes == pytest.approx(exchange.bytes_sent)


def test_ranks_of_a_host_share_its_link() -> None:
    """A ring passes each link once; of an alltoall what stays on a host does not cross it."""
    alone = {e.method: e for e in estimates(Cluster(4, 1, 1e9).network(), MILLION, FAST, CompressionOptions())}
    shared = {e.method: e for e in estimates(Cluster(2, 2, 1e9).network(), MILLION, FAST, CompressionOptions())}
    message = message_num_bytes(MILLION)
    assert shared["float32"].link_bytes == alone["float32"].link_bytes
    assert shared["one_shot"].link_bytes == alone["one_shot"].link_bytes == 3 * message
    assert alone["two_phase"].link_bytes == pytest.approx((3 / 4 + 3 / 4) * message)
    assert shared["two_phase"].link_bytes == pytest.approx((4 / 4 + 3 / 4) * message)


def test_the_verdict_depends_on_the_network() -> None:
    speeds = KernelSpeeds(compress=1e-9, decode=0.2e-9, reduce=0.1e-9)
    plans = [make_plan(Cluster(2, 1, rate), 100 * MILLION, speeds) for rate in (1e8, 1e9, 1e10, 1e11, 1e12)]
    ratios = [plan.speed_up for plan in plans]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 25
    assert [plan.pays for plan in plans] == [True, True, True, False, False]
    assert plans[-1].saved_seconds < 0
    assert not make_plan(Cluster(2, 1, 1e9), 1000, speeds).pays
    assert "little difference" in verdict(make_plan(Cluster(2, 1, 1e9), 1000, speeds))
    assert "does not pay here: one_shot takes" in verdict(plans[-1])
    assert make_plan(Cluster(2, 1, 1e9), 100 * MILLION, speeds).best.method == "one_shot"
    assert make_plan(Cluster(16, 1, 1e9), 100 * MILLION, speeds).best.method == "two_phase"


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="one rank has nobody to send to"):
        make_plan(Cluster(1, 1, 1e9), 10, FAST)
    with pytest.raises(ValueError, match="num_elements"):
        make_plan(Cluster(2, 1, 1e9), 0, FAST)
    with pytest.raises(ValueError, match="num_hosts"):
        Cluster(0, 1, 1e9)
    with pytest.raises(ValueError, match="rate above 0"):
        Cluster(2, 1, 0.0)


@pytest.mark.parametrize(("hosts", "bits"), [(2, 1.0), (4, 1.5)])
def test_a_host_sends_its_gradients_once_if_hierarchical(hosts: int, bits: float) -> None:
    """Among two hosts a message; among four, three quarters of one to the servers, and three replies of a quarter."""
    for ranks in (4, 8):
        sent = hierarchical_bytes(Cluster(hosts, ranks, 1e9), 8 * MILLION)
        assert sent == pytest.approx(bits * message_num_bytes(8 * MILLION, 2048), rel=1e-3)


def test_the_command_says_whether_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-elements", "100_000_000", "--rate", "100mbit", "--compute-seconds", "1"]) == 0
    text = capsys.readouterr().out
    assert "100,000,000 parameters, 2 hosts with 1 rank each, 100mbit" in text
    assert "Compression pays: one_shot is" in text
    assert "With 1 s of computation a step is" in text
    assert "hierarchically" not in text
    assert main(["plan", "--num-elements", "1000", "--rate", "100gbit", "--hosts", "4", "--ranks-per-host", "8"]) == 0
    text = capsys.readouterr().out
    assert "Compression makes little difference here" in text
    assert "8 ranks of a host exchange hierarchically: a host then sends 0.0 MB" in text
    assert main(["plan", "--num-elements", "1000", "--hosts", "1", "--ranks-per-host", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 host with 2 ranks each" in text
    assert "float32" not in text
    assert "Ranks of one host do not use a link: compression does not pay there." in text


def test_what_hides_behind_computation_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan_command, "_measure", lambda threads: FAST)
    command = ["plan", "--num-elements", "25M", "--rate", "10gbit", "--compute-seconds"]
    lines = {}
    for seconds in ("0.01", "10"):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            assert main([*command, seconds]) == 0
        assert "Compression pays" in text.getvalue()
        lines[seconds] = text.getvalue()
    assert "hides behind the computation" not in lines["0.01"]
    assert "it does not pay where float32's allreduce hides behind the computation" in lines["10"]


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-elements", "1000000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["float32"]["link_bytes"] == 4e6
    assert found["best"] in [each["method"] for each in found["compressed"]]
    assert found["pays"] is (found["float32"]["seconds"] >= 1.5 * min(e["seconds"] for e in found["compressed"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "expected a rate"),
        (["--rate", "unshaped"], "needs a rate"),
        (["--hosts", "0"], "at least 1"),
        (["--hosts", "1"], "nobody to send to"),
        (["--latency-us", "-1"], "at least 0"),
        (["--host", "2"], "did you mean --hosts?"),
    ],
)
def test_the_command_refuses_with_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", "--num-elements", "10", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
