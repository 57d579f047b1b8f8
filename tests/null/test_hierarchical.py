"""Clusters: slices inside the nodes, two trees over the nodes."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave.bench.reproduce import clusters
from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms import hierarchical
from linkweave.collectives.planning.lower import Tuning, lower
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import adopt, plan_allreduce
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import verify
from linkweave.collectives.runtime.reference import run
from linkweave.topology import Topology, allreduce_bound, load
from linkweave.topology.edits import Ends, without_links
from tests.null.helpers import both

CLUSTERS = [
    "2 x mesh-1", "3 x mesh-2", "5 x mesh-3", "2 x pcie-5 nics=1", "4 x pcie-4", "2 x dgx-a100",
    "3 x dgx1-v100",
]  # fmt: skip


def check_sums(plan: Plan) -> None:
    inputs = [np.arange(301) * 1000 + 3**r for r in range(plan.size)]
    assert all((out == sum(inputs)).all() for out in run(plan, inputs))


def across(plan: Plan, per: int) -> set[tuple[int, int]]:
    """Numbers in their nodes of GPUs that send to other nodes, and of those they send to."""
    ends = ((c.src, c.dst) for c in plan.connections if not c.local)
    return {(a % per, b % per) for a, b in ends if a // per != b // per}


@pytest.mark.parametrize("spec", CLUSTERS)
def test_proved_and_summed(spec: str) -> None:
    topo = load(spec)
    plan = plan_allreduce(topo, 1 << 16, "hierarchical", 2 * 2 * len(topo.gpus))
    verify(plan, topo)
    check_sums(plan)


def test_between_nodes_only_gpus_of_one_local_rank_talk() -> None:
    topo = load("4 x mesh-3")
    plan = plan_allreduce(topo, 1 << 20, "hierarchical")
    assert all(a == b for a, b in across(plan, 3))


@pytest.mark.parametrize("spec", ["2 x dgx-a100", "16 x mesh-1"])
def test_large_messages_pass_the_network_near_the_bound(spec: str) -> None:
    topo = load(spec)
    line = simulate(plan_allreduce(topo, 1 << 30, "hierarchical"), topo, 1 << 30)
    assert 0.7 * allreduce_bound(topo) < line.algbw <= allreduce_bound(topo)


@pytest.mark.parametrize("spec", ["2 x dgx-a100", "17 x mesh-4"])
@pytest.mark.parametrize("nbytes", [1 << 24, 1 << 26])
def test_twice_as_fast_as_what_knows_of_no_nodes(spec: str, nbytes: int) -> None:
    """Those send several GPUs' worth over the network, or leave rails without work."""
    topo = load(spec)

    def seconds(name: str) -> float:
        return simulate(plan_allreduce(topo, nbytes, name), topo, nbytes).seconds

    mine = seconds("hierarchical")
    rivals = ("overlapped_double_tree", "chain", "tree", "recursive_doubling")
    assert all(seconds(name) > 2 * mine for name in rivals)
    assert seconds("auto") <= 1.01 * mine


@pytest.mark.parametrize("nbytes", [1 << 24, 1 << 26, 1 << 30])
def test_on_rails_it_is_as_good_as_packed_trees(nbytes: int) -> None:
    topo = load("2 x dgx-a100")
    mine, packed = (
        simulate(plan_allreduce(topo, nbytes, name), topo, nbytes).seconds
        for name in ("hierarchical", "packed_trees")
    )
    assert mine < 1.1 * packed


def test_other_machines_are_refused() -> None:
    with pytest.raises(PlanError, match="mesh-4 has one node"):
        plan_allreduce(load("mesh-4"), 1024, "hierarchical")
    uneven = load("2 x mesh-2").subset([0, 1, 2])
    with pytest.raises(PlanError, match=r"has nodes of \[1, 2\] GPUs"):
        plan_allreduce(uneven, 1024, "hierarchical")


