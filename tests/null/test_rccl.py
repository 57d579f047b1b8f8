"""RCCL's trees and rings as strings, on machines of AMD."""

from __future__ import annotations

from pathlib import Path

import pytest

from linkweave import collectives, topology
from linkweave.collectives import PlanError
from linkweave.collectives.foreign import rccl
from tests.null.helpers import linkweave


def test_trees_are_read() -> None:
    assert rccl.parsed("(4(2(3)(1))(6(5)))") == {4: 4, 2: 4, 3: 2, 1: 2, 6: 4, 5: 6}
    assert rccl.parsed("(0)") == {0: 0}
    trees = ("", "()", "0", "(0", "(0))", "(0(1)2)", "(0)(1)", "(0(0))", "(a)", "((0))", "(0 1)")
    for text in trees:
        with pytest.raises(PlanError):
            rccl.parsed(text)


@pytest.mark.parametrize("machine", ["mi250x", "mi300x", "mi300x/5"])
@pytest.mark.parametrize(
    "algorithm", ["overlapped_double_tree", "overlapped_tree", "chain", "packed_trees", "ring"]
)
def test_strings_are_read_back(machine: str, algorithm: str) -> None:
    name, _, count = machine.partition("/")
    found = topology.load(name).subset(range(int(count or 8)))
    plan = collectives.plan_allreduce(found, 1 << 26, algorithm)
    children = max((len(t.children(r)) for t in plan.trees for r in range(plan.size)), default=0)
    if children > rccl.MOST_CHILDREN:
        with pytest.raises(PlanError, match="at most 3 children in a tree; GPU"):
            rccl.write(plan, found)
        return
    text = rccl.write(plan, found)
    assert rccl.is_text(text)
    if plan.detours:  # which RCCL does not have
        value = text.partition('"')[2].rstrip('"\n')
        parents = [rccl.parsed(part) for part in value.split("|")]
        assert [tuple(p[r] for r in range(plan.size)) for p in parents] == [
            t.parent for t in plan.trees
        ]
        return
    (make,) = rccl.read(text).values()
    again = collectives.plan_allreduce(found, 1 << 26, make)
    assert again.trees == plan.trees and again.link_use == plan.link_use
    ours, theirs = (collectives.simulate(p, found, 1 << 26).algbw for p in (plan, again))
    assert theirs == pytest.approx(ours, rel=0.05)


def test_machines_of_amd() -> None:
    one, other = topology.load("mi250x"), topology.load("mi300x")
    assert [sum(k.count for k in one.links if k.src == g) for g in range(8)] == [7, 6] * 4
    assert topology.allreduce_bound(one) == pytest.approx(10 / 3 * 50e9)
    assert topology.allreduce_bound(other) == pytest.approx(4 * 64e9)
    assert "over xGMI" in str(topology.bound(other))
    assert "GPU0     X  XG4    -" in str(one) and "26 xGMI links" in str(one)
    assert topology.load(one.to_json()) == one
    with pytest.raises(topology.TopologyError, match="NCCL's form is of NVIDIA's"):
        topology.to_nccl_xml(one)
    trees = collectives.plan_allreduce(one, 1 << 26, "overlapped_double_tree").trees
    assert max(len(tree.children(r)) for tree in trees for r in range(8)) <= rccl.MOST_CHILDREN


def test_what_rccl_does_not_take() -> None:
    machine = topology.load("mi300x")
    with pytest.raises(PlanError, match="not of a broadcast"):
        rccl.write(collectives.plan_collective("broadcast", machine, 1 << 20), machine)
    with pytest.raises(PlanError, match="neither"):
        rccl.write(collectives.plan_allreduce(machine, 1 << 20, "one_shot"), machine)
    (make,) = rccl.read('RCCL_TREES="(0(1))"').values()
    with pytest.raises(PlanError, match="is of GPUs 0, 1; mi300x has 8"):
        make(machine)
    (make,) = rccl.read("NCCL_RINGS='0 1 2'").values()
    with pytest.raises(PlanError, match="is of GPUs 0, 1, 2"):
        make(machine)


def test_files_that_rccl_would_not_take() -> None:
    machine = topology.load("mi300x")
    (make,) = rccl.read('RCCL_TREES="(0(1)(2)(3)(4)(5)(6)(7))"').values()
    with pytest.raises(PlanError, match="at most 3 children in a tree; GPU 0 has 7"):
        make(machine)
    for text in ('NCCL_RINGS="()"', 'NCCL_RINGS="|"', 'RCCL_TREES="|"', 'NCCL_RINGS="N0 0 1 N1"',
                 'NCCL_RINGS="0 1|(2)"', "RCCL_TREES="):  # fmt: skip
        with pytest.raises(PlanError):
            rccl.read(text)
    half = machine.subset(range(4, 8))
    with pytest.raises(PlanError, match="numbers the GPUs of a node from 0 on"):
        rccl.write(collectives.plan_allreduce(half, 1 << 20, "ring"), half)
    for other in ("dgx1-v100", "cpu-4"):
        found = topology.load(other)
        with pytest.raises(PlanError, match=f"RCCL does not run on {other}"):
            rccl.write(collectives.plan_allreduce(found, 1 << 20, "chain"), found)


def test_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "trees.sh"
    words = ("plan", "mi250x", "-s", "64M", "-a", "packed_trees", "--to", "rccl", str(path))
    assert "sets RCCL_TREES" in linkweave(*words)
    assert path.read_text().startswith('RCCL_TREES="(')
    assert "rccl_trees" in linkweave("simulate", "mi250x", "-s", "64M", "--plan", str(path))
    assert "right: " in linkweave("verify", str(path), "--topo", "mi250x")
