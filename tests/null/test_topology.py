"""Machines: what is wired, what is refused, and that nothing changes once it is made."""

from __future__ import annotations

import json
import os
import re
from dataclasses import FrozenInstanceError
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave.topology import NAMES, CollectiveError, Link, Topology, TopologyError, load
from linkweave.topology.text import matrix

# links by GPU: "other x count"; dumps of real machines agree
DGX1 = (
    "0: 1x1 2x1 3x2 4x2 | 1: 0x1 2x2 3x1 5x2 | 2: 0x1 1x2 3x2 6x1 | 3: 0x2 1x1 2x2 7x1 | "
    "4: 0x2 5x1 6x1 7x2 | 5: 1x2 4x1 6x2 7x1 | 6: 2x1 4x1 5x2 7x2 | 7: 3x1 4x2 5x1 6x2"
)
TABLE = {
    (int(row.split(":")[0]), int(cell[0])): int(cell[2])
    for row in DGX1.split(" | ")
    for cell in row.split(": ")[1].split()
}
GB = 10**9
NAMED = [
    "dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "dgx-h100",
    *(f"{family}-{n}" for family in ("mesh", "ring", "pcie", "cpu") for n in (*range(1, 10), 17)),
]  # fmt: skip


def wires(topology: Topology) -> dict[tuple[int | str, int | str], tuple[int, int]]:
    return {(k.src, k.dst): (k.count, k.bandwidth) for k in topology.links}


def nvlinks(name: str) -> dict[tuple[int | str, int | str], tuple[int, int]]:
    return {e: w for e, w in wires(load(name)).items() if load(name).by_ends[e].kind == "nvlink"}


def both_ways(pairs: set[tuple[int | str, int | str]], count: int, bandwidth: int) -> dict:
    return {e: (count, bandwidth) for a, b in pairs for e in ((a, b), (b, a))}


def test_dgx1_v100_has_the_links_of_the_table() -> None:
    topo = load("dgx1-v100")
    assert nvlinks("dgx1-v100") == {ends: (count, 25 * GB) for ends, count in TABLE.items()}
    assert {(k.src, k.dst): (k.count, k.bandwidth) for k in topo.fabric} == nvlinks("dgx1-v100")
    assert sum(count for count, _ in nvlinks("dgx1-v100").values()) == 2 * 24
    for gpu in range(8):
        assert sum(link.count for link in topo.fabric if link.src == gpu) == 6
        assert sum(link.count for link in topo.fabric if link.dst == gpu) == 6


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx1-p100"])
def test_beneath_the_nvlinks_two_gpus_share_a_switch_and_two_switches_a_cpu(name: str) -> None:
    ports = {(g, f"switch{g // 2}") for g in range(8)}
    ports |= {(f"switch{s}", f"cpu{s // 2}") for s in range(4)}
    pcie = {e: w for e, w in wires(load(name)).items() if e not in nvlinks(name)}
    assert pcie == both_ways(ports, 1, 12 * GB) | both_ways({("cpu0", "cpu1")}, 1, 6 * GB)


def test_dgx1_p100_has_the_same_pairs_all_single() -> None:
    assert nvlinks("dgx1-p100") == dict.fromkeys(TABLE, (1, 20 * GB))
    assert len(TABLE) == 2 * 16


@pytest.mark.parametrize(
    ("name", "gpus", "ports", "each"),
    [("dgx2", 16, 6, 25), ("dgx-a100", 8, 12, 25), ("dgx-h100", 8, 18, 25),
     ("dgx-h200", 8, 18, 25), ("dgx-b200", 8, 18, 50)],
)  # fmt: skip
def test_switched_machines_have_their_ports(name: str, gpus: int, ports: int, each: int) -> None:
    topo = load(name)
    assert topo.gpus == tuple(range(gpus))
    assert topo.switches == ("nvswitch",)
    assert wires(topo) == both_ways({(g, "nvswitch") for g in range(gpus)}, ports, each * GB)


