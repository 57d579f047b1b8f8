"""Steps of a plan put so that an executor may combine what came and send it on in one pass."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.access import passed_on
from linkweave.collectives.planning.plan import Op, Plan, Step, Track
from linkweave.collectives.planning.verify import prove, shortened


def fused(plan: Plan) -> Plan:
    """A proved plan with each REDUCE or COPY of `passed_on` just before the SEND of its result.

    The waits between the two come before them, the signals behind. So a slot is freed when its
    content has been sent on, which could let ranks wait for each other in a circle: the new order
    is proved like any plan, for these chunks and for any number of whole groups, and where it is
    refused the plan stays as it is. What `shortened` asks of a plan does not depend on the order of
    a phase's steps, so one proof serves all long messages.
    """
    made = _reordered(shortened(plan))
    return made.with_chunks(plan.num_chunks) if made else plan


@lru_cache(maxsize=64)
def _reordered(plan: Plan) -> Plan | None:
    """None where nothing changes."""
    made = replace(plan, tracks=tuple(_track(plan, s) for s in plan.tracks))
    if made == plan:
        return None
    try:
        for one in {made, made.with_chunks(plan.stride * (plan.slots + 2))}:
            prove(one)
    except PlanError:
        return None
    return made


def _track(plan: Plan, track: Track) -> Track:
    together, base, phases = passed_on(plan), 0, []
    for body in track.phases:
        order: list[Step] = []
        held: list[Step] = []  # from a step that is passed on to its SEND
        for at, step in enumerate(body, base):
            if held:
                held.append(step)
                if step.op is Op.SEND:
                    order += _beside(held)
                    held = []
            elif (track.rank, track.channel, at) in together:
                held = [step]
            else:
                order.append(step)
        phases.append(tuple(order))
        base += len(body)
    return replace(track, phases=tuple(phases))


def _beside(held: list[Step]) -> list[Step]:
    first, *between, send = held
    waits = [s for s in between if s.op is Op.WAIT]
    return [*waits, first, send, *(s for s in between if s.op is Op.SIGNAL)]
