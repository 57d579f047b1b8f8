"""Networks of topologies and of measurements: their timings, contention and bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkweave import collectives, topology
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Communication, Network, Piece, Timing, timing
from linkweave.collectives.overlap.network import LARGE, contention
from linkweave.collectives.overlap.timeline import timeline
from linkweave.collectives.overlap.timing import SHARES
from linkweave.topology import Link, Topology

MB = 1 << 20


def ring_of(links: int) -> Topology:
    """Four GPUs in a ring with so many links between neighbours."""
    ends = [(a, b) for r in range(4) for a, b in ((r, (r + 1) % 4), ((r + 1) % 4, r))]
    return Topology(
        "ring", tuple(range(4)), tuple(Link(a, b, 10**10, links, 1.0) for a, b in sorted(ends))
    )


def test_chunks_are_final_when_the_last_rank_has_them() -> None:
    machine = topology.load("mesh-2")
    plan = collectives.plan_allreduce(machine, MB, "tree", 8)
    line = collectives.simulate(plan, machine, MB)
    # a chunk step up and one down, one chunk after another
    step = 5e-6 + MB / 8 / 25e9
    assert line.chunk_seconds == pytest.approx(
        [line.first_chunk_seconds + i * step for i in range(8)]
    )
    assert line.chunk_seconds[-1] == line.seconds
    assert line.chunk_seconds[0] == line.first_chunk_seconds


@pytest.mark.parametrize("algorithm", ["overlapped_double_tree", "double_tree", "ring", "two_shot"])
def test_arrivals_are_those_of_the_simulated_chunks(algorithm: str) -> None:
    machine = topology.load("dgx1-v100")
    network = Network.from_topology(machine, algorithm)
    for one in network.timings:
        plan = collectives.plan_allreduce(machine, one.nbytes, algorithm)
        line = collectives.simulate(plan, machine, one.nbytes)
        assert one.arrivals[-1] == line.seconds == pytest.approx(one.seconds, rel=0.02)
        bounds = plan.chunk_bounds(one.nbytes)
        for part in range(1, SHARES + 1):
            upto = one.nbytes * part / SHARES
            needed = [line.chunk_seconds[i] for i, (start, _) in enumerate(bounds) if start < upto]
            assert one.arrivals[part] == max(needed)


def test_an_overlapped_tree_turns_gradients_around_before_a_ring_does() -> None:
    machine = topology.load("dgx1-v100")
    first = {
        name: Network.from_topology(machine, name).arrivals(64 * MB, [64])[0]
        for name in ("overlapped_double_tree", "double_tree", "ring")
    }
    assert first["overlapped_double_tree"] < first["double_tree"] / 2
    assert first["overlapped_double_tree"] < first["ring"] / 2


def test_contention_is_that_of_the_links_two_calls_share() -> None:
    # two chains on single links take turns, and each sends while the other starts a chunk
    chunk = LARGE / collectives.plan_allreduce(ring_of(1), LARGE, "chain").num_chunks
    shared = 2 * (chunk / 1e10) / (1e-6 + chunk / 1e10)
    assert contention(ring_of(1), "chain") == pytest.approx(shared, rel=0.02)
    assert contention(ring_of(2), "chain") == pytest.approx(1.0, rel=1e-4)


def test_one_gpu_takes_no_time() -> None:
    network = Network.from_topology(topology.load("mesh-1"))
    assert network.workers == 1
    assert {one.seconds for one in network.timings} == {0.0}
    profile = overlap.model("resnet50")
    made = overlap.plan(profile, network, "wfbp")
    assert made.predicted_seconds == pytest.approx(profile.backward_s + profile.forward_s)


def test_times_between_sizes_are_linear() -> None:
    network = Network.from_measurements([(200, 3.0), (100, 2.0), (100, 9.0), (100, 1.0)])
    assert network.timings == (Timing(100, 2.0), Timing(200, 3.0))
    assert [network.seconds(n) for n in (1, 100, 150, 200, 300)] == [2.0, 2.0, 2.5, 3.0, 4.0]
    assert network.least == (1.0, 0.01)
    assert network.arrivals(200, [50, 200]) == [1.5, 3.0]


@given(
    st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0, 10), st.floats(0, 1)),
             min_size=2, max_size=6, unique_by=lambda row: row[0]),
    st.integers(1, 1 << 31), st.floats(0.01, 1),
)  # fmt: skip
def test_no_time_is_below_the_least(
    rows: list[tuple[int, float, float]], nbytes: int, share: float
) -> None:
    timings = [
        Timing(n, s, tuple(s * (first + (1 - first) * i / SHARES) for i in range(SHARES + 1)))
        for n, s, first in sorted(rows)
    ]
    network = Network(0, 0, timings=tuple(timings))
    startup, pace = network.least
    slack = 1e-9
    assert startup >= 0 and pace >= 0
    assert network.seconds(nbytes) >= startup + pace * nbytes - slack
    assert network.startup(nbytes) >= startup - slack
    assert network.arrivals(nbytes, [nbytes * share])[0] >= startup + pace * nbytes * share - slack


@pytest.mark.parametrize("name", ["dgx1-v100", "pcie-5"])
def test_no_policy_is_faster_than_the_lower_bound(name: str) -> None:
    network = Network.from_topology(topology.load(name))
    profile = overlap.model_at("resnet50", 16, 6e12)
    for policy in overlap.POLICIES:
        searched = {"limit_s": 0.2} if policy == "optimal" else {}
        made = overlap.plan(profile, network, policy, **searched)
        assert made.predicted_seconds >= made.lower_bound_seconds * (1 - 1e-9)
        assert made.predicted_seconds >= profile.forward_s + profile.backward_s


def test_a_chained_step_follows_the_arrivals() -> None:
    network = Network.from_topology(topology.load("dgx1-v100"), "overlapped_double_tree")
    profile = overlap.model_at("vgg16", 16, 10e12)
    made = overlap.plan(profile, network, "c-cube")
    upto = np.cumsum([layer.nbytes for layer in profile.layers])
    at = profile.backward_s
    for layer, after in zip(
        profile.layers, network.arrivals(profile.nbytes, upto.tolist()), strict=True
    ):
        at = max(at, profile.backward_s + after) + layer.forward_s
    assert made.predicted_seconds == pytest.approx(at, rel=1e-12)


def test_schedules_keep_their_timings_in_json() -> None:
    network = Network.from_topology(topology.load("mesh-3"))
    made = overlap.plan(overlap.model("googlenet"), network, "mg-wfbp")
    assert overlap.Schedule.from_json(made.to_json()) == made
    older = json.loads(made.to_json())
    del older["network"]["timings"]
    found = overlap.Schedule.from_json(json.dumps(older))
    assert found.network == replace(network, timings=())


def test_a_network_file_may_have_timings(tmp_path: object) -> None:
    path = f"{tmp_path}/net.json"
    rows = [{"nbytes": 10, "seconds": 1.0}, {"nbytes": 20, "seconds": 3.0}]
    with open(path, "w") as file:
        json.dump({"startup_s": 0, "seconds_per_byte": 0.1, "timings": rows}, file)
    assert overlap.network_from(path).seconds(15) == 2.0


@pytest.mark.parametrize(
    ("timings", "words"),
    [
        ([Timing(1, 1.0)], "two or more increasing sizes"),
        ([Timing(2, 1.0), Timing(1, 1.0)], "two or more increasing sizes"),
        ([Timing(1, 1.0), Timing(2, 1.0, (0.0,) * (SHARES + 1))], "all timings have arrivals"),
    ],
)
def test_timings_must_fit_together(timings: list[Timing], words: str) -> None:
    with pytest.raises(CollectiveError, match=words):
        Network(0, 0, timings=tuple(timings))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"nbytes": 0, "seconds": 1}, "nbytes"),
        ({"nbytes": 1, "seconds": -1}, "seconds"),
        ({"nbytes": 1}, "no seconds"),
        ({"nbytes": 1, "seconds": 1, "speed": 2}, "unknown field 'speed'"),
        ({"nbytes": 1, "seconds": 1, "arrivals": [1.0]}, "17 numbers or none"),
        ({"nbytes": 1, "seconds": 1, "arrivals": [2.0] + [1.0] * SHARES}, "decrease"),
        ({"nbytes": 1, "seconds": 1, "arrivals": 3}, "must be numbers"),
    ],
)
def test_a_wrong_timing_is_named(row: dict[str, object], words: str) -> None:
    with pytest.raises(CollectiveError, match=words):
        timing.timings_of([row], "file")


def test_timings_hold_for_their_own_workers() -> None:
    network = Network.from_measurements([(1, 1.0), (2, 2.0)], workers=4)
    assert network.at(4) == network
    with pytest.raises(CollectiveError, match="timings of 4 workers, which determine none of 8"):
        network.at(8)


def test_a_batch_takes_its_flops() -> None:
    one, many = (overlap.model_at("resnet50", batch, 1e12) for batch in (1, 64))
    assert many.forward_s == pytest.approx(64 * one.forward_s) == pytest.approx(0.5263, rel=1e-3)
    assert many.backward_s == pytest.approx(2 * many.forward_s)
    with pytest.raises(CollectiveError, match="batch must be an integer"):
        overlap.model_at("resnet50", 0, 1e12)


@pytest.mark.parametrize("algorithm", ["ring", "overlapped_double_tree", "auto"])
@pytest.mark.parametrize("chained", [False, True])
def test_parts_arrive_alike_beside_a_short_all_reduce(algorithm: str, chained: bool) -> None:
    """Parts of a streamed all-reduce arrive alike, however many lanes there are."""
    profile = overlap.model_at("vgg16", 16, 6.28e12)
    network = Network.from_topology(topology.load("dgx1-v100"), algorithm)
    last = len(profile.layers) - 1
    first = tuple(Piece(i, 0, layer.nbytes) for i, layer in enumerate(profile.layers) if i < last)
    rest = Piece(last, 0, 4)  # a start-up later than the last gradient, and 4 bytes
    sends = (Communication(first, 0, streamed=True), Communication((rest,), 1))
    both = timeline(profile, network, sends, chained)
    alone = timeline(profile, network, sends[:1], chained)
    begun = profile.backward_s
    arrived = network.arrivals(sends[0].nbytes, accumulate(p.nbytes for p in first))
    assert alone.sends[0] == pytest.approx((begun, begun + arrived[-1]))
    assert both.sends[0] == pytest.approx(alone.sends[0], rel=1e-4)
    assert both.seconds == pytest.approx(alone.seconds, rel=1e-3)
    for (one, _), (other, _) in zip(both.forward[:last], alone.forward[:last], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_noise_in_the_last_size_does_not_make_bytes_free() -> None:
    pairs = [(1 << 20, 0.01), (2 << 20, 0.02), (4 << 20, 0.0405), (8 << 20, 0.0402)]
    network = Network.from_measurements(pairs)
    assert [one.seconds for one in network.timings] == [0.01, 0.02, 0.0402, 0.0402]
    pace = (0.0402 - 0.02) / (6 << 20)
    assert network.seconds(20 << 20) == pytest.approx(0.0402 + pace * (12 << 20))
    startup, least = network.least
    assert 0 < least <= pace and startup >= 0
    assert all(startup + least * one.nbytes <= one.seconds for one in network.timings)


def test_a_slow_small_message_does_not_hide_the_larger_ones() -> None:
    pairs = [(1024, 5e-3), (4096, 1e-3), (65536, 1.1e-3), (1 << 20, 2e-3)]
    network = Network.from_measurements(pairs)
    assert [one.seconds for one in network.timings] == [1e-3, 1e-3, 1.1e-3, 2e-3]
    assert network.least[1] > 0 and network.seconds_per_byte > 0


@pytest.mark.parametrize("seconds", [float("nan"), -5.0, "1"])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(CollectiveError, match="seconds of a measurement must be"):
        Network.from_measurements([(1024, 5e-3), (4096, seconds), (65536, 1.0)])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_no_increasing_times_are_nearer(times: list[int]) -> None:
    def apart(others: Iterable[float]) -> float:
        return sum(abs(a - b) for a, b in zip(times, others, strict=True))

    made = timing.increasing(times)
    assert made == sorted(made)
    every = combinations_with_replacement(sorted({*times}), len(times))
    assert apart(made) == min(map(apart, every))
