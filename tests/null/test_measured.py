"""Measured figures over nominal ones: JSON, p2pBandwidthLatencyTest, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from linkweave.topology import GpuId, Topology, TopologyError, Vertex, allreduce_bound, load
from linkweave.topology.readers.measured import LinkFigures, PairFigure, looks_like_p2p
from tests.null.fixtures import P2P
from tests.null.helpers import GB, both


def four(devices: bool = False) -> Topology:
    """Four V100: NVLinks 0=1, 0-2, 1=3, 2=3, no NVLink 0 to 3 and 1 to 2; one PCIe switch."""
    nvlinks = [(0, 1, 2), (0, 2, 1), (1, 3, 2), (2, 3, 2)]
    links = [k for a, b, n in nvlinks for k in both(a, b, 25 * GB, n)]
    links += [k for g in range(4) for k in both(g, "switch0", 12 * GB, kind="pcie")]
    who = tuple(GpuId(g, f"0000:0{g + 1}:00.0", f"GPU-{'abcd'[g]}") for g in range(4))
    return Topology("four", (0, 1, 2, 3), tuple(links), ("drawn",), who if devices else ())


P2P_BANDWIDTH = {  # of one link, by hand: the pair's figure over the number of links
    (0, 1): 24_170_000_000, (1, 0): 24_180_000_000, (0, 2): 24_220_000_000, (2, 0): 24_100_000_000,
    (1, 3): 24_100_000_000, (3, 1): 24_000_000_000, (2, 3): 19_150_000_000, (3, 2): 23_750_000_000,
    # PCIe carries 0 to 3 and 1 to 2 only, and back
    (0, "switch0"): 9_790_000_000, ("switch0", 3): 9_790_000_000, (3, "switch0"): 9_440_000_000,
    ("switch0", 0): 9_440_000_000, (1, "switch0"): 9_750_000_000, ("switch0", 2): 9_750_000_000,
    (2, "switch0"): 9_670_000_000, ("switch0", 1): 9_670_000_000,
}  # fmt: skip
P2P_LATENCY = {
    (0, 1): 2.24, (1, 0): 2.27, (0, 2): 2.22, (2, 0): 1.81, (1, 3): 2.28, (3, 1): 2.23, (2, 3): 1.8,
    (3, 2): 2.2, (0, "switch0"): 2.73, ("switch0", 3): 2.73, (3, "switch0"): 2.74,
    ("switch0", 0): 2.74, (1, "switch0"): 2.77, ("switch0", 2): 2.77, (2, "switch0"): 2.72,
    ("switch0", 1): 2.72,
}  # fmt: skip
MEASURED = "measured: measured figures"
BY_NUMBER = f"{MEASURED}, GPUs matched by their numbers"


def bandwidths(topology: Topology) -> dict[tuple[Vertex, Vertex], int]:
    return {(k.src, k.dst): k.bandwidth for k in topology.links}


def latencies(topology: Topology) -> dict[tuple[Vertex, Vertex], float]:
    return {(k.src, k.dst): k.latency_us for k in topology.links}


def figures(pairs: Mapping[tuple[int, int], float], **rest: Any) -> str:
    """The JSON of the link benchmark."""
    return LinkFigures(tuple(PairFigure(a, b, v) for (a, b), v in pairs.items()), **rest).to_json()


# ---- p2pBandwidthLatencyTest -----------------------------------------------------------------


def test_what_the_p2p_test_printed() -> None:
    assert looks_like_p2p(P2P)
    topo = load(four(), measured=P2P)
    assert bandwidths(topo) == P2P_BANDWIDTH
    assert latencies(topo) == P2P_LATENCY
    assert [replace(k, bandwidth=1, latency_us=1) for k in topo.links] == [
        replace(k, bandwidth=1, latency_us=1) for k in four().links
    ]
    assert topo.assumptions == ("drawn", BY_NUMBER)
    assert (topo.name, topo.gpus) == ("four", (0, 1, 2, 3))


def test_p2p_text_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p2p.txt"
    path.write_text(P2P.replace("\n", "\r\n"))
    topo = load(four(), measured=path)
    assert topo.links == load(four(), measured=P2P).links
    assert topo.assumptions[-1] == f"measured: {path}, GPUs matched by their numbers"


def test_p2p_text_without_latencies_leaves_them() -> None:
    topo = load(four(), measured=P2P[: P2P.index("Bidirectional")])
    assert bandwidths(topo) == P2P_BANDWIDTH
    assert set(latencies(topo).values()) == {5.0}


def test_p2p_text_of_more_gpus_than_the_subset_has() -> None:
    """The pairs of other GPUs are of no matter to these two."""
    topo = load(four().subset([3, 1]), measured=P2P)
    assert bandwidths(topo)[1, 3] == 24_100_000_000
    assert bandwidths(topo)[3, 1] == 24_000_000_000
    assert (topo.fabric, len(topo.links)) == (topo.links[:2], 6)  # NVLink; its PCIe is not measured
    assert topo.assumptions == ("drawn", BY_NUMBER)


P2P_LINES = P2P.splitlines()
FIRST_ROW = P2P_LINES.index("     0 734.95  48.34  24.22   9.79")


@pytest.mark.parametrize("rows", range(4))
def test_a_matrix_cut_short_names_the_line(rows: int) -> None:
    at = FIRST_ROW + rows
    cut = ["\n".join(P2P_LINES[:at]) + "\n"]
    cut.append("\n".join([*P2P_LINES[:at], P2P_LINES[at][:-8]]) + "\n")
    cut.append("\n".join([*P2P_LINES[:at], *P2P_LINES[at + 1 :]]))
    for text in cut:
        with pytest.raises(TopologyError, match=rf"line {at + 1}: .* GPU {rows} with 4 figures"):
            load(four(), measured=text)


@pytest.mark.parametrize("word", ["nan", "-9.79", "inf", "N/A", "0x10", "1e5", "9,79", "0.00"])
def test_a_cell_that_is_no_positive_number(word: str) -> None:
    text = P2P.replace("   9.75 ", f" {word} ")
    assert text != P2P
    line = "must be a number from .*, not 0.0" if word == "0.00" else rf"line {FIRST_ROW + 2}: "
    with pytest.raises(TopologyError, match=line):
        load(four(), measured=text)


def test_a_cut_latency_matrix_names_its_line() -> None:
    at = P2P_LINES.index("     2   1.81   2.72   1.90   1.80")
    with pytest.raises(TopologyError, match=rf"measured figures: line {at + 1}: .* row of GPU 2"):
        load(four(), measured="\n".join(P2P_LINES[:at]))


def test_p2p_text_of_another_machine() -> None:
    for machine, words in (
        (load("pcie-5").subset([0, 4]), r"for GPU 1, .* not in pcie-5\[0,4\]; it has 0, 4"),
        ("ring-4", "a figure for GPU 0 to GPU 2, which nothing joins"),
        ("mesh-5", r"48\.34 GB/s from 0 to 1, whose 1 NVLinks carry 25: fig"),
    ):
        with pytest.raises(TopologyError, match=words):
            load(machine, measured=P2P)
    twice = tuple(replace(link, count=2) for link in load("mesh-5").links)
    some = load(replace(load("mesh-5"), links=twice), measured=P2P)
    assert some.assumptions[-1] == "8 of 20 links were not measured: nominal figures"


def test_figures_of_another_kind_of_machine() -> None:
    pair = (PairFigure(0, 1, 1e10),)
    with pytest.raises(TopologyError, match="figures of cpu-2, which are not of mesh-2's kind"):
        load("mesh-2", measured=LinkFigures(pair, machine="cpu-2").to_json())
    with pytest.raises(TopologyError, match="figures of GPUs, which are not of cpu-2's kind"):
        load("cpu-2", measured=LinkFigures(pair, machine="GPUs").to_json())
    five = LinkFigures(pair, together=5e9, machine="cpu-5").to_json()
    assert load("cpu-2", measured=five).by_ends["store", "load"].bandwidth == 10 * GB  # not 5


def test_a_pair_measured_twice_is_refused() -> None:
    pair = (PairFigure(0, 1, 1e10), PairFigure(0, 1, 2e10))
    with pytest.raises(TopologyError, match="two figures for 0 to 1"):
        load("mesh-2", measured=LinkFigures(pair).to_json())


# ---- JSON ------------------------------------------------------------------------------------

ALL = {(a, b): (10 + 4 * a + b) * 1e9 for a, b in permutations(range(4), 2)}


def test_json_by_numbers() -> None:
    topo = load(four(), measured=figures(ALL))
    found = bandwidths(topo)
    assert found[0, 1] == 11 * GB // 2 and found[2, 0] == 18 * GB
    assert found[0, "switch0"] == found["switch0", 3] == 13 * GB
    assert set(latencies(topo).values()) == {5.0}
    assert topo.assumptions == ("drawn", BY_NUMBER)
    assert allreduce_bound(topo) != allreduce_bound(four())


def test_json_of_a_file_with_latencies(tmp_path: Path) -> None:
    pairs = tuple(PairFigure(a, b, v, a + b / 8) for (a, b), v in ALL.items())
    path = tmp_path / "links.json"
    path.write_text(LinkFigures(pairs, machine="here").to_json())
    topo = load(four(), measured=path)
    assert latencies(topo)[2, 3] == 2.375
    assert latencies(topo)[3, "switch0"] == 3.0
    assert topo.assumptions[-1].startswith(f"measured: {path}")


@pytest.mark.parametrize("identity", ["uuid", "bus_id", "both"])
def test_gpus_are_matched_by_who_they_are(identity: str) -> None:
    """The benchmark ran with CUDA_VISIBLE_DEVICES=2,0,3,1: its GPU 0 is the machine's GPU 2."""
    order = (2, 0, 3, 1)
    here = four(devices=True)
    hidden = {"uuid": {"bus_id": ""}, "bus_id": {"uuid": ""}}.get(identity, {})
    devices = tuple(replace(here.devices[g], gpu=n, **hidden) for n, g in enumerate(order))
    seen = {(n, m): ALL[order[n], order[m]] for n, m in permutations(range(4), 2)}
    topo = load(here, measured=figures(seen, devices=devices))
    assert bandwidths(topo) == bandwidths(load(four(), measured=figures(ALL)))
    assert topo.assumptions == ("drawn", MEASURED)
    # a machine whose GPUs are not known by UUID: numbers are all there is
    blind = load(four(), measured=figures(seen, devices=devices))
    assert bandwidths(blind)[0, 2] == seen[0, 2]
    assert blind.assumptions == ("drawn", BY_NUMBER)


