"""The checks of `verify` that need no execution of the plan: its form, and the links it uses."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.limits import MOST_CHANNELS
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.topology import Topology


def check_form(plan: Plan) -> None:
    """Raise PlanError unless every rank, channel, chunk and connection number is valid."""
    for c in plan.connections:
        ends = (c.src, c.src_channel), (c.dst, c.dst_channel)
        if not all(_is_track(plan, *end) for end in ends):
            raise PlanError(f"connection {c} does not join ranks of the plan's {plan.size}")
        if ends[0] == ends[1]:
            raise PlanError(f"connection {c} joins a track to itself")
        if not all(isinstance(v, int | str) for v in c.path) or (c.local and c.path):
            raise PlanError(f"connection {c} runs over {c.path}, which is not a path")
    keys = [(s.rank, s.channel) for s in plan.tracks]
    for rank, channel in keys:
        if not _is_track(plan, rank, channel):
            raise PlanError(
                f"a track has rank {rank}, channel {channel}; the plan has {plan.size} ranks "
                f"of at most {MOST_CHANNELS} channels"
            )
    if len(set(keys)) != len(keys):
        raise PlanError("two tracks share a rank and a channel")
    if wrong_tree := [tree for tree in plan.trees if len(tree.parent) != plan.size]:
        raise PlanError(
            f"a tree of {len(wrong_tree[0].parent)} ranks in a plan for {plan.size} ranks"
        )
    for track in plan.tracks:
        at = 0
        for body in track.phases:
            for step in body:
                if wrong := _wrong(plan, track.rank, step):
                    raise PlanError(
                        f"rank {track.rank} channel {track.channel} step {at}: {step.op.name} "
                        f"{wrong}"
                    )
                at += 1


def _is_track(plan: Plan, rank: object, channel: object) -> bool:
    """Return whether the plan may have a track of this rank and channel."""
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
        for value, end in ((rank, plan.size), (channel, MOST_CHANNELS))
    )


def _wrong(plan: Plan, rank: int, step: Step) -> str:
    """Return what is wrong with a step, or an empty string."""
    named = step.connections if step.source is None else (*step.connections, step.source)
    if {*map(type, named), type(step.chunk), type(step.ahead)} != {int}:
        return "needs integers"
    if not 0 <= step.chunk < plan.stride or not step.connections:
        return f"needs a connection and a chunk below the stride {plan.stride}, not {step.chunk}"
    if bad := [i for i in named if not 0 <= i < len(plan.connections)]:
        return f"names connection {bad[0]}; the plan has {len(plan.connections)}"
    if len(named) > 1:
        if len(set(named)) != len(named):
            return "names a connection twice"
        if step.op in (Op.WAIT, Op.SIGNAL, Op.COPY):
            return f"takes only one connection, not {len(named)}"
    if step.op in (Op.WAIT, Op.SIGNAL):
        return ""
    if any(plan.connections[i].local for i in named):
        return "moves data over a connection that only orders steps"
    if not 0 <= step.ahead <= len(named) * (step.op is Op.REDUCE):
        return f"puts {step.ahead} of its connections before the rank's own value"
    if step.op is not Op.SEND and step.source is not None:
        return "has a source, which only a SEND may have"
    if step.source is None and not plan.definition.has_chunk(plan.size, rank, step.chunk):
        return f"uses chunk {step.chunk}, which rank {rank} can only forward: it is not its own"
    return ""


def check_links(plan: Plan, topology: Topology) -> None:
    """Raise PlanError unless every connection runs over existing links, and where the plan claims
    exclusive links, over links of its own."""
    if plan.size != len(topology.gpus):
        raise PlanError(
            f"the plan is for {plan.size} ranks; {topology.name} has {len(topology.gpus)} GPUs"
        )
    for connection in plan.connections:
        if connection.local:
            continue
        ends = (topology.gpus[connection.src], topology.gpus[connection.dst])
        if (*connection.path[:1], *connection.path[-1:]) != ends:
            raise PlanError(
                f"connection {connection} runs over {connection.path}, which does not lead from "
                f"GPU {ends[0]} to GPU {ends[1]}"
            )
        for link in connection.links:
            if link not in topology.by_ends:
                raise PlanError(
                    f"connection {connection}: {topology.name} has no link {link[0]}->{link[1]}"
                )
        if passed := [v for v in connection.path[1:-1] if isinstance(v, int)]:
            raise PlanError(f"connection {connection}: hardware does not route through {passed}")
    if plan.exclusive:
        for (a, b), used in sorted(plan.link_use.items(), key=str):
            has = topology.by_ends[a, b].count
            if used > has:
                raise PlanError(
                    f"the plan claims exclusive links, but {used} connections take link {a}->{b}, "
                    f"which has {has}"
                )


MOST_WALKED = 1 << 18
"""The most steps of a plan whose groups differ, so that all groups must be walked."""


def repeats(plan: Plan) -> bool:
    """Return whether every group of chunks is like the one before, so that a few groups prove all.

    That holds if each group raises each counter of each connection for the same chunks for which it
    waits for that counter, and no WAIT is in an earlier phase than a SIGNAL it waits for.
    """
    return _repeats(plan.with_chunks(plan.stride))  # the same for any number of chunks


@lru_cache(maxsize=64)
def _repeats(plan: Plan) -> bool:
    raised: dict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
    waited: dict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
    last: dict[tuple[int, bool], int] = {}
    first: dict[tuple[int, bool], int] = {}
    for track in plan.tracks:
        for phase, body in enumerate(track.phases):
            for step in body:
                if step.op not in (Op.SIGNAL, Op.WAIT):
                    continue
                i = step.connections[0]
                sender = plan.sends_on(track, i)
                if step.op is Op.SIGNAL:
                    raised[i, sender][step.chunk] += 1
                    last[i, sender] = max(last.get((i, sender), 0), phase)
                else:
                    waited[i, not sender][step.chunk] += 1
                    first[i, not sender] = min(first.get((i, not sender), phase), phase)
    return raised == waited and all(last[key] <= phase for key, phase in first.items())
