"""The schedules among which "auto" chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from linkweave.collectives import overlap
from linkweave.collectives.overlap import Network, Profile, Schedule
from linkweave.collectives.training import planner
from linkweave.collectives.training.finalists import (
    FINALISTS,
    SPARSE,
    at_once,
    finalists,
    sent,
    unchained,
)

SLOW = Network(2e-3, 1.2e-8, workers=4)
FAST = Network(1e-6, 1e-13)
SLOWER = 100  # than the computation of a V100, so that a step of VGG-16 takes seconds


def profile() -> Profile:
    made = overlap.model("vgg16")
    layers = tuple(
        replace(one, forward_s=one.forward_s * SLOWER, backward_s=one.backward_s * SLOWER)
        for one in made.layers
    )
    return replace(made, layers=layers)


def seconds(schedule: Schedule) -> float:
    return schedule.predicted_seconds


@pytest.mark.parametrize("network", [SLOW, FAST])
def test_models_that_chain(network: Network) -> None:
    few, best, apart, ddp, last = finalists(profile(), network)
    assert len(few.communications) <= len(best.communications)
    assert network == FAST or len(few.communications) < len(best.communications)
    assert seconds(best) <= seconds(few) * (1 + 1e-9)
    assert not apart.chained
    assert not any(c.streamed for c in apart.communications)
    assert ddp == overlap.plan(profile(), network, "ddp")
    assert last == at_once(profile(), network)
    assert {one.network for one in (best, ddp, last)} == {network}
    assert few.network == apart.network == replace(network, overhead_s=few.network.overhead_s)
    assert "planned as if each all-reduce took" in few.note
    one = next(finalists(profile(), network, 1e6))  # each takes more than all can gain
    assert len(one.communications) == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_models_that_cannot_chain(sparse: bool) -> None:
    made = list(finalists(profile(), SLOW, chains=False, sparse=sparse))
    assert len(made) == FINALISTS - 1
    assert not any(one.chained or any(c.streamed for c in one.communications) for one in made)
    few, best = made[:2]
    assert len(few.communications) <= len(best.communications)
    assert seconds(best) <= min(map(seconds, made)) + 1e-12
    if sparse:
        assert {one.policy for one in made[:3]} <= {*SPARSE}


def test_a_streamed_schedule_that_is_not_chained_is_all_at_once() -> None:
    streamed = overlap.plan(profile(), SLOW, "c-cube")
    assert [c.streamed for c in streamed.communications] == [True]
    assert sent(streamed) != sent(replace(streamed, chained=False))
    assert sent(replace(streamed, chained=False)) != sent(at_once(profile(), SLOW))
    assert sent(unchained(streamed)) == sent(at_once(profile(), SLOW))


@pytest.mark.parametrize("usual", [1.0, 0.0])
def test_a_program_is_planned_anew_once_steps_take_a_fifth_more_or_less(usual: float) -> None:
    """After CHECKED steps, by their median pace; without a usual one the first counts."""

    class Told(planner.Planner):
        paces: Any

        def __init__(self) -> None:
            pass

        def _paces(self, turns: Any) -> list[float]:
            assert sum(map(len, turns)) == planner.CHECKED
            return next(self.paces)

    def checks(*medians: float) -> int:
        """After how many looks at the times it plans anew."""
        told = Told()
        told.paces = iter([9.0, median, 0.01] for median in (1.0, *medians))
        waiting = told._until_changed(usual)
        next(waiting)
        steps = 0
        try:
            while True:
                steps += 1
                waiting.send(None)  # type: ignore[arg-type]
        except StopIteration:
            assert steps % planner.CHECKED == 0
            return steps // planner.CHECKED

    assert checks(1.19, 0.81, 1.1, 0.9, 1.21) == 6
    assert checks(1.19, 0.81, 0.79) == 4
    assert checks(1.21) == 2