def test_a_gpu_that_is_not_here() -> None:
    devices = (GpuId(0, "", "GPU-a"), GpuId(1, "", "GPU-elsewhere"))
    with pytest.raises(
        TopologyError, match="figures for GPU GPU-elsewhere, which is not in four; it has GPU-a"
    ):
        load(four(devices=True), measured=figures({(0, 1): 1e9}, devices=devices))
    with pytest.raises(
        TopologyError, match="has figures for GPU 7, which is not in four; it has 0, 1, 2, 3"
    ):
        load(four(), measured=figures({(0, 7): 1e9}))


@pytest.mark.parametrize("devices", [False, True])
def test_figures_of_the_whole_machine_serve_its_subset(devices: bool) -> None:
    whole = four(devices)
    some = whole.subset([1, 3])
    topo = load(some, measured=figures(ALL, devices=whole.devices))
    assert bandwidths(topo)[1, 3] == 17 * GB // 2
    assert bandwidths(topo)[3, 1] == 23 * GB // 2


def test_a_pair_that_nothing_joins() -> None:
    ring = load("ring-4")
    with pytest.raises(TopologyError, match="a figure for GPU 0 to GPU 2, which nothing joins in"):
        load(ring, measured=figures({(0, 2): 1e9}))
    assert bandwidths(load(ring, measured=figures({(0, 3): 1e9})))[0, 3] == GB