@pytest.mark.parametrize("n", range(1, 10))
def test_sized_machines(n: int) -> None:
    every = {(a, b) for a in range(n) for b in range(a)}
    around = {(g, (g + 1) % n) for g in range(n - 1 if n == 2 else n)} if n > 1 else set()
    ports = {(g, f"switch{g // 4}") for g in range(n)}
    uplinks = {(f"switch{g // 4}", "host") for g in range(n)} if n > 4 else set()
    memory = {(r, "store") for r in range(n)} | {("load", r) for r in range(n)}
    memory = memory | {("store", "load")} if n > 1 else set()
    assert wires(load(f"mesh-{n}")) == both_ways(every, 1, 25 * GB)
    assert wires(load(f"ring-{n}")) == both_ways(around, 1, 25 * GB)
    assert wires(load(f"pcie-{n}")) == both_ways(ports | uplinks, 1, 12 * GB)
    assert wires(load(f"cpu-{n}")) == dict.fromkeys(memory, (1, 20 * GB))
    for family in ("mesh", "ring", "pcie", "cpu"):
        assert load(f"{family}-{n}").gpus == tuple(range(n))
        assert load(f"{family}-{n}").name == f"{family}-{n}"


VERTEX = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b", "host"]))
LINK = st.builds(
    lambda ends, **rest: Link(*ends, **rest),
    st.tuples(VERTEX, VERTEX).filter(lambda e: e[0] != e[1]),
    bandwidth=st.integers(1, 10**13),
    count=st.integers(1, 40),
    latency_us=st.one_of(st.integers(0, 99), st.floats(0, 1e6)),
    kind=st.sampled_from(["nvlink", "pcie", "host", "socket", "memory", "network"]),
)
LINKS = st.lists(LINK, max_size=8, unique_by=lambda k: (k.src, k.dst))


@settings(deadline=None, max_examples=100)
@given(st.text(), st.permutations(range(4)), LINKS, st.lists(st.text(), max_size=2))
def test_any_machine_survives_json(
    name: str, gpus: list[int], links: list[Link], assumptions: list[str]
) -> None:
    topo = Topology(name, tuple(gpus), tuple(links), tuple(assumptions))
    assert Topology.from_json(topo.to_json()) == topo


def test_matrix_of_the_dgx1() -> None:
    lines = str(load("dgx1-v100")).splitlines()
    assert lines[0] == (
        "dgx1-v100: 8 GPUs, 24 NVLinks, 8 PCIe links, 1 link between CPUs, 4 PCIe links to CPUs"
    )
    assert lines[1].split() == [f"GPU{g}" for g in range(8)]
    for a in range(8):
        cells = ["X" if a == b else f"NV{TABLE[a, b]}" if (a, b) in TABLE else "SYS"
                 for b in range(8)]  # fmt: skip
        assert lines[2 + a].split() == [f"GPU{a}", *cells]
    assert len({len(line) for line in lines[1:10]}) == 1, "columns do not line up"
    assert lines[10] == "X: itself; NV#: # NVLinks; SYS: several CPUs"
    assert [line.split(":")[0] for line in lines[11:]] == ["assumed"]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("mesh-15", 1), ("dgx2", 1), ("mesh-16", 1), ("mesh-24", 2), ("mesh-64", 3),
        ("4 x dgx-a100", 2), ("8 x dgx-a100", 4),
    ],
)  # fmt: skip
def test_a_wide_matrix_is_cut_into_blocks_of_columns(name: str, blocks: int) -> None:
    topo = load(name)
    n, lines = len(topo.gpus), matrix(topo)
    assert max(map(len, lines)) <= 100
    assert len(lines) == blocks * (1 + n) + 1, "blocks and a legend"
    cells: dict[tuple[str, str], str] = {}
    for i in range(blocks):
        heads, *rows = [line.split() for line in lines[i * (1 + n) : (i + 1) * (1 + n)]]
        for gpu, *row in rows:
            cells |= {(gpu, head): cell for head, cell in zip(heads, row, strict=True)}
    head = "GPU" if n <= 15 else ""
    assert cells == {
        (f"GPU{a}", f"{head}{b}"): topo.cell(a, b) for a in topo.gpus for b in topo.gpus
    }


