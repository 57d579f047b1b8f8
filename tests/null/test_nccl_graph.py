"""NCCL's graphs: read, simulated, drawn and written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from linkweave import collectives, topology
from linkweave.collectives import CollectiveError, PlanError
from linkweave.collectives.foreign import nccl_graph
from linkweave.collectives.foreign.nccl_graph import RING, TREE
from tests.null.helpers import linkweave

RINGS = ((0, 1, 2, 3), (0, 3, 2, 1), (0, 3, 1, 2), (0, 2, 1, 3))
"""What NCCL 2.5 chose for GPUs 0 to 3 of a DGX-1 with V100 (a dump of the Blink+ authors)."""
CHAINS = ((0, 3, 2, 1), (1, 2, 3, 0), (0, 3, 2, 1), (1, 2, 3, 0))


def dump(*kinds: tuple[int, tuple[tuple[int, ...], ...]], nets: str = "") -> str:
    lines = ['<graphs version="1">']
    for kind, channels in kinds:
        lines.append(
            f'<graph id="{kind}" pattern="4" crossnic="0" nchannels="{len(channels)}" '
            'speedintra="21" speedinter="21" typeintra="NVL" typeinter="PIX" samechannels="0">'
        )
        for channel in channels:
            gpus = "".join(f'<gpu dev="{dev}"/>' for dev in channel)
            lines.append(f"<channel>{nets}{gpus}{nets}</channel>")
        lines.append("</graph>")
    return "\n".join([*lines, "</graphs>"])


def half(machine: str = "dgx1-v100") -> topology.Topology:
    return topology.load(machine).subset(range(4))


def algbw(graph: nccl_graph.Graph, machine: topology.Topology, nbytes: int = 1 << 26) -> float:
    plan = collectives.plan_allreduce(machine, nbytes, graph.algorithm)
    collectives.verify(plan, machine)
    return collectives.simulate(plan, machine, nbytes).algbw


def test_a_dump_is_read_and_carried_out() -> None:
    graphs = nccl_graph.read(dump((RING, RINGS), (TREE, CHAINS)))
    assert graphs[RING].channels == RINGS and graphs[TREE].channels == CHAINS
    assert (graphs[RING].speed, graphs[RING].path) == (21, "NVL")
    assert graphs[RING].nets == ((),) * 4
    machine = half()
    # 4 rings of 4 ranks: each link carries 3/2 of a quarter
    assert algbw(graphs[RING], machine, 1 << 30) == pytest.approx(4 * 25e9 * 2 / 3, rel=0.01)
    assert algbw(graphs[TREE], machine) < algbw(graphs[RING], machine)


def test_ours_for_the_same_gpus_are_as_good() -> None:
    machine, theirs = half(), nccl_graph.read(dump((RING, RINGS)))
    plan = collectives.plan_allreduce(machine, 1 << 26, "ring")
    text = nccl_graph.write(nccl_graph.of_plan(plan, machine))
    ours = nccl_graph.read(text)
    assert algbw(ours[RING], machine) >= algbw(theirs[RING], machine)
    assert len(ours[TREE].channels) == len(ours[RING].channels) == 4
    assert ours[RING].speed == 20 and ours[RING].path == "NVL"
    # as a plan again
    again = collectives.plan_allreduce(machine, 1 << 26, ours[RING].algorithm)
    assert again.link_use == plan.link_use


def test_rings_over_switches_come_several_times() -> None:
    """A channel has at most 20 GB/s, as NCCL's own: one alone would leave the links idle."""
    for name, each, count in (("dgx-a100", 20.0, 12), ("dgx-h100", 20.0, 18)):
        found = topology.load(name)
        graph = nccl_graph.of_plan(collectives.plan_allreduce(found, 1 << 26, "ring"), found)[0]
        assert len({*graph.channels}) == 1 and len(graph.channels) == count
        assert graph.speed == each


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx1-p100", "dgx-a100", "mesh-5", "pcie-8"])
@pytest.mark.parametrize("algorithm", ["ring", "chain"])
def test_written_graphs_are_read_back(machine: str, algorithm: str) -> None:
    found = topology.load(machine)
    plan = collectives.plan_allreduce(found, 1 << 26, algorithm)
    graphs = nccl_graph.read(nccl_graph.write(nccl_graph.of_plan(plan, found)))
    kind = RING if algorithm == "ring" else TREE
    before = collectives.simulate(plan, found, 1 << 26).algbw
    assert algbw(graphs[kind], found) > 0.99 * before
    assert all(len(set(channel)) == plan.size for channel in graphs[TREE].channels)
    assert (RING in graphs) == (algorithm == "ring")  # whose ends need not be joined