def test_a_shared_link_has_the_best_of_its_pairs() -> None:
    topo = load("pcie-5")
    pairs = {(0, 1): 9e9, (0, 4): 5e9, (1, 4): 6e9, (2, 4): 7.5e9, (4, 3): 2e9}
    least = [PairFigure(a, b, v, v / 1e9) for (a, b), v in pairs.items()]
    found = load(topo, measured=LinkFigures(tuple(least)).to_json())
    wide, slow = bandwidths(found), latencies(found)
    assert wide[0, "switch0"] == 9 * GB  # of 9 and 5
    assert wide["switch0", "host"] == wide["host", "switch1"] == 7_500_000_000  # of 5, 6, 7.5
    assert wide["switch1", 4] == 7_500_000_000
    assert wide["switch1", "host"] == 2 * GB
    assert slow["switch0", "host"] == 5 and slow[0, "switch0"] == 5  # the least of the pairs'
    assert slow["switch0", 1] == 9


def test_links_that_were_not_measured_stay_and_are_told() -> None:
    topo = load(four(), measured=figures({(0, 1): 40e9, (3, 2): 30e9}))
    changed = {e: b for e, b in bandwidths(topo).items() if b != bandwidths(four())[e]}
    assert changed == {(0, 1): 20 * GB, (3, 2): 15 * GB}
    assert topo.assumptions == (
        "drawn", BY_NUMBER, "6 of 8 links were not measured: nominal figures"
    )  # fmt: skip
    with pytest.raises(TopologyError, match='"pairs" is empty'):
        load(four(), measured=figures({}))