def test_the_legend_has_every_cell_of_the_matrix() -> None:
    specs = ("dgx1-v100", "pcie-8", "2 x dgx-a100", "cpu-2", "ring-4")
    for topo in map(load, specs):
        rows = [line.split() for line in matrix(topo)[1 : 1 + len(topo.gpus)]]
        used = {re.sub(r"\d+", "#", cell) for _, *row in rows for cell in row}
        legend = " ".join(matrix(topo)[1 + len(topo.gpus) :])
        assert {part.split(":")[0] for part in legend.split("; ")} == used


@pytest.mark.parametrize(
    ("name", "summary", "cell"),
    [
        ("dgx2", "dgx2: 16 GPUs, 96 NVLinks", "NV6"),
        ("pcie-4", "pcie-4: 4 GPUs, 4 PCIe links", "PIX"),
        ("cpu-3", "cpu-3: 3 CPU ranks, 7 memory paths one way", "MEM"),
        ("mesh-3", "mesh-3: 3 GPUs, 3 NVLinks", "NV1"),
    ],
)
def test_matrix_names_the_kind_of_way(name: str, summary: str, cell: str) -> None:
    lines = str(load(name)).splitlines()
    n = len(load(name).gpus)
    assert lines[0] == summary
    for a in range(n):
        assert lines[2 + a].split()[1:] == [cell] * a + ["X"] + [cell] * (n - a - 1)


def test_load_takes_a_topology_and_auto() -> None:
    topo = load("dgx1-v100")
    assert load(topo.to_json()) == topo and load(topo) is topo
    assert load("auto") == load(f"cpu-{len(os.sched_getaffinity(0))}")


@pytest.mark.parametrize("name", ["dgx1-v100", "pcie-9", "dgx2", "cpu-4"])
def test_a_subset_keeps_numbers_order_and_wires(name: str) -> None:
    topo = load(name)
    some = topo.subset([3, 0, 2])
    assert some.gpus == (3, 0, 2)
    assert some.name == f"{name}[3,0,2]"
    gone = set(topo.gpus) - {0, 2, 3}
    kept = {e: w for e, w in wires(topo).items() if not gone & set(e)}
    assert wires(some) == kept
    assert topo.subset(topo.gpus) is topo
    assert some.subset([2]).gpus == (2,)
    with pytest.raises(TopologyError, match=rf"{name}\[3,0,2\] has no GPU 1; it has \[3, 0, 2\]"):
        some.subset([1])


def test_subset_errors() -> None:
    mesh = load("mesh-4")
    with pytest.raises(TopologyError, match=r"mesh-4 has no GPU 9; it has \[0, 1, 2, 3\]"):
        mesh.subset([0, 9])
    with pytest.raises(TopologyError, match=r"mesh-4\[1,1\]: a GPU is listed twice in \(1, 1\)"):
        mesh.subset([1, 1])
    with pytest.raises(TopologyError, match="needs at least one GPU"):
        mesh.subset([])


@pytest.mark.parametrize("name", [n for n in NAMED if not n.endswith("-17")])
def test_hops_are_shortest_and_never_pass_a_gpu(name: str) -> None:
    topo = load(name)
    best: dict[tuple[int, int], int] = {}
    for ends in permutations(topo.gpus, 2):
        for between in range(len(topo.switches) + 1):
            ways = ((ends[0], *mid, ends[1]) for mid in permutations(topo.switches, between))
            if any(all(e in topo.by_ends for e in pairwise(w)) for w in ways):
                best[ends] = between + 2
                break
    assert {ends: len(path) for ends, path in topo.ways.items()} == best
    nvlinked = {e for e, path in topo.ways.items() if topo.by_ends[path[:2]].kind == "nvlink"}
    assert set(topo.hops) == (nvlinked if topo.fabric != topo.links and nvlinked else set(best))
    for (a, b), path in [*topo.hops.items(), *topo.ways.items()]:
        assert (path[0], path[-1]) == (a, b)
        assert all(isinstance(v, str) for v in path[1:-1])
        assert all(e in topo.by_ends for e in pairwise(path))


