"""No mutant that the literal executor finds wrong is accepted by `verify`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.planner import candidates, plan_collective
from linkweave.collectives.planning.verify import verify
from linkweave.topology import Topology, load
from tests.null.executor import Executor, is_right, why_wrong
from tests.null.helpers import all_steps, caught, edited, random_plan, swapped, without

Base = tuple[Plan, Topology]
MOVES = (Op.SEND, Op.REDUCE, Op.COPY)


@cache
def bases() -> list[Base]:
    """Right plans of all collectives, small, some with detours, some of a group cut short."""
    found = [random_plan(seed) for seed in range(40)]
    for machine in ("mesh-2", "mesh-3", "ring-4"):
        topology = load(machine)
        for collective in ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter",
                           "alltoall"):  # fmt: skip
            for name in candidates(topology, collective):
                plan = plan_collective(collective, topology, 0, 0, name)
                groups = 1 if plan.stride > 9 else 2
                found.append((plan.with_chunks(groups * plan.stride), topology))
        pairs = ((1, 0),) if plan.size < 4 else ((3, 1), (0, 2))
        found.append((plan_collective("sendrecv", topology, 0, pairs).with_chunks(2), topology))
    return found


# ---- mutations: each takes a plan, and a step's id and text -------------------------------


def of(plan: Plan, rng: random.Random, *ops: Op) -> tuple[tuple[int, int, int], Step, list[Step]]:
    """A random step of these ops, and its body; of all where there is none."""
    every = list(all_steps(plan))
    (s, p, at), old = rng.choice([x for x in every if x[1].op in ops] or every)
    return (s, p, at), old, list(plan.tracks[s].phases[p])


def changed(
    plan: Plan, rng: random.Random, change: Callable[[Step], dict[str, object]], *ops: Op
) -> Plan:
    """One step of these ops with other values."""
    (s, p, at), old, body = of(plan, rng, *ops)
    body[at] = replace(old, **change(old))
    return edited(plan, s, p, body)


def _op(plan: Plan, rng: random.Random) -> Plan:
    def other(_: Step) -> dict[str, object]:
        return {"op": rng.choice(list(Op)), "ahead": 0, "last": rng.random() < 0.3}

    return changed(plan, rng, other, *MOVES)


def _reduce_for_copy(plan: Plan, rng: random.Random) -> Plan:
    for (s, p, at), old in all_steps(plan):
        if old.op is Op.COPY and rng.random() < 0.8:
            body = list(plan.tracks[s].phases[p])
            body[at] = replace(old, op=Op.REDUCE)
            plan = edited(plan, s, p, body)
    return plan


def _ahead(plan: Plan, rng: random.Random) -> Plan:
    return changed(
        plan, rng, lambda old: {"ahead": rng.randint(0, len(old.connections))}, Op.REDUCE
    )


def _order(plan: Plan, rng: random.Random) -> Plan:
    def mixed(old: Step) -> dict[str, object]:
        return {"connections": tuple(rng.sample(old.connections, len(old.connections)))}

    return changed(plan, rng, mixed, Op.REDUCE, Op.SEND)


def _last(plan: Plan, rng: random.Random) -> Plan:
    return changed(plan, rng, lambda old: {"last": not old.last}, Op.REDUCE)


def _connections(plan: Plan, rng: random.Random) -> Plan:
    other, more = rng.randrange(len(plan.connections)), rng.random() < 0.5
    return changed(
        plan, rng, lambda old: {"connections": (*(old.connections if more else ()), other)}, *Op
    )


def _chunk(plan: Plan, rng: random.Random) -> Plan:
    return changed(plan, rng, lambda _: {"chunk": rng.randrange(plan.stride)}, *Op)


def _source(plan: Plan, rng: random.Random) -> Plan:
    source = rng.choice([None, *range(len(plan.connections))])
    return changed(plan, rng, lambda _: {"source": source}, Op.SEND)


def _dropped(plan: Plan, rng: random.Random) -> Plan:
    where, *_ = of(plan, rng, *rng.choice([(Op.WAIT, Op.SIGNAL), MOVES]))
    return without(plan, where)


def _doubled(plan: Plan, rng: random.Random) -> Plan:
    (s, p, at), _, body = of(plan, rng, *Op)
    return edited(plan, s, p, body[: at + 1] + body[at:])


def _moved(plan: Plan, rng: random.Random) -> Plan:
    """Anywhere in its body."""
    (s, p, at), old, body = of(plan, rng, *rng.choice([(Op.WAIT, Op.SIGNAL), MOVES]))
    rest = body[:at] + body[at + 1 :]
    to = rng.randint(0, len(rest))
    return edited(plan, s, p, [*rest[:to], old, *rest[to:]])


def _nudged(plan: Plan, rng: random.Random) -> Plan:
    """Two neighbours swapped."""
    where, _, body = of(plan, rng, *Op)
    return swapped(plan, where, min(where[2] + 1, len(body) - 1))


def _pair_dropped(plan: Plan, rng: random.Random) -> Plan:
    """All waits for and signals of one counter and chunk."""
    _, old, _ = of(plan, rng, Op.WAIT, Op.SIGNAL)
    kinds = rng.choice([(Op.WAIT, Op.SIGNAL), (Op.WAIT,), (Op.SIGNAL,)])
    for s, track in enumerate(plan.tracks):
        for p, phase in enumerate(track.phases):
            body = [
                x for x in phase
                if x.op not in kinds or x.connections != old.connections or x.chunk != old.chunk
            ]  # fmt: skip
            if len(body) < len(phase):
                plan = edited(plan, s, p, body)
    return plan


def _phase(plan: Plan, rng: random.Random) -> Plan:
    """The end of a body in a phase of its own."""
    (s, p, at), _, body = of(plan, rng, *Op)
    track = plan.tracks[s]
    phases = (*track.phases[:p], tuple(body[:at]), tuple(body[at:]), *track.phases[p + 1 :])
    return replace(
        plan, tracks=(*plan.tracks[:s], replace(track, phases=phases), *plan.tracks[s + 1 :])
    )


def _slots(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, slots=rng.randint(1, 4))


def _root(plan: Plan, rng: random.Random) -> Plan:
    if plan.collective == "sendrecv":
        return replace(plan, root=tuple(pair[:: rng.choice((1, -1))] for pair in plan.root))
    return replace(plan, root=rng.randrange(plan.size))


def _collective(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, collective=rng.choice(["allreduce", "broadcast", "reduce", "allgather"]))


def _path(plan: Plan, rng: random.Random) -> Plan:
    """A connection over other vertices, or between other tracks."""
    i = rng.randrange(len(plan.connections))
    old, other = plan.connections[i], rng.choice(plan.connections)
    new = rng.choice([replace(old, path=other.path), replace(old, path=old.path[::-1]), other])
    return replace(plan, connections=(*plan.connections[:i], new, *plan.connections[i + 1 :]))


MUTATIONS: list[Callable[[Plan, random.Random], Plan]] = [
    _op, _reduce_for_copy, _ahead, _order, _last, _connections, _chunk, _source, _dropped,
    _doubled, _moved, _nudged, _pair_dropped, _phase, _slots, _root, _collective, _path,
]  # fmt: skip


def mutants(count: int, seed: int) -> Iterator[tuple[str, Plan, Topology]]:
    """Of one mutation, or of two."""
    rng = random.Random(seed)
    for _ in range(count):
        plan, topology = rng.choice(bases())
        made, names = plan, []
        try:
            for mutate in rng.choices(MUTATIONS, k=rng.choice((1, 2))):
                made = mutate(made, rng)
                names.append(mutate.__name__)
        except (PlanError, IndexError):  # no plan at all; no step is left
            continue
        if made != plan:
            yield " ".join(names), made, topology


def wires_are_there(plan: Plan, topology: Topology) -> bool:
    """Every connection leads from its source to its target over links, and not through GPUs."""
    for c in plan.connections:
        if c.src == c.dst:
            continue
        inner = c.path[1:-1]
        if (*c.path[:1], *c.path[-1:]) != (topology.gpus[c.src], topology.gpus[c.dst]):
            return False
        if any(isinstance(v, int) for v in inner) or not {*c.links} <= {*topology.by_ends}:
            return False
    return True


def test_right_plans_are_right() -> None:
    for plan, topology in bases():
        verify(plan, topology)
        assert is_right(plan), plan.algorithm


def test_no_wrong_mutant_is_accepted() -> None:
    verdicts = Counter()
    for names, plan, topology in mutants(4000, seed=1):
        accepted = not caught(plan, topology)
        if accepted:
            assert wires_are_there(plan, topology), names
            assert not why_wrong(Executor(plan)), names
        verdicts[accepted] += 1
    assert verdicts[True] > 300 and verdicts[False] > 2000


BREAKING = [m for m in MUTATIONS if m is not _slots]  # these plans need one slot only


@pytest.mark.parametrize("mutate", BREAKING, ids=lambda m: m.__name__)
def test_the_executor_sees_what_each_mutation_breaks(mutate: Callable) -> None:
    """Else the test above would say nothing."""
    rng = random.Random(mutate.__name__)
    for _ in range(300):
        plan, topology = rng.choice(bases())
        try:
            made = mutate(plan, rng)
        except PlanError:
            return
        if not is_right(made) or not wires_are_there(made, topology):
            return
    raise AssertionError(f"{mutate.__name__} breaks nothing")