def test_figures_are_of_all_parallel_links_and_never_nothing() -> None:
    topo = load("dgx2", measured=figures({(0, 1): 100e9, (1, 0): 1e-3}))
    assert bandwidths(topo)[0, "nvswitch"] == 16_666_666_667
    assert bandwidths(topo)[1, "nvswitch"] == 1
    assert topo.by_ends[0, "nvswitch"].count == 6


# ---- one memory ------------------------------------------------------------------------------


def test_ranks_on_one_memory() -> None:
    topo = load("cpu-3")
    pairs = {(a, b): (a + 1) * 1e9 for a, b in permutations(range(3), 2)}
    found = load(topo, measured=figures(pairs, together=8e9))
    assert bandwidths(found) == {
        ("store", "load"): 8 * GB, (0, "store"): GB, (1, "store"): 2 * GB, (2, "store"): 3 * GB,
        ("load", 0): 3 * GB, ("load", 1): 3 * GB, ("load", 2): 2 * GB,
    }  # fmt: skip
    assert found.assumptions[-1] == MEASURED  # nothing to match: ranks have no identity
    fast = load(topo, measured=figures(dict.fromkeys(pairs, 1e12), together=9e9))
    assert allreduce_bound(fast) == 9e9 / 4
    alone = load(topo, measured=figures(pairs))
    assert bandwidths(alone)["store", "load"] == 3 * GB


def test_together_is_of_no_matter_to_links() -> None:
    assert load(four(), measured=figures(ALL, together=5e9)).links == (
        load(four(), measured=figures(ALL)).links
    )


# ---- what is refused -------------------------------------------------------------------------

PAIR = {"src": 0, "dst": 1, "bandwidth": 1e9, "latency_us": 2.0}
BAD_PAIRS = [
    ({"bandwidth": float("nan")}, r"0 to 1: bandwidth must be a number from 1e-06 to .*, not nan"),
    ({"bandwidth": float("inf")}, r"pairs\[1\]: 0 to 1: bandwidth must be .* not inf"),
    ({"bandwidth": -1e9}, r"pairs\[1\]: 0 to 1: bandwidth must be .* not -1000000000\.0"),
    ({"bandwidth": 0}, r"bandwidth must be .* not 0"),
    ({"bandwidth": "fast"}, r"bandwidth must be .* not 'fast'"),
    ({"bandwidth": True}, r"bandwidth must be .* not True"),
    ({"bandwidth": None}, r"bandwidth must be .* not None"),
    ({"bandwidth": 1e19}, r"bandwidth must be .* not 1e\+19"),
    ({"bandwidth": [1]}, r"bandwidth must be .* not a list of 1 items"),
    ({"bandwidth": 10**400}, r"bandwidth must be .* not an integer of 1329 bits"),
    ({"latency_us": -2}, r"latency_us must be a number from 1e-06 to 1e\+09, not -2"),
    ({"latency_us": float("nan")}, r"latency_us must be .* not nan"),
    ({"latency_us": 0}, r"latency_us must be .* not 0"),
    ({"latency_us": "slow"}, r"latency_us must be .* not 'slow'"),
    ({"src": 1}, r"pairs\[1\]: src and dst are both 1"),
    ({"src": -1}, r"src must be an integer from 0 to 999999999, not -1"),
    ({"src": True}, r"src must be an integer from 0 to 999999999, not True"),
    ({"dst": "GPU1"}, r"dst must be an integer from 0 to 999999999, not 'GPU1'"),
    ({"dst": 1.0}, r"dst must be an integer from 0 to 999999999, not 1\.0"),
    ({"dst": None}, r"dst must be an integer from 0 to 999999999, not None"),
]


