"""What several tests share: renumbered machines, random trees, plans and their mutants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from typer.testing import CliRunner

from linkweave.bench.command.cli import app
from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.direct import two_shot
from linkweave.collectives.planning.algorithms.embed import Embedding
from linkweave.collectives.planning.algorithms.over_trees import (
    broadcast_down,
    over_trees,
    reduce_up,
)
from linkweave.collectives.planning.algorithms.registry import algorithm_for
from linkweave.collectives.planning.algorithms.rings import ring
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.lower import Algorithm, Move, Reduce, Tuning, lower
from linkweave.collectives.planning.plan import Connection, Op, Plan, Step, Track
from linkweave.collectives.planning.verify import verify
from linkweave.topology import Link, Topology, Vertex, load
from tests.null.executor import is_right

GB = 10**9
Ends = tuple[Vertex, Vertex]
SPECIAL = ("ccube_dgx1", "hierarchical", "hierarchical_ring")
"""Algorithms for one machine, or for clusters only."""


def linkweave(*words: str) -> str:
    """What `linkweave WORDS` prints, which must succeed."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def both(
    a: Vertex, b: Vertex, bandwidth: int = GB, count: int = 1, kind: str = "nvlink"
) -> list[Link]:
    return [Link(*ends, bandwidth, count, kind=kind) for ends in ((a, b), (b, a))]


def renumbered(topology: Topology, to: Sequence[int], name: str = "renumbered") -> Topology:
    """The same machine with GPU g called `to[g]`."""

    def end(vertex: Vertex) -> Vertex:
        return to[vertex] if isinstance(vertex, int) else vertex

    links = tuple(replace(link, src=end(link.src), dst=end(link.dst)) for link in topology.links)
    return Topology(name, topology.gpus, links)


def parts_of_dgx1(sizes: Iterable[int] = range(3, 9)) -> list[Topology]:
    """Any GPUs of the DGX-1V, so many of them, that NVLinks connect."""
    dgx1 = load("dgx1-v100")
    some = (dgx1.subset(s) for k in sizes for s in combinations(range(8), k))
    return [topo for topo in some if all(link.kind == "nvlink" for link in topo.fabric)]


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to part the items, the one whole among them."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [items[0], *part], *rest[i + 1 :]]


def random_tree(size: int, rng: random.Random) -> Tree:
    """Each rank, in a random order, hangs under one that came before it."""
    order = rng.sample(range(size), size)
    parent = list(range(size))
    for at, rank in enumerate(order[1:], 1):
        parent[rank] = rng.choice(order[:at])
    return Tree(tuple(parent))


def random_detours(trees: Sequence[Tree], size: int, rng: random.Random, share: float) -> Embedding:
    """Positions stay where they are; about `share` of the edges go over a random third rank."""
    via = {}
    for t, tree in enumerate(trees):
        for child, parent in tree.edges:
            others = [r for r in range(size) if r not in (child, parent)]
            if others and rng.random() < share:
                via[t, child, parent] = rng.choice(others)
    return Embedding(tuple(range(size)), via)


def _over_random_trees(topology: Topology, rng: random.Random) -> Algorithm:
    size = len(topology.gpus)
    trees = [random_tree(size, rng) for _ in range(rng.randint(1, 3 if size < 6 else 1))]
    embedding = random_detours(trees, size, rng, share=rng.choice((0, 0, 0.3)))
    return over_trees("random trees", topology, trees, rng.random() < 0.5, embedding)


def _scattered(topology: Topology, rng: random.Random) -> Algorithm:
    """Trees whose every move has a random channel, so that one track serves several chunks."""

    def anywhere(move: Move) -> Move:
        return replace(move, channel=rng.randrange(3))

    size = len(topology.gpus)
    trees = tuple(random_tree(size, rng) for _ in range(rng.randint(1, 2)))
    up = tuple(tuple(map(anywhere, moves)) for moves in reduce_up(trees))
    down = tuple(tuple(map(anywhere, moves)) for moves in broadcast_down(trees))
    phases = (up + down,) if rng.random() < 0.5 else (up, down)
    return Algorithm("scattered", size, len(trees), phases, trees)


def _one_shot(topology: Topology, rng: random.Random) -> Algorithm:
    """Everyone reduces everyone's chunk: a rank's own is read by many of its tracks."""
    size = len(topology.gpus)
    ranks = range(size)
    channel = [rng.randrange(size) for _ in ranks]
    moves = [Reduce(tuple(s for s in ranks if s != r), r, 0, channel[r], r) for r in ranks]
    return Algorithm("one shot", size, 1, ((tuple(moves),),))


def _butterfly(topology: Topology, rng: random.Random) -> Algorithm:
    """Ranks exchange all they have with the one 1, then 2 away, on random channels."""
    ranks = range(len(topology.gpus))
    rounds = tuple(
        tuple(Reduce((r ^ far,), r, 0, rng.randrange(3), int(r & far > 0)) for r in ranks)
        for far in (1, 2)
    )
    return Algorithm("butterfly", len(ranks), 1, (rounds,))