BAD_LINK = [
    ({"bandwidth": 0}, "link 0->1: bandwidth must be an integer from 1 to 1000000000000000, not 0"),
    ({"bandwidth": -5}, "bandwidth must be an integer from 1 to 1000000000000000, not -5"),
    ({"bandwidth": "fast"}, "link 0->1: bandwidth must be an integer from 1 to .*, not 'fast'"),
    ({"bandwidth": 2.5e10}, "bandwidth must be an integer from 1"),
    ({"bandwidth": True}, "bandwidth must be an integer from 1 to .*, not True"),
    ({"bandwidth": None}, "bandwidth must be an integer from 1 to .*, not None"),
    ({"count": 0}, "count must be an integer from 1 to 1000000, not 0"),
    ({"count": 1.5}, "count must be an integer from 1"),
    ({"count": True}, "count must be an integer from 1 to 1000000, not True"),
    ({"latency_us": -1}, r"latency_us must be a number from 0 to 1e\+12, not -1"),
    ({"latency_us": float("nan")}, "latency_us must be a number from 0 to .*, not nan"),
    ({"latency_us": float("inf")}, "latency_us must be a number from 0 to .*, not inf"),
    ({"latency_us": "slow"}, "latency_us must be a number from 0 to .*, not 'slow'"),
    ({"kind": "string"}, "unknown kind 'string'; choose from nvlink, xgmi, pcie, host, socket"),
    ({"src": True}, "link True->1: src must be a GPU number or a switch name"),
    ({"dst": 1.0}, "link 0->1.0: dst must be a GPU number or a switch name"),
    ({"src": None}, "src must be a GPU number"),
    ({"dst": [1]}, "dst must be a GPU number"),
    ({"dst": 0}, "link 0->0 joins a vertex to itself"),
    *(({key: 10**400}, "link 0->1: ") for key in ("bandwidth", "count", "latency_us")),
]


@pytest.mark.parametrize(("change", "words"), BAD_LINK)
def test_a_bad_link_is_refused_made_or_read(change: dict, words: str) -> None:
    good = {"src": 0, "dst": 1, "bandwidth": 25 * GB}
    with pytest.raises(TopologyError, match=words.replace("'", ".")):
        Link(**{**good, **change})
    data = {"format": "linkweave-topology", "version": 1, "name": "m", "gpus": [0, 1]}
    text = json.dumps({**data, "links": [{**good, **change}]})
    with pytest.raises(TopologyError, match=words.replace("'", ".")):
        load(text)


ONE = Link(0, 1, GB)
BAD_MACHINE = [
    ((), (), "m: a topology needs at least one GPU"),
    ((0, 0), (), r"m: a GPU is listed twice in \(0, 0\)"),
    ((0, -1), (), "m: a GPU number must be an integer from 0 to 999999999, not -1"),
    ((True,), (), "a GPU number must be an integer from 0"),
    ((0.0,), (), "a GPU number must be an integer from 0"),
    (("a",), (), "a GPU number must be an integer from 0"),
    ((0,), (ONE,), r"m: link 0->1 names GPU 1, which is not among \[0\]"),
    ((1, 2), (ONE,), r"m: link 0->1 names GPU 0, which is not among \[1, 2\]"),
    ((0, 1), (ONE, ONE), "m: two entries for link 0->1; merge them into one with a count"),
    ((0, 1), (ONE, Link(0, 1, 2 * GB)), "two entries for link 0->1"),
]


@pytest.mark.parametrize(("gpus", "links", "words"), BAD_MACHINE)
def test_a_machine_that_contradicts_itself_is_refused(
    gpus: tuple, links: tuple, words: str
) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology("m", gpus, links)