def test_the_ring_of_gpus_behind_two_switches_crosses_twice() -> None:
    """Devices are numbered in turns, as on boards whose risers are: a ring by number would cross
    eight times."""
    head = "\t".join(["", *(f"GPU{i}" for i in range(8))])
    rows = [
        "\t".join([f"GPU{a}", *(
            "X" if a == b else "PIX" if a % 2 == b % 2 else "SYS" for b in range(8)
        )]) for a in range(8)
    ]  # fmt: skip
    machine = topology.load("\n".join([head, *rows]), gpu="a100")
    plan = collectives.plan_allreduce(machine, 1 << 26, "ring")
    graph = nccl_graph.of_plan(plan, machine)[RING]
    for channel in graph.channels:
        sides = Counter((a + b) % 2 for a, b in pairwise((*channel, channel[0])))
        assert sides[1] == 2
    assert graph.path == "SYS"


def test_what_nccl_does_not_take() -> None:
    for name, algorithm, words in (
        ("dgx1-v100", "packed_trees", "trees that branch"), ("dgx1-v100", "one_shot", "neither"),
        ("dgx1-v100", "overlapped_double_tree", "trees that branch"),
        ("2 x mesh-4", "chain", "takes rings from us, not chain"),
        ("mi300x", "chain", "does not run on mi300x"), ("cpu-4", "chain", "does not run on cpu-4"),
        ("mesh-1", "chain", "two GPUs"),
    ):  # fmt: skip
        machine = topology.load(name)
        plan = collectives.plan_allreduce(machine, 1 << 26, algorithm)
        with pytest.raises(PlanError, match=words):
            nccl_graph.of_plan(plan, machine)
    machine = topology.load("dgx1-v100")
    plan = collectives.plan_collective("broadcast", machine, 1 << 26)
    with pytest.raises(PlanError, match="not of a broadcast"):
        nccl_graph.of_plan(plan, machine)
    with pytest.raises(PlanError, match="the graph is of GPUs 0, 1, 2, 3; dgx1-v100 has 0, 1"):
        nccl_graph.read(dump((RING, RINGS)))[RING].algorithm(machine)
    with pytest.raises(PlanError, match="no plans of NCCL's kind NVLS"):
        nccl_graph.read(dump((3, ((0,), (1,)))))[3].algorithm(machine)
    with pytest.raises(PlanError, match="no channels of NCCL's kind ring"):
        nccl_graph.read(dump((RING, ()), (TREE, CHAINS)))[RING].algorithm(half())
    good = dump((RING, RINGS))
    wrong = [
        good.replace(one, other) for one, other in
        (('id="0"', 'id="nan"'), ('pattern="4"', 'pattern="inf"'), ('dev="2"', 'dev="x"'))
    ]  # fmt: skip
    for text in (*wrong, "<graphs/>", "<system/>", dump((9, RINGS)), dump((RING, ())), "<graphs"):
        with pytest.raises(CollectiveError):
            nccl_graph.read(text)


def test_numbers_of_newer_dumps_are_read() -> None:
    text = dump((RING, RINGS)).replace('dev="2"', 'dev="0x2"')
    assert nccl_graph.read(text)[RING].channels == RINGS


def test_nets_are_read() -> None:
    graph = nccl_graph.read(dump((RING, RINGS), nets='<net dev="1"/>'))[RING]
    assert graph.nets == ((1, 1),) * 4


# ---- several nodes ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("machine", "nets", "cross", "nic"),
    [
        ("2 x dgx-h100", {(0, 7), (1, 2), (3, 4), (5, 6)}, 2, 48),  # a NIC for each GPU
        ("4 x dgx1-v100", {(0, 0), (1, 1), (2, 2), (3, 3)}, 0, 12),  # two GPUs share one
        ("3 x dgx1-v100", {(0, 0), (1, 1), (2, 2), (3, 3)}, 0, 12),
        ("2 x dgx-a100 nics=1", {(0, 0)}, 0, 24),
    ],
)
def test_each_nic_has_two_channels(
    machine: str, nets: set[tuple[int, ...]], cross: int, nic: int
) -> None:
    found = topology.load(machine)
    plan = collectives.plan_allreduce(found, 1 << 26, "ring")
    ring, tree = nccl_graph.of_plan(plan, found)
    assert ring.cross_nic == cross and tree.cross_nic == 0
    assert {tuple(sorted(pair)) for pair in ring.nets} == nets
    times = Counter(zip(ring.channels, ring.nets, strict=True))
    assert len(set(times.values())) == 1 and len(times) == 2 * len(nets)
    for c in range(0, len(ring.channels), 2):  # NCCL exchanges 2c and 2c + 1
        assert ring.channels[c] == ring.channels[c + 1][::-1]
        assert ring.nets[c] == ring.nets[c + 1][::-1]
    assert [n[0] for n in ring.nets] == [n[0] for n in tree.nets] == [n[1] for n in tree.nets]
    # the GB/s of a NIC, by as many channels
    share = len(ring.channels) // len({net for pair in ring.nets for net in pair})
    assert ring.net_speed * share == nic

    read = nccl_graph.read(nccl_graph.write((ring, tree)))
    assert (read[RING], read[TREE]) == (ring, tree)
    again = collectives.plan_allreduce(found, 1 << 26, ring.algorithm)
    collectives.verify(again, found)
    before = collectives.simulate(plan, found, 1 << 26).algbw
    assert collectives.simulate(again, found, 1 << 26).algbw > 0.98 * before