def random_plan(seed: int) -> tuple[Plan, Topology]:
    """A right plan on a small mesh, and the mesh; small, so that all its mutants can be tried."""
    rng = random.Random(seed)
    largest, make = {
        5: (5, _scattered),
        6: (4, _butterfly),
        7: (4, _one_shot),
        8: (4, lambda topology, _: ring(topology)),
        9: (4, lambda topology, _: two_shot(topology)),
    }.get(seed % 10, (7, _over_random_trees))
    size = rng.choice([n for n in (2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7) if n <= largest])
    size = 4 if make is _butterfly else size
    topology = load(f"mesh-{size}")
    algorithm = make(topology, rng)
    groups = rng.randint(1, 4 if size < 6 else 2)
    missing = rng.randrange(algorithm.stride) if groups > 1 else 0  # the last group is cut short
    tuning = Tuning(groups * algorithm.stride - missing, slots=rng.randint(1, 3))
    return lower(algorithm, topology, tuning), topology


def lowered(name: str, topology: Topology, num_chunks: int, slots: int = 4) -> Plan:
    """An all-reduce lowered anew: not one that the planner has verified before."""
    return lower(algorithm_for(name, topology), topology, Tuning(num_chunks, slots))


def caught(plan: Plan, topology: Topology, expand: bool = True) -> bool:
    """Whether `verify` refuses the plan; any exception but PlanError is an error of its own."""
    try:
        verify(plan, topology, expand)
    except PlanError:
        return True
    return False


def check_wrong(plan: Plan, topology: Topology, words: str = ".") -> None:
    """The literal executor and `verify`, in these words, find something wrong with the plan."""
    assert not is_right(plan)
    with pytest.raises(PlanError, match=words):
        verify(plan, topology)


StepId = tuple[int, int, int]
"""(track, phase, position in the phase's body) of a step."""


def all_steps(plan: Plan) -> Iterator[tuple[StepId, Step]]:
    for s, track in enumerate(plan.tracks):
        for p, body in enumerate(track.phases):
            for at, step in enumerate(body):
                yield (s, p, at), step


def edited(plan: Plan, s: int, p: int, body: Sequence[Step]) -> Plan:
    """The plan with another body for phase p of track s."""
    track = plan.tracks[s]
    phases = (*track.phases[:p], tuple(body), *track.phases[p + 1 :])
    tracks = (*plan.tracks[:s], replace(track, phases=phases), *plan.tracks[s + 1 :])
    return replace(plan, tracks=tracks)


def without(plan: Plan, where: StepId) -> Plan:
    s, p, at = where
    body = plan.tracks[s].phases[p]
    return edited(plan, s, p, body[:at] + body[at + 1 :])


def swapped(plan: Plan, where: StepId, other: int) -> Plan:
    """The step there and the one at position `other` of the same body trade positions."""
    s, p, at = where
    body = list(plan.tracks[s].phases[p])
    body[at], body[other] = body[other], body[at]
    return edited(plan, s, p, body)


def guarded(plan: Plan, where: StepId) -> int | None:
    """Where the access stands that the WAIT at `where` guards; None if it is no WAIT.

    Of a connection that carries data: the next SEND, REDUCE or COPY of its body that uses the
    connection. Of one that only orders two tracks of a rank: the next REDUCE or COPY.
    """
    s, p, at = where
    body = plan.tracks[s].phases[p]
    if body[at].op is not Op.WAIT:
        return None
    (index,) = body[at].connections
    for later in range(at + 1, len(body)):
        step = body[later]
        if plan.connections[index].local:
            if step.op in (Op.REDUCE, Op.COPY):
                return later
        elif step.op in (Op.SEND, Op.REDUCE, Op.COPY) and index in (*step.connections, step.source):
            return later
    raise AssertionError(f"a WAIT that guards nothing: {plan.tracks[s]} step {at}")


def missed(plan: Plan, topology: Topology) -> list[tuple[StepId, Step]]:
    """Steps that `verify` lets a plan lack, and WAITs that it lets stand behind what they guard."""
    found = []
    for where, old in all_steps(plan):
        mutants = [without(plan, where)]
        if (access := guarded(plan, where)) is not None:
            mutants.append(swapped(plan, where, access))
        found += [(where, old) for mutant in mutants if not caught(mutant, topology)]
    return found


# ---- plans written by hand -----------------------------------------------------------------


def hop(src: int, src_channel: int, dst: int, dst_channel: int = 0) -> Connection:
    """A connection over the link between two ranks of a mesh; of order only within one rank."""
    path = (src, dst) if src != dst else ()
    return Connection(src, src_channel, dst, dst_channel, path)


def step(op: Op, *connections: int, chunk: int = 0, **rest: Any) -> Step:
    return Step(op, connections, chunk, **rest)


def send(index: int, chunk: int = 0, source: int | None = None) -> list[Step]:
    return [
        step(Op.WAIT, index, chunk=chunk),
        step(Op.SEND, index, chunk=chunk, source=source),
        step(Op.SIGNAL, index, chunk=chunk),
    ]


def receive(op: Op, index: int, chunk: int = 0, **rest: Any) -> list[Step]:
    return [
        step(Op.WAIT, index, chunk=chunk),
        step(op, index, chunk=chunk, **rest),
        step(Op.SIGNAL, index, chunk=chunk),
    ]


def by_hand(
    connections: Sequence[Connection],
    tracks: Mapping[tuple[int, int], Sequence[Sequence[Step]]],
    num_chunks: int = 1,
    stride: int = 1,
    slots: int = 2,
) -> Plan:
    """A plan of the tracks {(rank, channel): [steps of phase 0, steps of phase 1, ...]}."""
    made = tuple(Track(*key, tuple(map(tuple, bodies))) for key, bodies in tracks.items())
    size = 1 + max(rank for rank, _ in tracks)
    return Plan(
        "by hand", "allreduce", size, num_chunks, stride, slots, tuple(connections), made,
        exclusive=False,
    )  # fmt: skip
