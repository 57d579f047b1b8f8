"""What all-reduces cost the computation beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Layer, Network, Profile, Schedule
from linkweave.collectives.overlap.policies import NAMED

PROFILE = Profile(tuple(Layer(f"l{i}", 1600, 1.0, 2.0) for i in range(12)), "even")
FREE = Network(0.25, 1 / 800, 2.0, 4)


@pytest.mark.parametrize("policy", NAMED)
def test_each_all_reduce_prolongs_the_step(policy: str) -> None:
    made = NAMED[policy](PROFILE, FREE)
    costly = replace(made, network=replace(FREE, overhead_s=0.125))
    more = 0.125 * len(made.communications)
    assert costly.predicted_seconds == made.predicted_seconds + more
    assert costly.timeline.exposed_s == made.timeline.exposed_s + more
    assert costly.timeline.sends == made.timeline.sends
    assert costly.lower_bound_seconds == made.lower_bound_seconds


def test_auto_sends_less_often_where_that_costs() -> None:
    made = [
        overlap.plan(PROFILE, replace(FREE, overhead_s=overhead), "auto")
        for overhead in (0.0, 0.5, 50.0)
    ]
    numbers = [len(schedule.communications) for schedule in made]
    assert numbers[0] > numbers[1] > numbers[2] == 1


def test_a_schedule_keeps_its_networks_overhead() -> None:
    made = NAMED["wfbp"](PROFILE, replace(FREE, overhead_s=0.5))
    assert Schedule.from_json(made.to_json()) == made
    assert str(made.network).endswith("gamma 2, overhead 500.000 ms")
    older = made.to_json().replace(', "overhead_s": 0.5', "")
    assert Schedule.from_json(older).network == FREE


@pytest.mark.parametrize("overhead", [-1.0, float("nan"), "1"])
def test_an_overhead_is_a_time(overhead: object) -> None:
    with pytest.raises(CollectiveError, match="overhead_s"):
        replace(FREE, overhead_s=overhead)