WELL_FORMED = {"format": "linkweave-topology", "version": 1, "name": "m", "gpus": [0], "links": []}
NEEDS = r'links\[0\] must be an object with "src", "dst", "bandwidth"'
BAD_JSON = [
    ({"format": "other"}, 'needs "format": "linkweave-topology" at the top'),
    ({"version": 2}, "version 2 is unknown; known: 1"),
    ({"version": None}, "version None is unknown; known: 1"),
    ({"name": 3}, '"name" must be a str'),
    ({"gpus": 8}, '"gpus" must be a list'),
    ({"gpus": ["a"]}, "a GPU number must be an integer from 0"),
    ({"gpus": [1.5]}, "a GPU number must be an integer from 0"),
    ({"gpus": [[0]]}, "a GPU number must be an integer from 0"),
    ({"gpus": [{}]}, "a GPU number must be an integer from 0"),
    ({"gpus": [0, 10**400]}, "a GPU number must be an integer from 0"),
    ({"links": {}}, "links must be a list, not a dict of 0 items"),
    ({"links": [3]}, NEEDS + ".* not 3"),
    ({"links": ["abc"]}, NEEDS),
    ({"links": [[0, 1, 25]]}, NEEDS),
    ({"links": [{"src": 0, "dst": 1}]}, NEEDS),
    ({"links": [{"src": 0, "dst": 1, "bandwidth": 5, "colour": 1}]}, NEEDS + ".*colour"),
    ({"assumptions": "none"}, '"assumptions" must be a list'),
]


@pytest.mark.parametrize(("change", "words"), BAD_JSON)
def test_json_of_another_shape_is_refused(change: dict, words: str) -> None:
    assert load(json.dumps(WELL_FORMED)).gpus == (0,)
    with pytest.raises(TopologyError, match=words):
        load(json.dumps({**WELL_FORMED, **change}))


def test_malformed_json_names_file_line_and_column(tmp_path) -> None:
    with pytest.raises(TopologyError, match=r"topology JSON: line 2 column 9: Expecting value"):
        load('{"a": 1,\n "b":   }')
    path = tmp_path / "broken.json"
    path.write_text('{"format":\n\n  oops}')
    with pytest.raises(TopologyError, match=r"broken\.json: line 3 column 3: Expecting value"):
        load(path)


@pytest.mark.parametrize(
    "name",
    ["dgx9", "mesh", "mesh-x", "mesh-1.5", "", "torus-4", "/", "a\0b", "\n", "no such file.txt",
     "some words\nand more\n", "a\nb" * 9999],
)  # fmt: skip
def test_an_unknown_machine_is_told_the_choices(name: str) -> None:
    with pytest.raises(TopologyError, match="unknown machine") as told:
        load(name)
    assert all(choice in str(told.value) for choice in NAMES)
    assert f"unknown machine {name!r}" in str(told.value) or len(name) > 99
    assert len(str(told.value)) < 700


@pytest.mark.parametrize("name", ["mesh-0", "ring-0", "cpu--1", "pcie-5000"])
def test_a_machine_of_no_or_too_many_gpus_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name}: the number of GPUs must be from 1 to 4096"):
        load(name)


def test_a_machine_does_not_change() -> None:
    topo = load("mesh-3")
    fields = ((topo, "name"), (topo, "gpus"), (topo, "links"), (topo.links[0], "count"))
    for target, field in fields:
        with pytest.raises(FrozenInstanceError):
            setattr(target, field, None)
    assert isinstance(topo.links, tuple) and isinstance(topo.gpus, tuple)
    assert len({topo, Topology.from_json(topo.to_json())}) == 1
    assert topo != load("mesh-4")


def test_topology_errors_are_of_the_one_family() -> None:
    assert issubclass(TopologyError, CollectiveError)


def test_assumed_speeds_survive_json_and_do_not_matter_to_equality() -> None:
    link = Link(0, 1, 10**9, assumed=True)
    assert link == Link(0, 1, 10**9)
    machine = Topology("pair", (0, 1), (link, Link(1, 0, 10**9)))
    assert [k.assumed for k in load(machine.to_json()).links] == [True, False]
    with pytest.raises(TopologyError, match="assumed must be true or false, not 'yes'"):
        Link(0, 1, 10**9, assumed="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "right"), [
    ("DGX1-V100", "dgx1-v100"), ("Mesh-8", "mesh-8"), ("dgx1", "dgx1-v100 or dgx1-p100"),
    ("dgx-h", "dgx-h100 or dgx-h200"), ("dgx-h10", "dgx-h100"),
])  # fmt: skip
def test_a_near_name_is_suggested(wrong: str, right: str) -> None:
    with pytest.raises(TopologyError, match=rf"did you mean {right}\?"):
        load(wrong)
