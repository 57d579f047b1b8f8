"""What the verifier knows of values: what may reach a result, and in which order it is combined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.dataflow import finals, origins
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Tuning, lower
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.planner import candidates, plan_collective
from linkweave.collectives.planning.verify import races, verify
from linkweave.collectives.runtime import reference
from linkweave.topology import load
from tests.null.executor import is_right
from tests.null.helpers import by_hand, check_wrong, hop, lowered, receive, send, step


def edited_steps(plan: Plan, change: dict[Op, dict[str, object]], rank: int | None = None) -> Plan:
    """The plan with other values in all steps of some ops, at one rank or at all."""

    def other(old: Step) -> Step:
        return replace(old, **change.get(old.op, {}))

    tracks = [
        s if rank not in (None, s.rank)
        else replace(s, phases=tuple(tuple(map(other, body)) for body in s.phases))
        for s in plan.tracks
    ]  # fmt: skip
    return replace(plan, tracks=tuple(tracks))


@pytest.mark.parametrize("collective", ["broadcast", "sendrecv", "allgather", "alltoall"])
def test_what_a_rank_does_not_give_reaches_no_result(collective: str) -> None:
    """Chunks that are to be received hold something, too: the caller's data."""
    topo = load("mesh-2")
    root = ((0, 1),) if collective == "sendrecv" else 0
    for name in candidates(topo, collective, root):
        plan = plan_collective(collective, topo, 4096, root, name)
        wrong = edited_steps(plan, {Op.COPY: {"op": Op.REDUCE}})
        check_wrong(wrong, topo, r"combined over ranks .* and other data of ranks \[1\]")


def test_all_ranks_combine_in_one_order() -> None:
    """Else float results differ between ranks."""
    topo = load("mesh-3")
    plan = lowered("one_shot", topo, 2)
    wrong = edited_steps(plan, {Op.REDUCE: {"ahead": 0}}, rank=2)
    check_wrong(wrong, topo, "rank 2 combines chunk 0 in another order than rank 0")


def test_the_order_of_two_matters() -> None:
    """Of 0 and -0 the minimum is the one that stands first."""
    topo = load("mesh-2")
    plan = lowered("recursive_doubling", topo, 1)
    zeros = [np.array([0.0]), np.array([-0.0])]

    def signs(made: Plan) -> set[bool]:
        return {bool(np.signbit(out[0])) for out in reference.run(made, zeros, "min")}

    assert len(signs(plan)) == 1
    wrong = edited_steps(plan, {Op.REDUCE: {"ahead": 0}})
    assert len(signs(wrong)) == 2
    with pytest.raises(PlanError, match="in another order"):
        verify(wrong, topo)


def test_one_reduce_of_three_is_not_two_of_two() -> None:
    """A 16-bit float is rounded after each."""
    topo = load("mesh-3")
    rounds = (
        (Reduce((1,), 0, 0, 0), Reduce((0, 2), 1, 0, 1, ahead=1)),
        (Reduce((2,), 0, 0, 0),),
        (Copy(0, (2,), 0, 2),),
    )
    plan = lower(Algorithm("by hand", 3, 1, (rounds,)), topo, Tuning(1))
    with pytest.raises(PlanError, match="in another order"):
        verify(plan, topo)


def test_a_rank_between_has_no_room_for_a_block() -> None:
    """It would write to the start of its own blocks."""
    topo = load("mesh-3")
    moves = tuple(
        Copy(s, (d,), 3 * s + d, (d - s) % 3) for s in range(3) for d in range(3) if s != d
    )
    rounds = ((moves[0], *moves[1:]), (Copy(1, (2,), 1, 3),))  # rank 0's block to 1, on to 2
    plan = lower(Algorithm("by hand", 3, 9, (rounds,), collective="alltoall"), topo, Tuning(9))
    check_wrong(plan, topo, "uses chunk 1, which rank 2 can only forward")


def test_a_group_that_is_cut_short_is_right_as_a_whole() -> None:
    """As what looks at one whole group takes for granted."""
    tracks = {
        (0, 0): [[*receive(Op.REDUCE, 0, last=True), *send(1), step(Op.WAIT, 1, chunk=1)]],
        (1, 0): [send(0)],
        (1, 1): [receive(Op.COPY, 1)],
    }
    plan = by_hand([hop(1, 0, 0), hop(0, 0, 1, 1)], tracks, num_chunks=1, stride=2)
    with pytest.raises(PlanError):
        verify(plan, load("mesh-2"))


def test_data_that_goes_in_circles_has_an_origin() -> None:
    """Three ranks each pass on only what comes from the one before: nobody's chunk at all."""
    hops = [hop(r, 0, (r + 1) % 3) for r in range(3)]
    forward = {(r, 0): [send(r, source=(r - 1) % 3)] for r in range(3)}
    assert set(origins(by_hand(hops, forward))) == {0, 1, 2}


def test_a_connection_of_several_ranks_data_is_not_read_where_it_lies() -> None:
    """Rank 1 sends rank 2 its own chunk, then rank 0's on the same connection."""
    forward = [step(Op.WAIT, 0), *send(1, source=0), step(Op.SIGNAL, 0)]
    take = [*receive(Op.REDUCE, 1), *receive(Op.REDUCE, 1, last=True)]
    give = [step(Op.WAIT, 2), step(Op.WAIT, 3), step(Op.SEND, 2, 3), step(Op.SIGNAL, 2),
            step(Op.SIGNAL, 3)]  # fmt: skip
    plan = by_hand(
        [hop(0, 0, 1), hop(1, 0, 2), hop(2, 0, 0, 1), hop(2, 0, 1, 1)],
        {
            (0, 0): [send(0)], (0, 1): [receive(Op.COPY, 2)],
            (1, 0): [[*send(1), *forward]], (1, 1): [receive(Op.COPY, 3)],
            (2, 0): [[*take, *give]],
        },
    )  # fmt: skip
    verify(plan, load("mesh-3"))
    assert is_right(plan)
    assert any("several ranks' data" in words for words in races(plan, direct=True))


def test_a_queue_refuses_plans_that_copy_what_is_not_final() -> None:
    """Rank 1 gets rank 0's own chunk first."""
    take = [*receive(Op.REDUCE, 0, last=True), *send(1)]
    plan = by_hand(
        [hop(1, 0, 0), hop(0, 0, 1, 1), hop(1, 0, 1, 1)],
        {
            (0, 0): [[*send(1), *take]],
            (1, 0): [[*send(0), step(Op.SIGNAL, 2)]],
            (1, 1): [[step(Op.WAIT, 2), *receive(Op.COPY, 1), *receive(Op.COPY, 1)]],
        },
    )
    verify(plan, load("mesh-2"))
    assert is_right(plan)
    assert finals(plan, 0) == [[0]]
    with pytest.raises(PlanError, match="rank 1 completes chunk 0 2 times"):
        finals(plan, 1)
