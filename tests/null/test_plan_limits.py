"""Plans from anyone: whatever stands in one, the answer is a plan or a PlanError, and quick."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from linkweave.bench.command.options import parse_size
from linkweave.collectives.errors import CollectiveError, PlanError
from linkweave.collectives.planning.plan import LIMITS, Connection, Op, Plan, Step
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import shortened, verify
from linkweave.topology import load
from tests.null.helpers import by_hand, edited, step

PLANS = {
    name: json.loads(plan.to_json())
    for name, plan in {
        "detours": plan_allreduce(load("dgx1-v100"), 1 << 20, "ccube_dgx1", 4),
        "one_shot": plan_allreduce(load("mesh-3"), 1 << 10, "one_shot", 2),
        "alltoall": plan_collective("alltoall", load("ring-4"), 1 << 10),
        "sendrecv": plan_collective("sendrecv", load("mesh-4"), 1 << 10, ((0, 1), (3, 2))),
    }.items()
}
STRANGE: list[Any] = [
    None, True, False, -1, 0, 1, 2, 99, 1 << 70, 10**4000, 1.0, float("nan"), "", "1", "SEND",
    "\ud800", [], [0], [[0]], [0, 0, 0, 0, []], {}, {"a": 1},
]  # fmt: skip


def ways(data: Any, way: tuple = ()) -> Iterator[tuple]:
    """The way to every value inside."""
    if way:
        yield way
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            yield from ways(data[key], (*way, key))


def changed(data: Any, way: tuple, value: Any) -> Any:
    """The JSON with another value there."""
    key, *rest = way
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[key] = changed(copy[key], tuple(rest), value) if rest else value
    return copy


@pytest.mark.parametrize("name", PLANS)
def test_strange_values_are_refused_or_harmless(name: str) -> None:
    """A plan that is read can be shown, verified and simulated without any other error."""
    data, rng = PLANS[name], random.Random(name)
    machine = {"detours": "dgx1-v100", "one_shot": "mesh-3", "alltoall": "ring-4"}
    topo = load(machine.get(name, "mesh-4"))
    everywhere = list(ways(data))
    read = 0
    for _ in range(700):
        made = data
        for way in rng.sample(everywhere, rng.choice((1, 1, 2))):
            try:
                made = changed(made, way, rng.choice(STRANGE))
            except (KeyError, IndexError, TypeError, ValueError):  # what the first has replaced
                continue
        try:
            plan = Plan.from_json(json.dumps(made))
        except PlanError as error:
            assert len(str(error)) < 300
            continue
        read += 1
        assert str(plan)
        assert Plan.from_json(plan.to_json()) == plan
        for act in (lambda p: verify(p, topo), lambda p: simulate(p, topo, 1000)):
            try:
                act(plan)
            except PlanError:
                continue
    assert read > 30


@pytest.mark.parametrize(
    "source",
    ["[" * 3000, "[" * 100_000, '{"format":' * 3000, "9" * 5000, '{"size": -' + "9" * 5000 + "}",
     "", "nul", "\ufeff{}", "[]", "3", '{"format": "linkweave-plan", "version": {}}'],
    ids=range(11),
)  # fmt: skip
def test_text_that_is_no_plan_is_refused(source: str) -> None:
    with pytest.raises(PlanError, match="plan JSON"):
        Plan.from_json(source)


@pytest.mark.parametrize(
    ("way", "value", "words"),
    [
        (("slots",), 10**9, "slots must be an integer from 1 to 64, not 1000000000"),
        (("stride",), 10**8, "stride must be an integer from 1 to 65536, not 100000000"),
        (("num_chunks",), 10**8, "num_chunks must be an integer from 1 to 1048576"),
        (("size",), 10**9, "size must be an integer from 1 to 65536"),
        (("connections", 1, 2), 3, r"connections\[1\]\[2\] must be an integer from 0 to 2, not 3"),
        (("connections", 1, 3), -1, r"connections\[1\]\[3\] must be an integer from 0 to"),
        (("connections", 0, 4, 0), True, r"connections\[0\]\[4\]\[0\] must be a GPU or the name"),
        (("tracks", 0, 2, 0, 0, 1, 0), -1, r"tracks\[0\]\[2\]\[0\]\[0\]\[1\]\[0\] must be an int"),
        (("tracks", 0, 2, 0, 0, 4), 1, "must be one of True, False, not 1"),
        (("detours",), [[0, 1]], r"detours\[0\] must have at least 3 items, not 2"),
        (("format",), "x", 'needs "format": "linkweave-plan"'),
        (("version",), 7, "version 7 is unknown; known: 1"),
        (("tracks",), [[0, 0]], r"must have \d items, not 2"),
        (("tracks",), [[0, 0, [[["JUMP", [0], 0, None, False, False]]]]],
         "must be one of SEND, REDUCE, COPY, SIGNAL, WAIT, not 'JUMP'"),
        (("connections",), [[0, 0]], r"must have \d items, not 2"),
        (("algorithm",), 3, "algorithm must be a string, not 3"),
        (("root",), 3, "root must be an integer from 0 to 2, not 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(way: tuple, value: object, words: str) -> None:
    with pytest.raises(PlanError, match=f"plan JSON: .*{words}"):
        Plan.from_json(json.dumps(changed(PLANS["one_shot"], way, value)))


def test_a_missing_value_and_broken_text_are_named() -> None:
    good = PLANS["one_shot"]
    with pytest.raises(PlanError, match="plan JSON: line 1 column 2: "):
        Plan.from_json("{")
    for key in good.keys() - {"format", "version"}:
        with pytest.raises(PlanError, match=f"plan JSON lacks '{key}'"):
            Plan.from_json(json.dumps({k: v for k, v in good.items() if k != key}))


WRONG = [
    (("connections", 0, 0), 99), (("connections", 0, 0), None), (("connections", 0, 2), "1"),
    (("tracks", 0, 0), None), (("tracks", 0, 1), []), (("tracks", 0, 2, 0, 0, 1), ["0"]),
    (("tracks", 0, 2, 0, 0, 1), [1.5]), (("tracks", 0, 2, 0, 0, 1), [99]),
    (("tracks", 0, 2, 0, 0, 2), None), (("tracks", 0, 2, 0, 0, 2), 0.5),
    (("tracks", 0, 2, 0, 1, 3), "0"), (("collective",), "allgather"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "value"), WRONG)
def test_a_plan_read_with_wrong_values_inside_never_passes(way: tuple, value: object) -> None:
    with pytest.raises(PlanError):
        verify(Plan.from_json(json.dumps(changed(PLANS["one_shot"], way, value))), load("mesh-3"))


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 1 << 64, 10**9, 0, True, 1.0, None, "4"],
                         ids=range(9))  # fmt: skip
@pytest.mark.parametrize("name", LIMITS)
def test_numbers_have_limits(name: str, value: object) -> None:
    plan = Plan.from_json(json.dumps(PLANS["one_shot"]))
    with pytest.raises(PlanError, match=rf"{name} must be an integer from 1 to {LIMITS[name]}, "):
        replace(plan, **{name: value})


def test_the_largest_numbers_are_proved_in_time() -> None:
    """Of a plan with nothing to do, and of one whose chunks nobody moves."""
    start = time.process_time()
    most = {"num_chunks": LIMITS["num_chunks"], "slots": LIMITS["slots"]}
    idle = Plan("none", "allreduce", 1, stride=LIMITS["stride"], connections=(), tracks=(), **most)
    verify(idle, load("mesh-1"))
    verify(replace(idle, collective="sendrecv", size=16, root=()), load("mesh-16"))
    with pytest.raises(PlanError, match="not over ranks"):
        verify(replace(idle, size=16), load("mesh-16"))
    assert time.process_time() - start < 20
    with pytest.raises(PlanError, match="a group of 65536 chunks on 17 ranks is too large"):
        replace(idle, size=17)


def test_a_long_plan_without_a_short_form_is_refused() -> None:
    """What it waits for in phase 0 is signalled in phase 1: it has to be walked in full."""
    tracks = {(0, 0): [[], [step(Op.SIGNAL, 0)]], (0, 1): [[step(Op.WAIT, 0)]]}
    plan = by_hand([Connection(0, 0, 0, 1)], tracks, num_chunks=1 << 17)
    assert shortened(plan) == plan
    with pytest.raises(PlanError, match="at most 262144 steps, not 524288"):
        verify(plan.with_chunks(1 << 18), load("mesh-1"))


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        (Connection(0, 0, 0, 1, (0, 99)), "which is not a path"),
        (Connection(0, 0, 1, 0, ((0,), 1)), "which is not a path"),  # type: ignore[arg-type]
        (Connection(0, 0, 0, 0), "joins a track to itself"),
        (Connection(0, -1, 1, 0, (0, 1)), "does not join ranks"),
        (Connection(0, 0, 1, 1 << 40, (0, 1)), "does not join ranks"),
    ],
)
def test_connections_that_make_no_sense_are_refused(connection: Connection, words: str) -> None:
    plan = plan_allreduce(load("mesh-2"), 1 << 10, "tree")
    with pytest.raises(PlanError, match=words):
        verify(replace(plan, connections=(*plan.connections, connection)), load("mesh-2"))


def test_a_message_too_long_to_simulate_is_refused() -> None:
    topo = load("mesh-64")
    plan = plan_allreduce(topo, 1 << 20, "chain").with_chunks(1 << 20)
    with pytest.raises(
        PlanError, match="1048576 chunks take 132120576 sends, too many to simulate"
    ):
        simulate(plan, topo, 1 << 20)
    with pytest.raises(PlanError, match="nbytes must be an integer from 0 to 1125899906842624"):
        plan_allreduce(topo, 10**20)


def test_a_size_of_many_digits_is_refused() -> None:
    for text in ("9" * 4400, "1" * 19, "9" * 4400 + "K"):
        with pytest.raises(CollectiveError, match="a size is like 1024, 64K, 16M or 1G, not"):
            parse_size(text)


def test_steps_with_strange_connections_are_refused() -> None:
    plan = plan_allreduce(load("mesh-2"), 1 << 10, "tree")
    for named in ((99,), (-1,), ("0",), (None,), (True,)):
        wrong = edited(plan, 0, 0, [Step(Op.WAIT, named, 0)])  # type: ignore[arg-type]
        with pytest.raises(PlanError):
            verify(wrong, load("mesh-2"))


def test_trees_have_a_parent_for_each_rank() -> None:
    data = json.loads(plan_allreduce(load("ring-4"), 1 << 20, "ring").to_json())
    plan = Plan.from_json(json.dumps({**data, "trees": [[0]]}))
    with pytest.raises(PlanError, match="a tree of 1 ranks in a plan for 4 ranks"):
        verify(plan, load("ring-4"))
    with pytest.raises(PlanError, match="one root"):
        Plan.from_json(json.dumps({**data, "trees": [[1, 0]]}))
