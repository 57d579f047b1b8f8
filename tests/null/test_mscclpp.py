"""Execution plans of MSCCL++: read, written and proved; judged by an engine of their semantics."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from mscclpp_engine import Engine, Wrong
from mscclpp_files import FILES, at, meets, move, over, peer, two

from linkweave import collectives, topology
from linkweave.collectives import PlanError
from linkweave.collectives.foreign import mscclpp
from linkweave.collectives.foreign.mscclpp_export import exported
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.collectives.planning.planner import plan_collective


def run(data: Any, seeds: int, elements: int = 8) -> None:
    """By the engine; units of pipelines are half a chunk, so that they take two iterations."""
    for seed in range(seeds):
        Engine(data, elements, lambda _: elements // 2, seed).run()


def proved(data: Any) -> str:
    return verify(mscclpp.read(json.dumps(data)))


# ---- plans in their form -------------------------------------------------------------------------
@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_op(name: str) -> None:
    plan = mscclpp.read(json.dumps(FILES[name]))
    assert any(op.name == name for *_, op in plan.ops()) or name == "shares"
    assert mscclpp.read(plan.to_json()) == plan
    run(FILES[name], 4)
    assert verify(plan) == ""


def test_sums_in_different_orders_are_told() -> None:
    def ops(a: int, b: int, c: int) -> list[dict[str, Any]]:
        return [move("ppkt", [at("i", 0)] * 2, [peer(0, a), peer(1, a)]),
                move("repkt", [at("i", 0), at("s", b), at("s", c)], at("o", 0))]  # fmt: skip

    from mscclpp_files import block, gpu, plan

    gpus = [
        gpu(a, (1, 1, 3), [block(0, ops(a, *others), [0, 1], [0, 1])], others, "s")
        for a in range(3) if (others := [r for r in range(3) if r != a])
    ]  # fmt: skip
    assert "different orders" in proved(plan("allreduce", gpus, False, True, True))


# ---- ours ----------------------------------------------------------------------------------------
ALGORITHMS = (
    "one_shot", "two_shot", "chain", "tree", "double_tree", "overlapped_double_tree", "ccube_dgx1",
    "packed_trees", "halving_doubling",
)  # fmt: skip


@cache
def ours(machine: str, algorithm: str, nbytes: int, collective: str = "allreduce") -> str:
    topo = topology.load(machine)
    if collective == "allreduce":
        plan = collectives.plan_allreduce(topo, nbytes, algorithm)
    else:
        plan = plan_collective(collective, topo, nbytes)
    return exported(plan, nbytes, topo).to_json()


@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 26])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduces_of_ours(algorithm: str, nbytes: int) -> None:
    """Those of one group as they are, others as pipelines."""
    text = ours("dgx1-v100", algorithm, nbytes)
    plan = mscclpp.read(text)
    assert mscclpp.read(plan.to_json()) == plan
    looped = any(op.body for *_, op in plan.ops())
    assert looped == (nbytes > 1 << 20 and algorithm != "one_shot")
    run(json.loads(text), 1, 4)


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx-a100", "pcie-8", "dgx1-p100"])
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "alltoall"])
def test_other_collectives_of_ours(collective: str, machine: str) -> None:
    for nbytes in (1 << 13, 1 << 24):
        run(json.loads(ours(machine, "", nbytes, collective)), 1, 4)


def test_ours_for_some_gpus_of_a_machine() -> None:
    for count in (2, 3, 5, 7):
        topo = topology.load("dgx1-v100").subset(range(count))
        for algorithm in ("double_tree", "packed_trees"):
            plan = collectives.plan_allreduce(topo, 1 << 22, algorithm)
            run(json.loads(exported(plan, 1 << 22, topo).to_json()), 1, 4)


def test_what_does_not_fit_is_told() -> None:
    topo = topology.load("dgx1-v100")
    with pytest.raises(PlanError, match=r"at most 64 ops .* has 87"):
        exported(collectives.plan_allreduce(topo, 1 << 20, "ring"), 1 << 20)
    with pytest.raises(PlanError, match="not of a broadcast"):
        exported(plan_collective("broadcast", topo, 1 << 20), 1 << 20)
    with pytest.raises(PlanError, match=r"is for 8 ranks; .* has 4 GPUs"):
        plan = collectives.plan_allreduce(topo, 1 << 20, "tree")
        exported(plan, 1 << 20, topology.load("dgx1-v100").subset(range(4)))


# ---- faults --------------------------------------------------------------------------------------
def drop(ops: list[Any], at: int, pick: random.Random) -> bool:
    del ops[at]
    return True


def swap(ops: list[Any], at: int, pick: random.Random) -> bool:
    if at + 1 == len(ops) or ops[at] == ops[at + 1]:
        return False
    ops[at], ops[at + 1] = ops[at + 1], ops[at]
    return True


def late(ops: list[Any], at: int, pick: random.Random) -> bool:
    """A wait comes after the next data."""
    if ops[at]["name"] not in ("wait", "rlxwait", "sem_acquire"):
        return False
    after = next((k for k in range(at, len(ops)) if "src_buff" in ops[k]), None)
    if after is None:
        return False
    ops.insert(after, ops.pop(at))
    return True


def elsewhere(ops: list[Any], at: int, pick: random.Random) -> bool:
    """Another chunk, or another peer's buffer."""
    regions = [x for side in ("src_buff", "dst_buff") for x in ops[at].get(side, ())]
    if not regions:
        return False
    region = pick.choice(regions)
    key = "buffer_id" if "buffer_id" in region and pick.random() < 0.5 else "index"
    region[key] += pick.choice((-1, 1))
    return True