@pytest.mark.parametrize("nodes", [2, 8, 16])
def test_a_file_names_every_nic_however_many_nodes(nodes: int) -> None:
    """A plan for 16 nodes would have one ring; NCCL's file is of one node."""
    found = topology.load(f"{nodes} x dgx-h100")
    small = topology.load("2 x dgx-h100")
    plan = collectives.plan_allreduce(small, 1 << 26, "ring")
    assert nccl_graph.of_plan(plan, found) == nccl_graph.of_plan(plan, small)
    ring, tree = nccl_graph.of_plan(plan, found)
    assert {nic for pair in ring.nets for nic in pair} == set(range(8))
    assert ring.speed == ring.net_speed <= tree.speed <= 2 * tree.net_speed


def test_gpus_have_their_nodes_numbers() -> None:
    found = topology.load("2 x dgx-h100").subset([4, 5, 6, 7, 12, 13, 14, 15])
    plan = collectives.plan_allreduce(found, 1 << 26, "ring")
    ring, _ = nccl_graph.of_plan(plan, found)
    assert all(sorted(channel) == [4, 5, 6, 7] for channel in ring.channels)
    assert {nic for pair in ring.nets for nic in pair} == {4, 5, 6, 7}
    again = collectives.plan_allreduce(found, 1 << 26, ring.algorithm)
    collectives.verify(again, found)


@pytest.mark.parametrize(
    ("machine", "channels", "speed"),
    [("2 x mesh-1 nic=100GB/s", 5, 20), ("2 x mesh-2 nics=1 nic=1Gb/s", 2, 0.062)],
)
def test_speeds_are_those_of_the_slower_part(machine: str, channels: int, speed: float) -> None:
    found = topology.load(machine)
    plan = collectives.plan_allreduce(found, 1 << 20, "ring")
    ring, _ = nccl_graph.of_plan(plan, found)
    assert len(ring.channels) == channels
    assert ring.speed == ring.net_speed == speed  # never 0, which NCCL takes for "cannot"


def test_graphs_that_do_not_fit_a_cluster() -> None:
    found = topology.load("2 x dgx-h100")
    plan = collectives.plan_allreduce(found, 1 << 26, "ring")
    ring, tree = nccl_graph.of_plan(plan, found)
    with pytest.raises(PlanError, match="makes its own of a tree"):
        tree.algorithm(found)
    some = topology.load("2 x dgx1-v100").subset([0, 1, 2, 8, 9, 10])
    with pytest.raises(PlanError, match=r"GPUs 0, 1, .* of each node; a node of .* has 0, 1, 2"):
        ring.algorithm(some)
    other = replace(ring, nets=tuple((5, 5) for _ in ring.nets))
    with pytest.raises(PlanError, match="channel 0 enters a node by NIC 5 and leaves it by 5"):
        other.algorithm(found)
    with pytest.raises(
        PlanError, match=r"channel 0 goes from GPU 7 to 8 of 2 x dgx-h100, between which"
    ):
        replace(ring, cross_nic=0).algorithm(found)
    odd = topology.load("3 x dgx-h100")  # where every second node cannot have the path backwards
    with pytest.raises(PlanError, match="an even number of them"):
        nccl_graph.of_plan(collectives.plan_allreduce(odd, 1 << 26, "ring"), odd)
    with pytest.raises(PlanError, match="no path"):
        ring.algorithm(odd)
    unlike = found.subset([0, 1, 2, 3, 12, 13, 14, 15])
    with pytest.raises(PlanError):
        nccl_graph.of_plan(collectives.plan_allreduce(unlike, 1 << 20, "ring"), unlike)
    plain = topology.Topology.from_json(found.to_json().replace("node", "host"))
    with pytest.raises(PlanError, match="describe it as 'N x MACHINE'"):
        nccl_graph.of_plan(plan, plain)


def test_the_commands(tmp_path: Path) -> None:
    theirs, ours, drawn = tmp_path / "theirs.xml", tmp_path / "ours.xml", tmp_path / "g.svg"
    theirs.write_text(dump((RING, RINGS), (TREE, CHAINS)))
    machine = ["--topo", "dgx1-v100", "--gpus", "0-3"]
    said = " ".join(linkweave("simulate", *machine, "-s", "64M", "--plan", str(theirs)).split())
    assert "where at most 75.00 GB/s are possible" in said
    assert all(f" {name} " in said for name in ("nccl_ring", "nccl_chains", "ring", "chain"))
    assert "right: " in linkweave("verify", str(theirs), *machine)
    linkweave("topo", "dgx1-v100", "--gpus", "0-3", "--plan", str(theirs), "--svg", str(drawn))
    assert "nccl_ring" in drawn.read_text() or drawn.stat().st_size > 1000
    said = linkweave("plan", *machine, "-s", "64M", "-a", "ring", "--to", "nccl", str(ours))
    assert "4 channels of 20 GB/s, for NCCL_GRAPH_FILE" in " ".join(said.split())
    assert "nccl_ring" in linkweave("simulate", *machine, "-s", "64M", "--plan", str(ours))
