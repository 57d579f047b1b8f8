"""Collectives besides all-reduce: proved on every machine, with exactly the result they define."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.collective import (
    COLLECTIVES,
    PUBLIC,
    SENDRECV,
    Pairs,
    Root,
    targets,
)
from linkweave.collectives.planning.lower import Tuning, lower
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.planner import candidates, plan_collective
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import verify
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.reference import Array
from linkweave.topology import Topology, bound, load
from tests.null.helpers import all_steps, caught, missed

ROOTED = ("broadcast", "reduce")
PART = "0,3,5,6 of dgx1-v100"
MACHINES = [
    *(f"mesh-{n}" for n in (1, 2, 3, 4, 5, 8)), *(f"ring-{n}" for n in (2, 3, 4, 7, 8)),
    *(f"cpu-{n}" for n in (1, 3, 4, 9)),
    "dgx1-v100", "dgx1-p100", "dgx-a100", "pcie-8", PART, "2 x mesh-3",
]  # fmt: skip
OTHERS = {name: known for name, known in ALGORITHMS.items() if name != "allreduce"}
every_collective = pytest.mark.parametrize("collective", OTHERS)


def machine(name: str) -> Topology:
    return load("dgx1-v100").subset((0, 3, 5, 6)) if name == PART else load(name)


def pairs_of(size: int) -> list[Pairs]:
    """None, one, and as many as there can be: neighbours, and ranks far apart."""
    near = tuple((r + 1, r) for r in range(0, size - 1, 2))
    far = tuple((r, size // 2 + r) for r in range(size // 2))
    return list(dict.fromkeys([(), far[-1:], near, far]))


def roots(collective: str, size: int) -> Sequence[Root]:
    if collective == SENDRECV:
        return pairs_of(size)
    rooted = COLLECTIVES[collective].root == "rank"
    return sorted({0, size // 2, size - 1}) if rooted else [0]


def made(
    topology: Topology, collective: str, name: str, groups: int, root: Root = 0, slots: int = 2
) -> Plan:
    """Lowered anew: not one that `plan_collective` has verified before."""
    algorithm = OTHERS[collective][name].make(topology, collective, root)
    return lower(algorithm, topology, Tuning(groups * algorithm.stride, slots))


def every_plan(topology: Topology, collective: str, groups: int, slots: int = 2) -> Iterator[Plan]:
    for root in roots(collective, len(topology.gpus)):
        for name in candidates(topology, collective, root):
            yield made(topology, collective, name, groups, root, slots)


def filled(plan: Plan, count: int, dtype: type = np.int64) -> list[Array]:
    """Buffers of `count` elements (a block, where there are blocks), all of them different.

    What a plan must not read is filled too: the blocks of others, and the room for results.
    """
    rng = np.random.default_rng([plan.size, count])
    length = count * min(plan.definition.layout.blocks(plan.size), plan.size)
    length *= 2 if plan.collective == "alltoall" else 1
    low, high = np.iinfo(dtype).min // 16, np.iinfo(dtype).max // 16
    buffers = [rng.integers(low, high, length).astype(dtype) for _ in range(plan.size)]
    if plan.collective == "alltoall":  # the block to itself lies there from the start
        for r, x in enumerate(buffers):
            sent, got = x.reshape(2, plan.size, count)
            got[r] = sent[r]
    return buffers


def promised(plan: Plan, inputs: Sequence[Array]) -> list[tuple[slice, Array]]:
    """For each rank which part of its buffer the collective defines, and what it holds."""
    size, length = plan.size, len(inputs[0])
    total, whole = sum(inputs[1:], inputs[0]), slice(None)
    if plan.collective == SENDRECV:
        return [(whole, inputs[targets(plan.root).get(r, r)]) for r in range(size)]
    if plan.collective == "broadcast":
        return [(whole, inputs[plan.root])] * size
    if plan.collective == "reduce":  # what the others are left with is nobody's business
        return [(whole, total) if r == plan.root else (slice(0), total[:0]) for r in range(size)]
    if plan.collective == "alltoall":  # all of it: what was sent is still there
        parts = [x.reshape(2, size, -1) for x in inputs]
        received = [np.concatenate([sent[r] for sent, _ in parts]) for r in range(size)]
        return [(whole, np.append(parts[r][0], received[r])) for r in range(size)]
    block = [slice(b * length // size, (b + 1) * length // size) for b in range(size)]
    if plan.collective == "reduce_scatter":
        return [(mine, total[mine]) for mine in block]
    if plan.collective == "scatter":
        return [(mine, inputs[plan.root][mine]) for mine in block]
    gathered = np.concatenate([x[mine] for x, mine in zip(inputs, block, strict=True)])
    if plan.collective == "gather":
        return [(whole if r == plan.root else mine, gathered if r == plan.root else x[mine])
                for r, (x, mine) in enumerate(zip(inputs, block, strict=True))]  # fmt: skip
    return [(whole, gathered)] * size


def is_right(
    plan: Plan, count: int, seeds: Sequence[int | None] = (None, 1, 2), dtype: type = np.int64
) -> bool:
    """The defined result on all ranks, in several legal orders of carrying the plan out."""
    inputs = filled(plan, count, dtype)
    wanted = promised(plan, inputs)
    for seed in seeds:
        for out, (part, want) in zip(reference.run(plan, inputs, seed=seed), wanted, strict=True):
            if not np.array_equal(out[part], want):
                return False
    return True


# ---- right on every machine ------------------------------------------------------------------


@every_collective
@pytest.mark.parametrize("name", MACHINES)
def test_every_algorithm_is_proved_in_full(name: str, collective: str) -> None:
    topo = machine(name)
    for groups, slots in ((1, 2), (2, 1), (7, 4)):
        for plan in every_plan(topo, collective, groups, slots):
            assert (plan.collective, plan.size) == (collective, len(topo.gpus))
            verify(plan, topo, expand=True)


@every_collective
@pytest.mark.parametrize("name", MACHINES)
def test_the_result_is_the_defined_one_in_any_order(name: str, collective: str) -> None:
    """Nothing; one element a block; blocks that begin at no multiple of 16 bytes; a prime."""
    topo = machine(name)
    for plan in every_plan(topo, collective, 2):
        assert is_right(plan, 0, (None,)) and is_right(plan, 1, (None, 1))
        assert is_right(plan, 7, (2,), np.int32) and is_right(plan, 211, (None, 3, 4), np.int32)


@every_collective
def test_on_any_five_gpus_of_the_dgx1(collective: str) -> None:
    """Most have no ring of NVLinks: then its hops detour, and so do trees."""
    dgx1 = load("dgx1-v100")
    with_detours = set()
    root = roots(collective, 5)[-1]
    parts: list[Topology] = []  # one of each kind of wiring
    for topo in (dgx1.subset(gpus) for gpus in combinations(range(8), 5)):
        if any(topo.isomorphic_to(part) for part in parts):
            continue
        parts.append(topo)
        for name in candidates(topo, collective, root):
            plan = made(topo, collective, name, 2, root)
            verify(plan, topo, expand=True)
            if plan.detours:
                with_detours.add(name)
                assert is_right(plan, 13, (None, 1))
    assert with_detours == set(OTHERS[collective]) & {"tree", "ring", "direct", "pairwise"}


@every_collective
@pytest.mark.parametrize("name", ["mesh-5", "ring-7", "cpu-3", "pcie-8", "dgx1-v100", PART])
def test_plans_as_they_are_chosen(name: str, collective: str) -> None:
    topo = machine(name)
    size = len(topo.gpus)
    for count in (0, 1, 1009):
        for root in roots(collective, size):
            nbytes = 8 * count * (1 if collective in ROOTED else size)
            plan = plan_collective(collective, topo, nbytes, root)
            assert (plan.collective, plan.root) == (collective, root)
            assert plan.num_chunks % plan.stride == 0
            assert is_right(plan, count, (None, 1))


def test_every_two_ranks_joined_is_one_step() -> None:
    """Stars: one start-up, and on its own links each block at full speed."""
    topo = load("mesh-6")
    for collective, name in (
        ("broadcast", "shortest_tree"), ("reduce", "shortest_tree"),
        ("allgather", "shortest_trees"), ("reduce_scatter", "shortest_trees"),
        ("alltoall", "direct"),
    ):  # fmt: skip
        plan = made(topo, collective, name, 1)
        nbytes = 6 << 20
        block = nbytes if collective in ROOTED else nbytes // 6
        seconds = simulate(plan, topo, nbytes).seconds
        assert plan.exclusive and plan.detours == ()
        assert seconds == pytest.approx(5e-6 + block / 25e9, rel=1e-9)


BANDWIDTH = ["dgx1-v100", "dgx1-p100", "dgx-a100", "mesh-5", "ring-8"]


@pytest.mark.parametrize("name", BANDWIDTH)
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "broadcast"])
def test_large_messages_come_near_the_bound(name: str, collective: str) -> None:
    topo = load(name)
    nbytes = (1 << 30) // len(topo.gpus) * len(topo.gpus)
    least = float(bound(topo, collective).seconds_per_byte) * nbytes
    share = least / simulate(plan_collective(collective, topo, nbytes), topo, nbytes).seconds
    assert (0.8 if collective == "broadcast" else 0.95) <= share <= 1


# ---- mutants, and other goals ----------------------------------------------------------------

SMALL = ["mesh-2", "mesh-3", "ring-4", "mesh-4", "cpu-3", PART, "2 x mesh-2"]


def small_plans(name: str, collective: str) -> Iterator[tuple[Plan, Topology]]:
    topo = machine(name)
    root = roots(collective, len(topo.gpus))[-1]
    for algorithm in candidates(topo, collective, root):
        for groups, slots in ((1, 2), (3, 1)):
            yield made(topo, collective, algorithm, groups, root, slots), topo


@every_collective
@pytest.mark.parametrize("name", SMALL)
def test_every_dropped_step_and_every_late_wait_is_caught(name: str, collective: str) -> None:
    for plan, topo in small_plans(name, collective):
        assert not missed(plan, topo), plan.algorithm


@pytest.mark.parametrize("name", ["ring-5", "ring-6", "ring-7"])
def test_every_dropped_step_of_detours_is_caught(name: str) -> None:
    plan = made(load(name), "alltoall", "direct", 1)
    assert any(s.source is not None for _, s in all_steps(plan))
    assert not missed(plan, load(name))


@every_collective
@pytest.mark.parametrize("name", [*SMALL, "mesh-5", "ring-7"])
def test_a_plan_serves_no_other_collective_and_no_other_root(name: str, collective: str) -> None:
    for plan, topo in small_plans(name, collective):
        for expand in (True, False):
            for other in COLLECTIVES:
                # of two ranks, a pair is a broadcast
                same = plan.size == 2 and {other, collective} == {"broadcast", SENDRECV}
                root = roots(other, plan.size)[-1]
                # what gives all to all gives each its part
                more = (collective, other) == ("allgather", "gather") or (
                    (collective, other, plan.root) == ("broadcast", "scatter", root)
                )
                refused = other != collective and not same and not more
                try:
                    relabelled = replace(plan, collective=other, root=root)
                except PlanError:  # chunks of other blocks
                    assert refused or more
                    continue
                assert caught(relabelled, topo, expand) == refused
            if collective == SENDRECV:
                for pairs in pairs_of(plan.size):
                    refused = pairs != plan.root
                    assert caught(replace(plan, root=pairs), topo, expand) == refused
                continue
            for root in range(plan.size):  # which means nothing to those that have none
                refused = COLLECTIVES[collective].root == "rank" and root != plan.root
                assert caught(replace(plan, root=root), topo, expand) == refused


def test_what_is_missing_is_named() -> None:
    topo = load("mesh-3")
    broadcast = made(topo, "broadcast", "shortest_tree", 1, root=1)
    words = r"rank 0 ends with chunk 0 combined over ranks \[\] and other data of ranks \[1\], not "
    with pytest.raises(PlanError, match=words):
        verify(replace(broadcast, root=2), topo)
    with pytest.raises(PlanError, match=r"combined over ranks \[1\], not over ranks \[0, 1, 2\]"):
        verify(replace(broadcast, collective="allreduce"), topo)


def test_one_rank_has_it_all() -> None:
    for name in ("mesh-1", "ring-1", "cpu-1"):
        for collective in OTHERS:
            plan = plan_collective(collective, load(name), 1 << 20, roots(collective, 1)[0])
            assert plan.connections == () and not list(all_steps(plan))


# ---- forms and refusals ----------------------------------------------------------------------


@every_collective
@pytest.mark.parametrize("name", ["mesh-1", "mesh-5", "ring-7", "dgx1-v100", "cpu-3"])
def test_json_gives_back_an_equal_plan(name: str, collective: str) -> None:
    topo = load(name)
    for plan in every_plan(topo, collective, 2):
        again = Plan.from_json(plan.to_json())
        assert again == plan and hash(again) == hash(plan)
        assert again.to_json() == plan.to_json() and str(again) == str(plan)
        assert str(plan).startswith(f"{collective} by {plan.algorithm}: {plan.size} ranks, ")
        verify(again, topo)


def test_detours_over_several_ranks_are_told() -> None:
    """Half way round a ring of 7 two ranks forward; each pair has one line for both ways."""
    topo = load("ring-7")
    plan = made(topo, "alltoall", "direct", 1)
    assert sorted({len(path) for path in plan.detours}) == [3, 4]
    for path in plan.detours:
        assert path[0] < path[-1] and all(ends in topo.by_ends for ends in pairwise(path))
        between = ", ".join(map(str, path[1:-1]))
        assert f"detour {path[0]} - {path[-1]} over {between}\n" in str(plan)
    assert Plan.from_json(plan.to_json()).detours == plan.detours
    passed_on = [s for _, s in all_steps(plan) if s.op is Op.SEND and s.source is not None]
    # of each rank's blocks 2 go to neighbours, 2 over one rank, 2 over two
    assert len(passed_on) == 7 * (2 * 1 + 2 * 2)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "alltoall"])
def test_groups_hold_chunks_of_all_blocks(collective: str) -> None:
    """A group that is cut short would leave out blocks, not the end of the message."""
    topo = load("mesh-4")
    unit = COLLECTIVES[collective].layout.blocks(4)
    for plan in every_plan(topo, collective, 2):
        words = rf"{collective} needs whole groups of a multiple of {unit} chunks, not "
        for change in (
            {"num_chunks": plan.num_chunks + 1}, {"num_chunks": plan.stride - 1},
            {"num_chunks": 1}, {"stride": plan.stride + 1}, {"stride": unit // 2},
            {"num_chunks": 1000 * plan.stride + 1},
        ):  # fmt: skip
            with pytest.raises(PlanError, match=words):
                verify(replace(plan, **change), topo)
        with pytest.raises(PlanError, match=f"{words}{unit + 1} in groups of"):
            plan_collective(collective, topo, 1024, 0, plan.algorithm, unit + 1)


@pytest.mark.parametrize("collective", ROOTED)
def test_the_last_group_over_trees_may_be_cut_short(collective: str) -> None:
    topo = load("dgx1-v100")
    plan = made(topo, collective, "ring", 3)
    assert plan.stride == 6
    for num_chunks in (1, 5, 7, 17):
        short = plan.with_chunks(num_chunks)
        verify(short, topo, expand=True)
        assert is_right(short, 211)


def test_unknown_collectives_are_told_the_choices() -> None:
    topo = load("mesh-4")
    words = f"unknown collective 'scan'; choose from {', '.join(PUBLIC)}"
    with pytest.raises(PlanError, match=words):
        plan_collective("scan", topo, 1024)
    plan = plan_collective("allgather", topo, 1024)
    with pytest.raises(PlanError, match=words):
        verify(replace(plan, collective="scan"), topo)
    for value in (None, 5, [], "scan"):  # a plan may come from a file
        text = json.dumps({**json.loads(plan.to_json()), "collective": value})
        with pytest.raises(PlanError, match=r"unknown collective|must be a string"):
            verify(Plan.from_json(text), topo)


@every_collective
def test_an_unknown_algorithm_is_told_the_choices(collective: str) -> None:
    topo = load("mesh-4")
    others = {name for names in OTHERS.values() for name in names} | {"two_shot", "rnig"}
    for name in others - set(OTHERS[collective]):
        with pytest.raises(PlanError) as told:
            plan_collective(collective, topo, 1024, roots(collective, 4)[0], name)
        assert str(told.value) == (
            f"unknown algorithm {name!r} of {collective}; choose from auto, "
            + ", ".join(OTHERS[collective])
        )


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "alltoall"])
def test_bytes_that_make_no_equal_blocks_are_refused(collective: str) -> None:
    with pytest.raises(PlanError, match="needs 4 equal blocks; 1026 bytes cannot"):
        plan_collective(collective, load("mesh-4"), 1026)
    for whole in ("allreduce", "broadcast", "reduce"):
        assert plan_collective(whole, load("mesh-4"), 1026).collective == whole


@every_collective
@pytest.mark.parametrize("nbytes", [-4, True, 4.0, "4K", None])
def test_sizes_that_make_no_sense_are_refused(collective: str, nbytes: object) -> None:
    with pytest.raises(PlanError, match=r"nbytes must be an integer from 0 to .*, not "):
        plan_collective(collective, load("mesh-4"), nbytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", [-1, 4, True, 1.0, "1", None])
def test_roots_that_are_no_ranks_are_refused(root: object) -> None:
    topo = load("mesh-4")
    words = rf"root must be an integer from 0 to 3, not {root!r}"
    for collective in PUBLIC:
        with pytest.raises(PlanError, match=words):
            plan_collective(collective, topo, 1024, root)  # type: ignore[arg-type]
    for collective in set(OTHERS) & set(PUBLIC):
        with pytest.raises(PlanError, match=words):
            verify(replace(plan_collective(collective, topo, 1024), root=root), topo)
        with pytest.raises(PlanError, match=words):
            candidates(topo, collective, root)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        *((pairs, f"the root of a sendrecv must be pairs (source, target), not {pairs!r}")
          for pairs in (0, None, [(0, 1)], ((0,),), ("01",))),
        *((pairs, f"each rank may be in at most one pair of a sendrecv, not {pairs!r}")
          for pairs in (((0, 0),), ((0, 1), (1, 2)), ((0, 1), (2, 1)))),
        *((((0, rank),), f"a rank of a sendrecv must be an integer from 0 to 3, not {rank!r}")
          for rank in (4, -1, True, 1.0, "1")),
    ],
)  # fmt: skip
def test_pairs_that_are_none_are_refused(pairs: object, words: str) -> None:
    topo = load("mesh-4")
    plan = plan_collective(SENDRECV, topo, 1024, ((0, 1),))
    for call in (
        lambda: plan_collective(SENDRECV, topo, 1024, pairs),  # type: ignore[arg-type]
        lambda: verify(replace(plan, root=pairs), topo),
    ):
        with pytest.raises(PlanError) as told:
            call()
        assert str(told.value) == words


@pytest.mark.parametrize("num_chunks", [0, -3, True, 16.0, "16"])
def test_chunk_counts_that_make_no_sense_are_refused(num_chunks: object) -> None:
    for collective in OTHERS:
        with pytest.raises(PlanError, match=r"num_chunks must be an integer from 1 to .*, not "):
            plan_collective(
                collective, load("mesh-4"), 1024, roots(collective, 4)[0],
                num_chunks=num_chunks,  # type: ignore[arg-type]
            )  # fmt: skip


def test_what_grows_as_the_square_is_refused_on_large_machines() -> None:
    topo = load("mesh-65")
    for collective, name in (
        ("allgather", "shortest_trees"),
        ("reduce_scatter", "ring"),
        ("broadcast", "ring"),
    ):
        words = rf"a plan of {name} grows as P\^2: at most 64 ranks, not 65"
        with pytest.raises(PlanError, match=words):
            plan_collective(collective, topo, 65 << 10, 0, name)
    with pytest.raises(PlanError, match=r"a plan of direct grows as P\^2: at most 256 ranks"):
        plan_collective("alltoall", load("mesh-257"), 257 << 10)
    for collective in ROOTED:
        names = candidates(topo, collective, 64)
        assert {"tree", "shortest_tree"} <= set(names) and "ring" not in names
        verify(plan_collective(collective, topo, 1 << 20, 64), topo)


# ---- where chunks lie ------------------------------------------------------------------------


def spans(plan: Plan, nbytes: int, rank: int, start: int, stop: int) -> list[tuple[int, int]]:
    """The chunks of a rank between two bytes of its buffer, in order, empty ones left out."""
    bounds = plan.chunk_bounds(nbytes, rank)
    return sorted((a, b) for a, b in bounds if a < b and start <= a < stop)


def check_tiled(found: Sequence[tuple[int, int]], start: int, stop: int) -> None:
    """They cover a block exactly, cut at multiples of 16 bytes from where it begins."""
    edges = [start, *(b for _, b in found)]
    assert [a for a, _ in found] == edges[:-1] and edges[-1] == stop
    assert all((a - start) % 16 == 0 for a, _ in found)


sizes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5000))


@settings(deadline=None, max_examples=300)
@given(collective=st.sampled_from(list(COLLECTIVES)), numbers=sizes)
def test_chunks_tile_every_block(collective: str, numbers: tuple[int, int, int, int]) -> None:
    size, rings, groups, block = numbers
    unit = COLLECTIVES[collective].layout.blocks(size)
    parts, stride = groups * rings, rings * unit
    root = () if collective == SENDRECV else 0
    plan = Plan("a", collective, size, groups * stride, stride, 1, (), (), root=root)
    nbytes = block if unit == 1 else block * size
    cut = plan.chunk_sizes(nbytes).tolist()
    assert sum(cut) == plan.volume(nbytes)
    full = plan.chunk_bytes(nbytes)
    assert full % 16 == 0 and max(cut) <= full
    assert (full - 16) * parts < block or block == 0, "chunks are larger than they need be"
    for rank in range(size):
        bounds = plan.chunk_bounds(nbytes, rank)
        assert len(bounds) == plan.num_chunks
        for chunk, ((a, b), length) in enumerate(zip(bounds, cut, strict=True)):
            source, target = divmod(chunk % stride % (size * size), size)
            here = collective != "alltoall" or rank in (source, target)
            assert b - a == (length if here else 0)
        if collective != "alltoall":
            assert bounds == plan.chunk_bounds(nbytes)  # the same place on every rank
            for b in range(1 if unit == 1 else size):
                mine = bounds[b::unit]
                check_tiled(sorted(x for x in mine if x[0] < x[1]), b * block, (b + 1) * block)
            continue
        for peer in range(size):
            sent = spans(plan, nbytes, rank, peer * block, (peer + 1) * block)
            if peer == rank:
                assert sent == []  # it never moves
            else:
                check_tiled(sent, peer * block, (peer + 1) * block)
            start = nbytes + peer * block
            check_tiled(spans(plan, nbytes, rank, start, start + block), start, start + block)