def another(ops: list[Any], at: int, pick: random.Random) -> bool:
    """Another channel or semaphore."""
    key = "channel_ids" if ops[at].get("channel_ids") else "semaphore_ids"
    if not ops[at].get(key):
        return False
    ops[at][key][0] += pick.choice((-1, 1))
    return True


def weaker(ops: list[Any], at: int, pick: random.Random) -> bool:
    if ops[at]["name"] not in ("wait", "signal"):
        return False
    ops[at]["name"] = "rlx" + ops[at]["name"]
    return True


CHANGES: tuple[Callable[..., bool], ...] = (drop, swap, late, elsewhere, another, weaker)


def mutants(count: int, seed: int) -> list[Any]:
    pick = random.Random(seed)
    sources = [*FILES.values()] + [
        json.loads(ours("dgx1-v100", name, nbytes)) for name, nbytes in
        (("overlapped_double_tree", 1 << 14), ("overlapped_double_tree", 1 << 26),
         ("two_shot", 1 << 14), ("halving_doubling", 1 << 14))
    ]  # fmt: skip
    found: list[Any] = []
    while len(found) < count:
        data = copy.deepcopy(pick.choice(sources))
        gpu = pick.choice(data["gpus"])
        ops = pick.choice(gpu["threadblocks"])["ops"]
        inner = [op["ops"] for op in ops if "ops" in op]
        if inner and pick.random() < 0.8:
            ops = pick.choice(inner)
        change = pick.choice(CHANGES)
        if ops and change(ops, pick.randrange(len(ops)), pick):
            found.append((change.__name__, data))
    return found


def judged(count: int, seed: int, seeds: int) -> dict[str, int]:
    told = {"refused": 0, "accepted": 0, "wrong": 0}
    for name, data in mutants(count, seed):
        try:
            proved(data)
            right = True
        except PlanError:
            right = False
        try:
            run(data, seeds, 4)
            goes = True
        except (Wrong, IndexError, KeyError, ValueError):
            goes = False
        assert goes or not right, (name, json.dumps(data))
        told["accepted" if right else "refused"] += 1
        told["wrong"] += not goes
    return told


def test_no_mutant_that_goes_wrong_is_accepted() -> None:
    told = judged(60, 1, 2)
    assert told["refused"] > 30 and told["wrong"] > 15, told


@pytest.mark.slow
def test_no_mutant_of_a_thousand_is_accepted() -> None:
    told = judged(1000, 2, 6)
    assert told["refused"] > 600 and told["wrong"] > 300, told


def fault(ops: Callable[[int, int], Any], chunks: Any = (1, 2, 1), **more: Any) -> str:
    with pytest.raises(PlanError) as told:
        proved(two("allgather", ops, chunks, "s", **{"inplace": False, **more}))
    return str(told.value)


def sent(a: int, b: int) -> list[dict[str, Any]]:
    return [*meets(0), move("put", at("i", 0), peer(0, 0)), {"name": "nop"}, over("signal", 0),
            over("wait", 0), {"name": "nop"}, move("copy", at("i", 0), at("o", a)),
            move("copy", at("s", 0), at("o", b))]  # fmt: skip


def test_each_fault_is_told() -> None:
    right = two("allgather", sent, (1, 2, 1), "s", inplace=False)
    assert proved(right) == ""

    def without(*left_out: int) -> Callable[[int, int], Any]:
        return lambda a, b: [op for k, op in enumerate(sent(a, b)) if k not in left_out]

    assert "race for scratch chunk 0" in fault(without(6))  # before the signal
    assert "race for scratch chunk 0" in fault(without(9))  # after the wait
    assert "race for scratch chunk 0 of rank 1, execution 2" in fault(without(1, 3))
    assert "deadlock in execution 1" in fault(without(7))
    more = [over("signal", 0)]
    assert "1 signals over memory channel 0" in fault(lambda a, b: [*sent(a, b), *more])
    assert "= other data" in fault(without(10))
    assert "has 1 chunks" in fault(lambda a, b: [move("copy", at("i", 0), at("s", 1))])
    assert "exchanges the offsets" in fault(
        lambda a, b: [move("get", peer(0, 0), at("o", 1))], (1, 2, 1)
    )
    assert "has no op 'pot'" in fault(lambda a, b: [{"name": "pot"}])
    assert "at most 64 ops" in fault(lambda a, b: [{"name": "nop"}] * 65)
    assert "must be of rank" in fault(
        lambda a, b: [{**move("copy", peer(0, 0), at("o", 0)), "channel_type": "memory"}]
    )
    with pytest.raises(PlanError, match="not of 'custom'"):
        proved({**right, "collective": "custom"})
    with pytest.raises(PlanError, match="no link from GPU 0 to GPU 5"):
        topo = topology.load("dgx1-v100").subset((0, 5), forwarders=(1, 4))
        verify(mscclpp.read(json.dumps(right)), topo)
    for text in ("", "[]", "{}", '{"gpus": [{"threadblocks": 3}]}'):
        with pytest.raises(PlanError):
            mscclpp.read(text)
