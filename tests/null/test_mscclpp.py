"""Execution plans of MSCCL++: read, written and proved; judged by an engine of their semantics."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mscclpp_engine import Engine, Wrong
from mscclpp_files import FILES, NOP, at, block, gpu, meets, move, over, peer, pipeline, plan, two
from typer.testing import CliRunner

from linkweave import collectives, topology
from linkweave.bench.command.cli import app
from linkweave.collectives import PlanError
from linkweave.collectives.foreign import mscclpp, mscclpp_timing
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


WHOLE = 16 * 8 * 17 * 5 * 7
"""Bytes that every plan here divides."""


@cache
def ours(machine: str, algorithm: str, nbytes: int, collective: str = "allreduce") -> str:
    """A plan of ours for about so many bytes."""
    topo = topology.load(machine)
    nbytes -= nbytes % len(topo.gpus)
    if collective == "allreduce":
        plan = collectives.plan_allreduce(topo, nbytes, algorithm)
    else:
        plan = plan_collective(collective, topo, nbytes)
    try:
        return exported(plan, nbytes, topo).to_json()
    except PlanError as error:  # which says what to pad the message to
        padded = re.search(r"(\d+)$", str(error))
        assert padded
        return exported(plan, int(padded[1]), topo).to_json()


@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 26])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduces_of_ours(algorithm: str, nbytes: int) -> None:
    """Those of one group as they are, others as pipelines."""
    text = ours("dgx1-v100", algorithm, nbytes)
    plan = mscclpp.read(text)
    assert mscclpp.read(plan.to_json()) == plan
    looped = any(op.body for *_, op in plan.ops())
    assert looped or nbytes < 1 << 20 or algorithm == "one_shot"
    run(json.loads(text), 1, 4)


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx-a100", "pcie-8", "dgx1-p100"])
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "alltoall"])
def test_other_collectives_of_ours(collective: str, machine: str) -> None:
    for nbytes in (1 << 13, 1 << 24):
        run(json.loads(ours(machine, "", nbytes, collective)), 1, 4)


def test_ours_for_some_gpus_of_a_machine() -> None:
    for count in (2, 3, 5, 7):
        topo = topology.load("dgx1-v100").subset(range(count))
        plan = collectives.plan_allreduce(topo, 1 << 22, "double_tree")
        run(json.loads(exported(plan, 1 << 22, topo).to_json()), 1, 4)


GOLDEN = sorted(
    path.stem.rsplit("-", 2) for path in (Path(__file__).parents[1] / "golden").glob("*-*-*.txt")
)


@pytest.mark.parametrize(("machine", "collective", "algorithm"), GOLDEN)
def test_golden_plans_leave_or_say_why_not(machine: str, collective: str, algorithm: str) -> None:
    topo = topology.load(machine.replace("x", " x ", 1) if machine[0].isdigit() else machine)
    if collective not in ("allreduce", "allgather", "reduce_scatter", "alltoall"):
        root = ((0, 1),) if collective == "sendrecv" else 0
        plan = plan_collective(collective, topo, 3 * WHOLE, root)
        with pytest.raises(PlanError, match=f"not of a {collective}"):
            exported(plan, 3 * WHOLE)
        return
    nbytes = WHOLE * len(topo.gpus) * 3
    plan = plan_collective(collective, topo, nbytes, 0, algorithm)
    run(json.loads(exported(plan, nbytes, topo).to_json()), 1, 4)


@pytest.mark.parametrize("nbytes", [WHOLE, 64 * WHOLE, 1024 * WHOLE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_they_take_as_long_as_ours(algorithm: str, nbytes: int) -> None:
    """Simulated, with the same model: each op has the time of a step of ours. What differs is that
    no step waits for a free slot, and the turns on links that several connections share."""
    topo = topology.load("dgx1-v100")
    plan = collectives.plan_allreduce(topo, nbytes, algorithm)
    ours = collectives.simulate(plan, topo, nbytes)
    theirs = mscclpp_timing.simulate(exported(plan, nbytes, topo), topo, nbytes)
    assert 0.9 * ours.seconds < theirs.seconds < 1.06 * ours.seconds
    busy = {ends: share * ours.seconds for ends, share in ours.utilisation.items() if share}
    shares = {ends: share * theirs.seconds for ends, share in theirs.utilisation.items()}
    assert shares == pytest.approx(busy, rel=0.01)


@pytest.mark.parametrize("name", FILES)
def test_others_are_simulated_and_drawn(name: str, tmp_path: Path) -> None:
    plan = mscclpp.read(json.dumps(FILES[name]))
    topo = topology.load("dgx-h100").subset(range(len(plan.gpus)))
    told = mscclpp_timing.simulate(plan, topo, 1 << 20 if len(plan.gpus) != 3 else 3 << 18)
    assert 0 < told.seconds < 1e-3 and 0 < max(told.utilisation.values()) <= 1
    picture = tmp_path / "plan.svg"
    topology.draw(topo, [picture], mscclpp_timing.as_drawn(plan))
    assert picture.stat().st_size > 1000
    with pytest.raises(PlanError, match="takes messages of"):
        mscclpp_timing.simulate(plan, topo, 1001)


def test_what_does_not_fit_is_told() -> None:
    topo = topology.load("dgx1-v100")
    with pytest.raises(PlanError, match=r"multiples of 16 up to .*, not 1000: pad it to 992 or"):
        exported(collectives.plan_allreduce(topo, 1000, "chain", 1), 1000)
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
    told = {"refused": 0, "accepted": 0, "wrong": 0, "strict": 0}
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
        told["strict"] += goes and not right
    return told


def test_no_mutant_that_goes_wrong_is_accepted() -> None:
    told = judged(60, 1, 2)
    assert told["accepted"] > 2 and told["wrong"] > 15, told


@pytest.mark.slow
def test_no_mutant_of_a_thousand_is_accepted() -> None:
    told = judged(1000, 2, 6)
    assert told["accepted"] > 50 and told["wrong"] > 300, told


def fault(ops: Callable[[int, int], Any], chunks: Any = (1, 2, 1), **more: Any) -> str:
    with pytest.raises(PlanError) as told:
        proved(two("allgather", ops, chunks, "s", **{"inplace": False, **more}))
    return str(told.value)


def sent(a: int, b: int) -> list[dict[str, Any]]:
    return [*meets(0), move("put", at("i", 0), peer(0, 0)), {"name": "nop"}, over("signal", 0),
            over("wait", 0), {"name": "nop"}, move("copy", at("i", 0), at("o", a)),
            move("copy", at("s", 0), at("o", b))]  # fmt: skip


def port(name: str, *numbers: int) -> dict[str, Any]:
    return over(name, *numbers, kind="port")


ONE = at("i", 0)
LOOP = pipeline([NOP])
UNSAFE: dict[str, tuple[Any, str]] = {
    "a flush, which does nothing": (two("allgather", lambda a, b: [
        port("signal", 0), port("wait", 0), NOP, move("copy", ONE, at("s", 0)), NOP,
        move("put", at("s", 0), peer(0, a), "port", channel_ids=[0]), port("signal", 0),
        port("flush", 0), NOP, move("copy", ONE, at("s", 0)), move("copy", ONE, at("o", a)),
        port("wait", 0), NOP, port("signal", 0), port("wait", 0)],
        (1, 2, 1), "o", "port", inplace=False), "race for scratch chunk 0"),
    "packets, which hand on no writes": (two("allgather", lambda a, b: [
        *meets(0), move("put", ONE, peer(1, a)), NOP, move("ppkt", ONE, peer(0, 0)),
        move("upkt", at("s", 0), at("s", 2)), move("copy", ONE, at("o", a))],
        (1, 2, 4), "so", inplace=False, packets=True), "lie where its chunks|race for output"),
    "packets over plain scratch memory": (two("allgather", lambda a, b: [
        *meets(0), move("put", ONE, peer(0, 1)), *meets(0, relaxed=False),
        move("ppkt", ONE, peer(0, 0)), move("upkt", at("s", 0), at("o", b)),
        move("copy", ONE, at("o", a))],
        (1, 2, 2), "s", inplace=False, packets=True), "lie where its chunks 0 and 1 are"),
    "packets in a Simple plan": ({**FILES["respkt"], "protocol": "Simple"}, "of protocol LL only"),
    "barriers of some of the blocks": (plan("allgather", [gpu(
        0, (1, 1, 0), [block(b, [{"name": "barrier", "barrier_id": 0, "num_threadblocks": 2},
                                 *([move("copy", ONE, at("o", 0))] * (b == 0))]) for b in range(3)],
        ())], inplace=False), "barrier 0 of rank 0 waits for 2 thread blocks, but 3 have it"),
    "lanes that no nop divides": (two("allgather", lambda a, b: [
        *meets(0), move("put", ONE, peer(0, 0)), NOP, over("signal", 0), over("wait", 0), NOP,
        move("copy", at("s", 0), at("o", b)), move("copy", ONE, at("o", a)),
        over("signal", 0, 0), over("wait", 0), over("wait", 0)],
        (1, 2, 1), "s", inplace=False), "two threads use memory channel 0"),
    "shares that chunks of three divide otherwise": (plan("allgather", [gpu(
        0, (2, 2, 2), [
            block(k, [move("copy", at("i", 0, 2), at("s", 0, 2),
                           tbg_info={"tb_id": k, "tbg_size": 4}), NOP,
                      move("copy", at("s", k // 2), at("o", k // 2),
                           tbg_info={"tb_id": k % 2, "tbg_size": 2})]) for k in range(4)],
        ())], inplace=False), "race for scratch"),
    "shares beside a pipeline": (plan("allgather", [gpu(
        0, (1, 1, 1), [block(k, [move("copy", ONE, at("o", 0),
                                      tbg_info={"tb_id": k, "tbg_size": 8})]) for k in range(7)]
        + [block(7, [LOOP])], ())], inplace=False), "= other data"),
    "shares of sixteen and eight": (plan("allgather", [gpu(
        0, (1, 1, 1), [
            block(m, [move("copy", ONE, at("s", 0), tbg_info={"tb_id": 2 * m, "tbg_size": 16}),
                      move("copy", ONE, at("s", 0), tbg_info={"tb_id": 2 * m + 1, "tbg_size": 16}),
                      NOP, move("copy", at("s", 0), at("o", 0),
                                tbg_info={"tb_id": m, "tbg_size": 8})]) for m in range(8)],
        ())], inplace=False), "race for scratch"),
    "shares of too many parts": (plan("allgather", [gpu(
        0, (1, 1, 0), [block(0, [move("copy", ONE, at("o", 0),
                                      tbg_info={"tb_id": 0, "tbg_size": 7}),
                                 move("copy", ONE, at("o", 0),
                                      tbg_info={"tb_id": 0, "tbg_size": 64})])],
        ())], inplace=False), "are too fine"),
    "a peer's input in place": (two("allgather", lambda a, b: [
        *meets(0, relaxed=False), move("get", peer(0, 0), ONE), *meets(0, relaxed=False)],
        (1, 2, 0), "i"), "adds its own offset"),
    "reuse with a peer's output": ({**FILES["put"], "reuse_resources": True},
                                   "keeps the buffers of the first call"),
    "packets of several buffers": (two("allreduce", lambda a, b: [
        move("ppkt", [ONE, at("o", 0)], [peer(0, 0), peer(0, 1)])],
        (1, 1, 2), "s", inplace=False, packets=True), "takes all sources from the buffer"),
    "a copy and a sum by the switch": ({**FILES["glres"], "gpus": [
        {**one, "threadblocks": [{**one["threadblocks"][0], "ops": [
            move("copy", at("i", rank), at("i", rank)), *one["threadblocks"][0]["ops"][5:]]}]}
        for rank, one in enumerate(FILES["glres"]["gpus"])]}, "race for input"),
    "iterations without end": (plan("allgather", [gpu(0, (1, 1, 0), [block(0, [
        pipeline([NOP], 1 << 20, 1 << 40)])], ())]),
        "counts 65535 iterations at most"),
    "semaphores without end": (plan("allgather", [{
        **gpu(0, (1, 1, 0), [block(0, [LOOP])], ()), "semaphores": [{"init_value": 10**9}]}]),
        "takes semaphores up to 64"),
    "units of no ratio": (plan("allgather", [gpu(0, (1, 1, 0), [block(0, [
        LOOP, pipeline([NOP], (1 << 19) + 16)])], ())]),
        "are too fine"),
    "fields of another op": (plan("allgather", [gpu(0, (1, 1, 0), [block(0, [
        {**NOP, "barrier_id": 0}])], ())]), "has barrier_id, which is of barrier"),
    "other chunks than the collective's": (two("allreduce", lambda a, b: [NOP], (4, 1, 0), ""),
                                           "4 input and 1 output chunks are not those"),
    "no ranks": (plan("allgather", []), "numbered from 0"),
    "no thread blocks": (plan("allgather", [gpu(0, (1, 1, 0), [], ())]), "has no thread blocks"),
    "a peer's buffer by its type": (two("allgather", lambda a, b: [
        move("put", ONE, at("o", 0))], (1, 2, 0), "o", inplace=False), "needs buffer_id"),
    "an alignment of four": ({**FILES["res"], "buffer_alignment": 4}, "reads 16 bytes at once"),
    "no channel for a port": (two("allgather", lambda a, b: [
        move("put", ONE, peer(0, a), "port")], (1, 2, 0), "o", "port", inplace=False),
        "needs a channel for each target"),
    "a switch's group of one rank": (plan("allgather", [
        {**data, "channels": data["channels"] if rank else []}
        for rank, data in enumerate(FILES["gstore"]["gpus"])
    ], inplace=False), "same groups of switches"),
    "chunks without end": (two("allgather", lambda a, b: [NOP], (10**9, 2 * 10**9, 0), ""),
                           "at most 16384 chunks"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_what_would_not_go_as_written_is_refused(name: str) -> None:
    data, words = UNSAFE[name]
    with pytest.raises(PlanError, match=words):
        proved(data)


def test_pipelines_of_different_units_are_walked_in_parts() -> None:
    """The sender signals once for each 512 KiB, the receiver waits twice for each MiB."""

    def rank(a: int, b: int) -> dict[str, Any]:
        ops = [move("put", ONE, peer(0, 0)), NOP, over("signal", 0)]
        waits = [over("wait", 0), over("wait", 0), NOP, move("copy", at("s", 0), at("o", b))]
        both = [pipeline(ops), pipeline(waits, 1 << 20)]
        blocks = [block(0, [*meets(1), both[0]], [0, 1], [0]),
                  block(1, [both[1], move("copy", ONE, at("o", a))], [0])]  # fmt: skip
        return gpu(a, (1, 2, 1), blocks, [b, b], "s")

    with pytest.raises(PlanError, match=r"deadlock|not waited for"):
        proved(plan("allgather", [rank(0, 1), rank(1, 0)], inplace=False))


def test_the_same_packets_from_two_ranks_are_refused() -> None:
    """Rank 1 cannot know whether rank 2 has read what it overwrites."""
    ops = {
        0: [move("ppkt", [ONE, ONE], [peer(0, 0), peer(1, 0)])],
        1: [move("upkt", at("s", 0), at("o", 0))],
        2: [move("rppkt", at("s", 0), peer(1, 0)), move("upkt", at("s", 0), at("o", 0))],
    }
    gpus = [
        gpu(a, (1, 3, 1), [block(0, ops[a], [0, 1], [0, 1])], [r for r in range(3) if r != a], "s")
        for a in range(3)
    ]  # fmt: skip
    with pytest.raises(PlanError, match="where readers cannot tell"):
        proved(plan("allgather", gpus, False, True, True))


def test_packets_in_a_pipeline_are_refused() -> None:
    data = copy.deepcopy(FILES["repkt"])
    for one in data["gpus"]:
        ops = one["threadblocks"][0]["ops"]
        one["threadblocks"][0]["ops"] = [pipeline(ops)]
    with pytest.raises(PlanError, match="all packets of a chunk in each iteration"):
        proved(data)


def test_channels_one_way_are_fine_where_nobody_signals() -> None:
    data = copy.deepcopy(FILES["rppkt"])
    for rank, one in enumerate(data["gpus"]):
        one["channels"][0]["connected_to"] = [(rank + 1) % 3]
        one["threadblocks"][0]["channels"][0]["channel_ids"] = [0]
    assert proved(data) == ""


def test_many_semaphores_of_a_rank_are_fine() -> None:
    data = copy.deepcopy(FILES["pipeline"])
    for one in data["gpus"]:
        one["semaphores"] *= 20
    assert proved(data) == ""


def test_the_command_tells_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ops = [[op for k, op in enumerate(sent(a, 1 - a)) if k != 9] for a in range(2)]
    data = two("allgather", lambda a, b: ops[a], (1, 2, 1), "s", inplace=False)
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(app, ["verify", str(path)])
    said = str(done.exception)
    assert "race for scratch chunk 0" in said and "rank 0, thread block 0:" in said
    assert "   op 7: signal memory channel 0" in said and " > op 10: copy of" in said


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
    assert "needs type" in fault(
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