def text_of(**change: Any) -> str:
    whole = {"format": "linkweave-links", "version": 1, "pairs": [PAIR], "devices": [], **change}
    return json.dumps(whole)


@pytest.mark.parametrize(("change", "words"), BAD_PAIRS, ids=lambda given: str(given)[:40])
def test_figures_that_are_refused(change: dict, words: str) -> None:
    assert bandwidths(load("mesh-2", measured=text_of()))[0, 1] == GB
    with pytest.raises(TopologyError, match=words):
        load("mesh-2", measured=text_of(pairs=[PAIR, {**PAIR, **change}]))


BAD_JSON = [
    ({"format": "other"}, 'needs "format": "linkweave-links" at the top'),
    ({"format": "linkweave-topology"}, 'needs "format": "linkweave-links"'),
    ({"version": 2}, "version 2 is unknown; known: 1"),
    ({"pairs": None}, "pairs must be a list, not None"),
    ({"pairs": {}}, "pairs must be a list, not a dict of 0 items"),
    ({"devices": "none"}, "devices must be a list, not 'none'"),
    ({"pairs": [3]}, r'pairs\[0\] must be an object with "src", "dst", "bandwidth" and .* not 3'),
    ({"pairs": [[0, 1, 1e9]]}, r"pairs\[0\] must be an object"),
    ({"devices": [3]}, r'devices\[0\] must be an object with "gpu" and optionally'),
    ({"devices": [{"uuid": "GPU-a"}]}, r'devices\[0\] must be an object with "gpu" and optionally'),
    ({"devices": [{"gpu": 0, "colour": 1}]}, r'devices\[0\] must be an object with "gpu" and '),
    ({"devices": [{"gpu": [0]}]}, "device"),
    ({"together": -1}, "together must be a number from 1e-06 to .*, not -1"),
    ({"together": "much"}, "together must be a number from 1e-06 to .*, not 'much'"),
    ({"together": float("nan")}, "together must be a number from 1e-06 to .*, not nan"),
]


@pytest.mark.parametrize(("change", "words"), BAD_JSON, ids=str)
def test_json_of_another_shape_is_refused(change: dict, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        load("mesh-2", measured=text_of(**change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "measured figures: line 1 column 2: Expecting property name"),
        ('{"format": "linkweave-links",\n "version": }', "line 2 column 13"),
        ('{"a": ' + "[" * 100_000, "measured figures: "),
        ('{"a": ' + "9" * 5000 + "}", "measured figures: "),
        ("GPU0 GPU1\n1 2\n", "neither the JSON of linkweave bench links, algorithms or"),
        ("<system/>", "neither the JSON"),
        ("Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)\n", "neither the JSON"),
    ],
    ids=["open", "line", "deep", "digits", "words", "xml", "bidirectional"],
)
def test_texts_that_are_no_figures(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        load("mesh-2", measured=text)


def test_bytes_are_no_figures() -> None:
    with pytest.raises(TopologyError, match="measured figures are a path or text, not b'x'"):
        load("mesh-2", measured=b"x")  # type: ignore[arg-type]


def test_figures_survive_their_own_json() -> None:
    pairs = (PairFigure(0, 1, 5e9, 1.5), PairFigure(1, 0, 4e9))
    told = json.loads(LinkFigures(pairs, (GpuId(0, "0000:01:00.0"),), 7e9, "here").to_json())
    assert (told["format"], told["version"], told["together"]) == ("linkweave-links", 1, 7e9)
    assert told["pairs"] == [
        {"src": 0, "dst": 1, "bandwidth": 5e9, "latency_us": 1.5},
        {"src": 1, "dst": 0, "bandwidth": 4e9, "latency_us": None},
    ]
    assert told["devices"][0]["bus_id"] == "0000:01:00.0"
