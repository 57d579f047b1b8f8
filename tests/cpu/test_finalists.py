"""The schedules among which "auto" chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linkweave.collectives import overlap
from linkweave.collectives.overlap import Network, Profile, Schedule
from linkweave.collectives.training import tuner

SLOW = Network(2e-3, 1.2e-8, 1.5, 4)
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
    few, best, apart, ddp, last = tuner.finalists(profile(), network)
    assert len(few.communications) <= len(best.communications)
    assert network == FAST or len(few.communications) < len(best.communications)
    assert seconds(best) <= seconds(few) * (1 + 1e-9)
    assert not apart.chained
    assert not any(c.streamed for c in apart.communications)
    assert ddp == overlap.plan(profile(), network, "ddp")
    assert last == tuner.after_backward(profile(), network)
    assert {one.network for one in (best, ddp, last)} == {network}
    assert few.network == apart.network == replace(network, overhead_s=few.network.overhead_s)
    assert "planned as if each all-reduce took" in few.note
    one = next(tuner.finalists(profile(), network, 1e6))  # each takes more than all can gain
    assert len(one.communications) == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_models_that_cannot_chain(sparse: bool) -> None:
    made = list(tuner.finalists(profile(), SLOW, chains=False, sparse=sparse))
    assert len(made) == tuner.FINALISTS - 1
    assert not any(one.chained or any(c.streamed for c in one.communications) for one in made)
    few, best = made[:2]
    assert len(few.communications) <= len(best.communications)
    assert seconds(best) <= min(map(seconds, made)) + 1e-12
    if sparse:
        assert {one.policy for one in made[:3]} <= {*tuner.SPARSE}


def test_a_streamed_schedule_that_is_not_chained_is_all_at_once() -> None:
    streamed = overlap.plan(profile(), SLOW, "c-cube")
    assert [c.streamed for c in streamed.communications] == [True]
    assert tuner.sent(streamed) != tuner.sent(replace(streamed, chained=False))
    assert tuner.sent(replace(streamed, chained=False)) != tuner.sent(
        tuner.after_backward(profile(), SLOW)
    )
    assert tuner.sent(tuner.unchained(streamed)) == tuner.sent(
        tuner.after_backward(profile(), SLOW)
    )
