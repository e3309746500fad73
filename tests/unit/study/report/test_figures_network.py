"""A run over a slow network: what the report makes of its record, and what the live view shows of it."""

import pytest

from lockstep.study.report.figures import find_network
from lockstep.study.report.view import sentences, view_run
from lockstep.telemetry.figures import RankFigures, Snapshot, find_figures
from lockstep.telemetry.live_view import line, rate, slowest_link
from lockstep.telemetry.record import read_run
from lockstep.telemetry.recorder import RankMeans
from tests.unit.study.report.report_planted import START, session, steps, timeline_line, write_run

# Two ranks with 43.2 MB of gradients: 0.09 s of forward, 0.18 of backward, and waiting for 3.81 s.
BUCKETS = [(0, 1_000_000, 0.108, 0.108, 0.2), (1, 42_200_000, 0.27, 0.27, 4.08)]
SLOW = {"data_wait_s": 0.0, "forward_s": 0.09, "backward_s": 0.18, "exposed_s": 3.81, "optimizer_s": 0.02}


def machine_line(rate, peer):
    return {"kind": "machine", "time": START, "sent_bytes": 10**9, "link_bytes_per_s": rate, "link_peer": peer}


@pytest.fixture
def folder(tmp_path):
    # Containers have one host name.
    ranks = [{"host": "here", "node": str(node)} for node in range(2)]
    about = session(2, ranks=ranks, gradient_bytes=43_200_000, backend="gloo", workers=2)
    timeline = timeline_line(4, START, own_s=0.27, wait_s=3.81, buckets=BUCKETS)
    lines = [*steps(30, **SLOW), timeline]
    record = [[*lines, machine_line(11.3e6, "10.0.0.2")], [*lines, machine_line(12.5e6, "10.0.0.1")]]
    return write_run(tmp_path / "run", record, [about])


def test_the_link_is_found_in_the_record(folder):
    run = read_run(folder)
    network = find_network(run, find_figures(run))
    assert network.num_machines == 2
    # Both buckets together: 43.2 MB from 0.108 to 4.08 s; the second alone, 42.2 MB in 3.81 s, was faster.
    assert network.link.bytes_per_s == pytest.approx(42.2e6 / 3.81)
    assert network.slowest == "here (rank 0) to 10.0.0.2, 11.3 MB/s"
    assert [(bucket.size_bytes, bucket.ready) for bucket in network.profile.buckets] == [
        (1_000_000, pytest.approx(0.1)),
        (42_200_000, 1.0),
    ]
    assert network.profile.computing[32].backward_s == pytest.approx(0.18)


def test_a_slow_network_is_named_and_zero_is_not_advised(folder):
    view = view_run(folder)
    _, where, first = sentences(view)
    assert where.endswith(
        "; without compression, each of 2 machines sends 43.2 MB of gradients per step, over links of 11.1 MB/s (the "
        "slowest is here (rank 0) to 10.0.0.2, 11.3 MB/s)."
    )
    assert first.startswith("Change first: Exchanging gradients costs more than it saves")
    assert all("zero1" not in advice.change for advice in view.advice)
    found = {word: advice for advice in view.advice for word in ("bf16", "int8", "local-sgd") if word in advice.change}
    assert all("(43.2 MB from each of 2 machines at 11.1 MB/s)" in advice.cause for advice in found.values())
    assert found["bf16"].gain == pytest.approx(4.1 / (0.27 + 0.02 + 3.81 / 2), rel=0.01)
    assert found["int8"].gain == pytest.approx(4.1 / (0.27 + 0.02 + 3.81 / 4), rel=0.01)
    assert found["local-sgd"].gain == pytest.approx(4.1 / (0.27 + 0.02 + 43.2 / 42.2 * 3.81 / 8), rel=0.01)
    assert [advice.keeps_run for advice in found.values()] == [True, True, False]


def test_one_machine_has_no_network(tmp_path):
    timeline = timeline_line(4, START, own_s=0.27, wait_s=3.81, buckets=BUCKETS)
    run = write_run(tmp_path / "run", [[*steps(30, **SLOW), timeline]] * 2)
    assert "machines" not in sentences(view_run(run))[1]


def test_the_live_view_names_the_slowest_link():
    ranks = (
        RankFigures(rank=0, link_peer="10.0.0.2", values={"link_bytes_per_s": 11.3e6, "step_sent_bytes": 21.6e6}),
        RankFigures(rank=1, link_peer="10.0.0.2", values={"link_bytes_per_s": 12.5e6, "step_sent_bytes": 21.6e6}),
        RankFigures(rank=2, host="b"),
    )
    snapshot = Snapshot(num_steps=9, step=1, samples_per_s=0.1142, ranks=ranks)
    assert slowest_link(snapshot) == "slowest link: rank 0 to 10.0.0.2, 11.3 MB/s, 21.6 MB a step"
    assert line(snapshot) == f"step 1/9  0.114 samples/s  {slowest_link(snapshot)}"
    assert slowest_link(Snapshot(num_steps=9)) == ""


def test_slow_rates_have_figures():
    assert line(Snapshot(num_steps=9, step=1, samples_per_s=0.0, tokens_per_s=0.0)) == "step 1/9"
    assert [rate(each) for each in (0.11, 0.0034, 9.876, 99.9, 1234.5)] == ["0.11", "0.0034", "9.88", "99.9", "1,234"]


def test_bytes_of_a_step_are_those_between_two_samples():
    figures = RankMeans(0, "cpu", first_step=7)
    figures.machine({"sent_bytes": 100})
    assert figures.read()[0]["step_sent_bytes"] is None
    figures.num_done = 9
    figures.machine({"sent_bytes": 180, "link_bytes_per_s": 5.0, "link_peer": "b"})
    found = figures.read()[0]
    assert (found["step_sent_bytes"], found["link_bytes_per_s"], found.link_peer) == (40.0, 5.0, "b")
    figures.machine({"sent_bytes": None})
    assert figures.read()[0]["step_sent_bytes"] == 40.0
