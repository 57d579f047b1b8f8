"""A schedule as JSON: read back to an equal one, or refused with the field's name."""

from __future__ import annotations

import json

import pytest

from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import MeasuredStep, Schedule

PROFILE = overlap.Profile(
    (overlap.Layer("a", 4096, 0.001, 0.002), overlap.Layer("b", 1 << 20, 0.003, 0.004)), "mine"
)
NETWORK = overlap.Network(0.0005, 1e-9, 1.5, 4)


def sends(**changed: object) -> dict[str, object]:
    return {"pieces": [], "lane": 0, "after": [], "streamed": False, **changed}


@pytest.mark.parametrize("policy", [*overlap.POLICIES, "auto"])
def test_every_policys_schedule_is_read_back(policy: str) -> None:
    options = {"limit_s": 0.2} if policy in ("auto", "optimal") else {}
    made = overlap.plan(PROFILE, NETWORK, policy, **options)
    again = Schedule.from_json(made.to_json())
    assert again == made and again.predicted_seconds == made.predicted_seconds
    assert "predicted" not in made.to_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, 'needs "format"'),
        ({"version": 2}, "version 2"),
        ({"policy": 3}, "policy must be a str"),
        ({"chained": 1}, "chained must be a bool"),
        ({"network": {"startup_s": 1.0, "speed": 2}}, "a network must be an object of gamma"),
        ({"network": {"startup_s": -1, "seconds_per_byte": 1, "gamma": 2, "workers": 2,
                      "name": "n"}}, "startup_s"),
        ({"profile": {"layers": []}}, "no layers"),
        ({"communications": [3]}, "a communication must be an object"),
        ({"communications": [sends()]}, "has no pieces"),
        ({"communications": [sends(after=[True])]}, "a number in after must be an integer"),
        ({"communications": [sends(streamed="no")]}, "streamed must be a bool"),
        ({"communications": [sends(speed=1)]}, "a communication must be an object of after"),
        ({"communications": [sends(pieces=[{"layer": 0, "first": 0}])]}, "a piece must be"),
        ({"communications": [sends(pieces=[[]])]}, "a piece must be an object of first"),
        ({"communications": [sends(pieces=[{"layer": 9, "first": 0, "nbytes": 16}])]}, "no 9"),
        ({"communications": []}, "0 of 4096 bytes"),
    ],
)  # fmt: skip
def test_what_is_not_a_schedule_is_refused(change: dict[str, object], words: str) -> None:
    data = json.loads(overlap.plan(PROFILE, NETWORK, "wfbp").to_json())
    with pytest.raises(CollectiveError, match=words):
        Schedule.from_json(json.dumps({**data, **change}))


def test_a_missing_field_and_broken_text_are_named() -> None:
    data = json.loads(overlap.plan(PROFILE, NETWORK, "wfbp").to_json())
    del data["note"]
    with pytest.raises(CollectiveError, match="lacks 'note'"):
        Schedule.from_json(json.dumps(data))
    for text in ("{", "[" * 3000, "[]"):
        with pytest.raises(CollectiveError, match="schedule JSON"):
            Schedule.from_json(text)


def test_a_measured_step_is_read_back() -> None:
    planned = overlap.plan(PROFILE, NETWORK, "wfbp")
    step = MeasuredStep(planned, planned.timeline)
    assert MeasuredStep.from_json(step.to_json()) == step


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward": [[0, 1]]}, "step JSON: a list of 2 spans is needed"),
        ({"forward": 2}, "step JSON: a list of 2 spans is needed"),
        ({"forward": [[0, 1], [1]]}, "a span is a start and an end, not a list of 1 items"),
        ({"forward": [[0, 1], [1, 2, 3]]}, "a span is a start and an end, not a list of 3 items"),
        ({"forward": [[0, 1], 3]}, "a span is a start and an end, not 3"),
        ({"forward": [[0, 1], "ab"]}, "a span is a start and an end, not 'ab'"),
        ({"backward": [[0, 1], [1, "2"]]}, "a moment must be a number from .*, not '2'"),
        ({"seconds": -1}, "seconds must be a number from 0"),
        ({"exposed_s": None}, "exposed_s must be a number"),
    ],
)
def test_what_is_not_a_measured_step_is_refused(change: dict[str, object], words: str) -> None:
    planned = overlap.plan(PROFILE, NETWORK, "wfbp")
    data = json.loads(MeasuredStep(planned, planned.timeline).to_json())
    data["timeline"] |= change
    with pytest.raises(CollectiveError, match=words):
        MeasuredStep.from_json(json.dumps(data))