@pytest.mark.parametrize(
    "spec", [*(f"{n} x mesh-{size}" for n in (2, 3, 5, 8) for size in (2, 3)), "2 x dgx1-v100"]
)
def test_a_ring_over_the_nodes_is_proved_and_sums(spec: str) -> None:
    topo = load(spec)
    size, nodes = len(topo.gpus), int(spec[0])
    plan = plan_allreduce(topo, 1 << 16, "hierarchical_ring", 2 * size)
    verify(plan, topo)
    assert plan.stride == size  # of each slice one chunk a node
    check_sums(plan)
    per = size // nodes
    ends = {(c.src, c.dst) for c in plan.connections if c.src // per != c.dst // per}
    assert ends == {(r, (r + per) % size) for r in range(size)}


@pytest.mark.parametrize(
    ("spec", "share"),
    # NICs of 48 GB/s take 3.91 ms a GB, NVLinks 3.89: where both are busy, neither is always
    [("4 x dgx-a100", 0.98), ("4 x dgx-h100", 0.89), ("4 x dgx-h100 nic=24GB/s", 0.99),
     ("4 x dgx-h100 leaf=2 oversubscription=2", 0.89), ("4 x dgx1-v100 nics=1", 0.99),
     pytest.param("8 x dgx1-v100", 0.95, marks=pytest.mark.slow)],
)  # fmt: skip
def test_large_messages_reach_the_bound(spec: str, share: float) -> None:
    found = clusters.row(spec)
    assert found.algorithm == "hierarchical_ring"
    assert share <= found.share <= 1
    assert found.busy > share - 0.05


def test_a_chunk_has_channels_of_its_own_on_both_ways() -> None:
    topo = load("3 x mesh-2")
    plan = plan_allreduce(topo, 1 << 16, "hierarchical_ring")
    used: dict[int, set[int]] = {}
    for track in plan.tracks:
        for step in (step for body in track.phases for step in body):
            used.setdefault(track.channel, set()).add(step.chunk)
    assert all(len(chunks) == 1 for chunks in used.values())


@pytest.mark.parametrize(
    ("spec", "rings"),
    {"4 x mesh-2": 2, "7 x mesh-1": 3, "8 x mesh-3": 2, "11 x mesh-2": 4, "5 x pcie-4": 2}.items(),
)
def test_several_rings_are_proved_and_sum(
    spec: str, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings of two to four nodes; the middle of a path has zero to two on a side."""
    monkeypatch.setattr(hierarchical, "_LONGEST", 3)
    topo = load(spec)
    plan = adopt(lower(hierarchical.hierarchical_ring(topo), topo, Tuning(600)), topo)
    size, nodes = len(topo.gpus), int(spec.split()[0])
    per = size // nodes
    assert len(hierarchical._rings([[n] for n in range(nodes)])) == rings
    assert plan.stride == per * -(-nodes // rings)
    check_sums(plan)
    assert all(a == b for a, b in across(plan, per))


@pytest.mark.parametrize(("nodes", "share"), [(31, 0.96), (32, 0.99), (128, 0.96)])
def test_several_rings_use_nics_nearly_all_the_time(nodes: int, share: float) -> None:
    topo = load(f"{nodes} x mesh-1")
    line = simulate(plan_allreduce(topo, 1 << 28, "hierarchical_ring"), topo, 1 << 28)
    assert share * allreduce_bound(topo) < line.algbw <= allreduce_bound(topo)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_ring"])
def test_gpus_beyond_the_cpus_leave_the_network_to_the_others(name: str) -> None:
    """One NIC a node: the four GPUs of the other CPU have no slice."""
    topo = load("3 x dgx1-v100 nics=1")
    plan = plan_allreduce(topo, 1 << 26, name)
    assert {a for a, _ in across(plan, 8)} == {0, 1, 2, 3}
    check_sums(plan)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_ring"])
@pytest.mark.parametrize("node", [0, 2])
def test_gpus_without_a_nic_leave_the_network_to_the_others(name: str, node: int) -> None:
    """Wherever a node has lost a NIC, and also where no path is left."""
    whole = load("3 x mesh-2")
    topo = without_links(whole, Ends(2 * node + 1, f"node{node}.nic1", None))
    plan = plan_allreduce(topo, 1 << 20, name)
    assert {a for a, _ in across(plan, 2)} == {0}
    check_sums(plan)


@pytest.mark.parametrize("node", [0, 1, 2])
def test_gpus_that_no_path_connects_leave_a_nic_to_farther_ones(node: int) -> None:
    topo = load("3 x dgx1-v100 nics=1")
    for switch in (0, 1):
        topo = without_links(topo, Ends(f"node{node}.switch{switch}", f"node{node}.cpu0", None))
    plan = plan_allreduce(topo, 1 << 20, "hierarchical_ring")
    assert {a for a, _ in across(plan, 8)} == {4, 5, 6, 7}


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_ring"])
def test_a_nic_farther_from_its_gpus_than_another_is_used(name: str) -> None:
    ends = [(0, "p0"), (1, "p0"), ("p0", "nic0"), (2, "p1"), (3, "p1"), ("p1", "q"), ("q", "nic1")]
    ends += [("p0", "cpu"), ("cpu", "p1"), ("nic0", "rail0"), ("nic1", "rail1")]

    def there(end: int | str, n: int) -> int | str:
        if isinstance(end, int):
            return end + 4 * n
        return end if "rail" in end else f"node{n}.{end}"

    links = [
        k for n in (0, 1) for a, b in ends
        for k in both(there(a, n), there(b, n), kind="network" if "rail" in str(b) else "host")
    ]  # fmt: skip
    topo = Topology("two NICs", tuple(range(8)), tuple(links))
    plan = plan_allreduce(topo, 1 << 20, name)
    assert {a for a, _ in across(plan, 4)} == {0, 1, 2, 3}


def test_rings_are_shorter_on_larger_clusters() -> None:
    """A plan grows with nodes times nodes of a ring."""

    def lengths(count: int) -> set[int]:
        return {len(ring) for ring in hierarchical._rings([[n] for n in range(count)])}

    wanted = {16: {16}, 17: {17}, 34: {17}, 20: {10}, 29: {14, 15}, 128: {16}, 256: {8}}
    assert {count: lengths(count) for count in wanted} == wanted
    with pytest.raises(PlanError, match="hierarchical_ring is for at most 256 nodes, not 257"):
        plan_allreduce(load("257 x mesh-2"), 1024, "hierarchical_ring")


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_ring"])
def test_inside_a_cube_mesh_node_only_nvlinks_are_used(name: str) -> None:
    """Not every pair of a DGX-1 has one: the trees pass other GPUs instead of PCIe."""
    topo = load("2 x dgx1-v100")
    plan = plan_allreduce(topo, 1 << 26, name)
    inside = [c for c in plan.connections if not c.local and c.src // 8 == c.dst // 8]
    assert {topo.by_ends[ends].kind for c in inside for ends in c.links} == {"nvlink"}
    assert {len(c.path) for c in inside} == {2}


def test_what_grows_as_the_square_is_left_to_it_on_large_clusters() -> None:
    topo = load("33 x mesh-4 nics=1")
    for name in ("ring", "one_shot", "two_shot", "halving_doubling"):
        words = rf"a plan of {name} grows as P\^2: at most \d+ ranks, not 132"
        with pytest.raises(PlanError, match=words):
            plan_allreduce(topo, 1024, name)
    with pytest.raises(PlanError, match="is for at most 64 GPUs, not 132: use hierarchical"):
        plan_allreduce(topo, 1024, "packed_trees")
