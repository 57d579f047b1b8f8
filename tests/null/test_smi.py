"""The machine in what nvidia-smi prints: every form it was pasted in, and what is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import combinations, permutations
from pathlib import Path

import pytest

from linkweave.topology import TopologyError, bound, load
from linkweave.topology.topology import Topology
from tests.null.fixtures import (
    LEGEND,
    MACHINES,
    SMI,
    Counts,
    Machine,
    all_to_all,
    coloured,
    counts,
    drawn,
    listed,
    nvlinks_of,
    ports_of,
    tabs,
    tree_of,
    uuid,
)

GB = 10**9


DGX1_SWITCHES = "switch0: 0 1 {0} | switch1: 2 3 {1} | switch2: 4 5 {2} | switch3: 6 7 {3}"
DGX1_CPUS = " | cpu0: switch0 switch1 cpu1 | cpu1: switch2 switch3"
TREES = {
    "dgx1-v100": DGX1_SWITCHES.format("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3") + DGX1_CPUS,
    "dgx1-p100": DGX1_SWITCHES.format("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3") + DGX1_CPUS,
    "commented": DGX1_SWITCHES.format(
        "mlx5_0 mlx5_1", "mlx5_2 mlx5_3", "mlx5_4 mlx5_5", "mlx5_6 mlx5_7"
    ) + DGX1_CPUS + " mlx4_0",
    "mixed": "switch0: 2 3 mlx5_0 | switch1: 6 7 mlx5_1 | cpu0: 0 1 switch0 cpu1 | "
             "cpu1: 4 5 switch1",
    "vm": "cpu0: 0 1 2 3 4 5 6 7",
    "h100": "cpu0: 0 1 2 3 cpu1 cpu2 | cpu1: 4 5 6 7 cpu2 | cpu2: NIC0",
    "pairs": "cpu0: 0 1 2 3 cpu1 | cpu1: 4 5 6 7",
    "quad": "cpu0: 0 1 2 3 mlx5_0",
    "cloud": "cpu0: 0 1 2 3",
    "desktop": "cpu0: 0 1",
}  # fmt: skip
BOUNDS = {  # the best algbw of an all-reduce: in links, and in GB/s
    "dgx1-v100": (Fraction(24, 7), 24 / 7 * 25),
    "dgx1-p100": (Fraction(16, 7), 16 / 7 * 20),
    "commented": (Fraction(24, 7), 24 / 7 * 25),
    "mixed": (Fraction(24, 7), 24 / 7 * 25),
    "vm": (Fraction(24, 7), 24 / 7 * 25),
    "h100": (Fraction(8 * 18, 14), 8 * 18 / 14 * 25),
    "pairs": (None, 10),  # between the CPUs
    "quad": (4, 4 * 25),
    "cloud": (3, 3 * 25),
    "desktop": (1, 12),
}


@pytest.mark.parametrize("name", SMI)
def test_every_form_is_read(name: str) -> None:
    made, facts = load(SMI[name]), MACHINES[name]
    assert made.gpus == tuple(range(sum(label.startswith("GPU") for label in facts.labels)))
    assert nvlinks_of(made) == ({} if name == "h100" else facts.nvlinks)
    assert ports_of(made) == (dict.fromkeys(range(8), 18) if name == "h100" else {})
    assert tree_of(made) == drawn(TREES[name])
    assert made.name == "nvidia-smi"
    assert [d.gpu for d in made.devices] == list(made.gpus)


@pytest.mark.parametrize("name", SMI)
def test_the_bound_of_every_form_and_the_machine_it_is_of(name: str) -> None:
    made = load(SMI[name])
    found = bound(made)
    assert (found.links, found.algbw) == (BOUNDS[name][0], pytest.approx(BOUNDS[name][1] * GB))
    same = {n for n in ("dgx1-v100", "dgx1-p100", "dgx-h100") if made.isomorphic_to(load(n))}
    like = {"dgx1-p100": "dgx1-p100", "h100": "dgx-h100"}
    wanted = like.get(name, "dgx1-v100" if made.gpus == tuple(range(8)) else None)
    assert same == ({wanted} if wanted and name != "pairs" else set())


@pytest.mark.parametrize("name", SMI)
def test_speeds_without_models_are_assumed_and_said(name: str) -> None:
    made = load(SMI[name])
    each = {k.bandwidth for k in made.links if k.kind == "nvlink"}
    words = " | ".join(made.assumptions)
    assert each == {"dgx1-p100": {20 * GB}, "desktop": set()}.get(name, {25 * GB})
    assert "GPU model not told" in words
    assert ("wired as a DGX-1 with P100" in words) == (name == "dgx1-p100")
    assert ("an NVSwitch joins GPUs 0, 1, 2" in words) == (name == "h100")
    assert ("speed of the NICs not told: 12 GB/s" in words) == bool(MACHINES[name].nics)
    assert ("10 GB/s between CPUs" in words) == ("cpu1" in made.switches)


# ---- however it was pasted ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SMI)
@pytest.mark.parametrize(
    "around",
    [
        lambda text: coloured(text),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "user@host:~$ nvidia-smi topo -m\n" + text,
        lambda text: "$ nvidia-smi topo -m\nTopology:\n\n" + text + "\nThanks! GPU0 is slow.\n",
        lambda text: "\n".join("> " + line for line in text.split("\n")),
        lambda text: "\n".join("| " + line for line in text.split("\n")),
        lambda text: "\n\n" + text + "\n\n\n",
    ],
    ids=["colours", "CRLF", "a prompt", "words around", "quoted", "a bar", "blank lines"],
)
def test_what_stands_around_the_matrix_does_not_matter(name: str, around) -> None:
    assert load(around(SMI[name])) == load(SMI[name])


def test_a_gap_after_the_header_does_not_matter() -> None:
    head, rest = SMI["cloud"].split("\n", 1)
    assert load(f"{head}\n\n \n{rest}") == load(SMI["cloud"])


@pytest.mark.parametrize(
    ("model", "sm", "each", "port"),
    [
        ("Tesla P100-SXM2-16GB", 60, 20, 12),
        ("NVIDIA RTX A6000", 86, 14.0625, 24),
        ("NVIDIA B200", 100, 50, 48),
        ("NVIDIA Z9 (new)", 0, 25, 12),
    ],
)
@pytest.mark.parametrize("after", [False, True], ids=["list first", "list last"])
def test_the_list_of_gpus_tells_models_and_speeds(
    model: str, sm: int, each: float, port: int, after: bool
) -> None:
    parts = [listed(model, 4), SMI["cloud"]]
    made = load("\n".join(reversed(parts) if after else parts))
    assert nvlinks_of(made) == MACHINES["cloud"].nvlinks
    assert {k.bandwidth for k in made.links if k.kind == "nvlink"} == {int(each * GB)}
    assert {k.bandwidth for k in made.links if k.kind == "host"} == {port * GB}
    assert [(d.gpu, d.model, d.uuid, d.sm) for d in made.devices] == [
        (g, model, uuid(g), sm) for g in range(4)
    ]
    assert made.find(uuid=uuid(2)) == 2
    words = " | ".join(made.assumptions)
    assert (f"{model}: unknown model" in words) == ("GPU model not told" in words) == (sm == 0)


def test_two_models_in_one_machine() -> None:
    two = listed("Tesla V100", 2) + "\n".join(listed("Tesla P100", 4).splitlines()[2:])
    made = load(two + "\n\n" + SMI["cloud"])
    each = {(k.src, k.dst): k.bandwidth // GB for k in made.links if k.kind == "nvlink"}
    assert (each[0, 1], each[1, 2], each[2, 3]) == (25, 20, 20)


def test_a_list_of_other_gpus_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"has GPU2, but the list of GPUs .* has only 0, 1"):
        load(listed("Tesla V100", 2) + "\n" + SMI["cloud"])


def test_mig_devices_are_passed_over_and_said() -> None:
    rows = SMI["quad"].split("\n")
    mig = "MIG 1g.5gb\t" + "\t".join(["SYS"] * 5)
    made = load(listed("NVIDIA A100-SXM4", 4, mig=2) + "\n".join([*rows[:5], mig, mig, *rows[5:]]))
    plain = load(listed("NVIDIA A100-SXM4", 4) + SMI["quad"])
    assert made.links == plain.links
    assert "2 rows of MIG devices passed over: they have no peer access" in made.assumptions
    assert not any("MIG" in words for words in plain.assumptions)


def test_one_gpu_with_empty_affinities() -> None:
    head = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    made = load(head + "GPU0\t X \t\t\t\tN/A\n" + LEGEND)
    assert made.gpus == (0,)
    assert nvlinks_of(made) == {}
    assert tree_of(made) == drawn("cpu0: 0")
    assert bound(made).algbw == float("inf")


@pytest.mark.parametrize(
    "tail", ["\t0-7\t{}", "\t\t0-7\t\t{}", "  0-7  {}", "\t0-7\t{}\t\tN/A", "  0-7  {}  N/A"]
)
def test_cpus_are_called_by_their_numa_nodes(tail: str) -> None:
    made = load(tabs(Machine({}, "0 1", tails=[tail.format(node) for node in (4, 2)])))
    assert tree_of(made) == drawn("cpu4: 0 cpu2 | cpu2: 1")


@pytest.mark.parametrize("node", ["", "\tN/A", "\t\tN/A"])
def test_cpus_affinities_tell_what_nvlinks_hide(node: str) -> None:
    tails = [f"\t0-7,16-23{node}"] * 2 + [f"\t8-15,24-31{node}"] * 2
    made = load(tabs(Machine(all_to_all(4, 4), "0 0 1 1", tails=tails)))
    assert tree_of(made) == drawn("cpu0: 0 1 cpu1 | cpu1: 2 3")
    assert "inferred from their NUMA nodes and CPUs" in " ".join(made.assumptions)


def sockets(made: Topology) -> int:
    return sum(k.kind == "socket" for k in made.links) // 2


def test_one_affinity_for_all_gpus_of_a_dgx1_leaves_two_cpus() -> None:
    pairs = MACHINES["dgx1-v100"].nvlinks
    made = load(tabs(Machine(pairs, "0 0 0 0 1 1 1 1", tails=["\t0-79\tN/A"] * 8)))
    assert sockets(made) == 1
    assert {made.cell(0, g) for g in (5, 6, 7)} == {"SYS"}


def test_one_affinity_and_nothing_but_sys_is_one_cpu() -> None:
    text = tabs(Machine({}, "0 1 2 3 4 5 6 7", tails=["\t0-79\tN/A"] * 8))
    made = load(text)
    assert sockets(made) == 0 and made.cell(0, 7) == "PHB"
    assert "all GPUs have the same CPUs, so SYS" in " ".join(made.assumptions)
    assert sockets(load(text.replace("0-79", ""))) == 28  # then nothing contradicts the matrix


def test_a_model_by_name_gives_the_speed_that_the_text_does_not_tell() -> None:
    text = tabs(Machine(all_to_all(8, 18), "0 0 0 0 1 1 1 1", tails=["\t0-7\t0"] * 8))
    unknown, known = load(text), load(text, gpu="b300")
    assert str(bound(unknown)).startswith(
        "allreduce: at most 257.1 GB/s on the wires = 72/7 links over NVLink (speed assumed); "
    )
    assert str(bound(known)).startswith(
        "allreduce: at most 514.3 GB/s on the wires = 72/7 links over NVLink; bottleneck"
    )
    assert {k.bandwidth for k in known.fabric} == {50 * 10**9}
    with pytest.raises(TopologyError, match="unknown GPU model 'b9000': give a name"):
        load(text, gpu="b9000")
    for spec in ("dgx2", listed("NVIDIA A100-SXM4", 8) + text):
        with pytest.raises(TopologyError, match="b300 cannot be the model of the GPUs of"):
            load(spec, gpu="b300")


def test_gpus_need_not_count_from_zero() -> None:
    made = load("\tGPU2\tGPU5\nGPU2\t X \tNV4\nGPU5\tNV4\t X \n")
    assert made.gpus == (2, 5)
    assert nvlinks_of(made) == {(2, 5): 4}


def test_rows_in_another_order_and_nics_without_rows() -> None:
    head, *rows = SMI["quad"].split("\n")
    made = load("\n".join([head, *reversed(rows[:4])]))
    assert made.links == load(SMI["quad"]).links
    assert "no rows for mlx5_0: taken from their columns" in made.assumptions
    head, *rows = SMI["dgx1-v100"].split("\n")  # of what is between NICs nothing is told
    made = load("\n".join([head, *rows[:8]]))
    assert nvlinks_of(made) == MACHINES["dgx1-v100"].nvlinks
    assert tree_of(made) == drawn(TREES["dgx1-v100"])


@pytest.mark.parametrize(("gpus", "count"), [(4, 7), (8, 12), (16, 6), (2, 18), (4, 18), (3, 10)])
def test_more_than_a_gpu_has_is_an_nvswitch(gpus: int, count: int) -> None:
    text = tabs(Machine(all_to_all(gpus, count), "0 " * gpus, tails=["\t0-7\t0"] * gpus))
    made = load(text)
    if (gpus - 1) * count > 18:
        assert ports_of(made) == dict.fromkeys(range(gpus), count)
        assert nvlinks_of(made) == {}
    else:
        assert (ports_of(made), nvlinks_of(made)) == ({}, all_to_all(gpus, count))


def test_an_nvswitch_with_a_gpu_of_fewer_links() -> None:
    fewer = {(a, b): 10 if 5 in (a, b) else 12 for a, b in combinations(range(8), 2)}
    made = load(tabs(Machine(fewer, "0 " * 8, tails=["\t0-7\t0"] * 8)))
    assert ports_of(made) == {g: 10 if g == 5 else 12 for g in range(8)}
    assert made.cell(5, 0) == made.cell(0, 5) == "NV10"
    assert made.cell(0, 1) == "NV12"


def test_an_nvswitch_beside_gpus_that_have_none() -> None:
    some = all_to_all(3, 18)
    made = load(tabs(Machine(some, "0 0 0 0 1", tails=["\t0-7\t0"] * 4 + ["\t8-15\t1"])))
    assert ports_of(made) == {0: 18, 1: 18, 2: 18}
    assert made.cell(3, 0) == "PHB" and made.cell(4, 0) == "SYS"


@pytest.mark.parametrize("word", ["SYS", "SOC"])
def test_levels_of_old_and_new_drivers(word: str) -> None:
    made = load(tabs(Machine({}, "0a 0a 0b 1c", far=word, tails=["\t0"] * 4)))
    assert tree_of(made) == drawn("switch0: 0 1 | cpu0: switch0 2 cpu1 | cpu1: 3")


def test_several_switches_in_a_row() -> None:
    rows = {(0, 1): "PIX", (2, 3): "PIX", (0, 4): "NODE", (2, 4): "NODE"}

    def cell(a: int, b: int) -> str:
        near = rows.get((min(a, b), max(a, b)))
        return "X" if a == b else near or ("NODE" if 4 in (a, b) else "PXB")

    text = "\t" + "\t".join(f"GPU{g}" for g in range(5))
    for a in range(5):
        text += f"\nGPU{a}\t" + "\t".join(cell(a, b) for b in range(5))
    made = load(text + "\n")
    assert tree_of(made) == drawn(
        "switch1: 0 1 | switch2: 2 3 | switch0: switch1 switch2 | cpu0: switch0 4"
    )
    assert [made.cell(0, b) for b in (1, 2, 4)] == ["PIX", "PXB", "PHB"]


# ---- what is refused -----------------------------------------------------------------------------

GOOD = """\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity
GPU0\t X \tNV1\tNV2\tPIX\t0-31
GPU1\tNV1\t X \tPHB\tSYS\t0-31
GPU2\tNV2\tPHB\t X \tSYS\t0-31
mlx5_0\tPIX\tSYS\tSYS\t X \t
"""
BAD = [  # what is changed to what, and the words of the error
    ("\tSYS\t0-31\nGPU2", "\nGPU2", ["line 3 column 17", "GPU1 ends after 3 of 4 cells"]),
    ("\t X \tPHB\tSYS\t0-31\nGPU2", "\nGPU2", ["line 3 column 9", "GPU1 ends after 1 of 4 cells"]),
    ("\tSYS\tSYS\t X \t\n", "\n", ["line 5 column 11", "mlx5_0 ends after 1 of 4 cells"]),
    ("GPU2\tNV2\tPHB\t X \tSYS\t0-31\n", "", ["line 4", "without the rows of GPU2"]),
    (GOOD[GOOD.index("GPU1\tNV1") :], "", ["line 2", "without the rows of GPU1, GPU2"]),
    (GOOD[GOOD.index("GPU1\tNV1") :], "\nGPU1", ["line 4 column 5", "GPU1 ends after 0 of 4"]),
    (GOOD[GOOD.index("GPU0\t X") :], "", ["without the rows of GPU0, GPU1, GPU2"]),
    ("GPU1\tNV1", "GPU1\tNV2", ["line 3 column 6 says NV2 for GPU1 to GPU0",
                                "line 2 column 10 says NV1 for the way back"]),
    ("GPU2\tNV2\tPHB", "GPU2\tNV2\tSYS", ["line 4 column 10 says SYS for GPU2 to GPU1",
                                          "line 3 column 14 says PHB for the way back"]),
    ("mlx5_0\tPIX", "mlx5_0\tPXB", ["line 5 column 8 says PXB for mlx5_0 to GPU0",
                                    "line 2 column 18 says PIX"]),
    ("GPU2\tNV2\tPHB", "GPU2\tNV2\tNV1", ["line 4 column 10 says NV1",
                                          "line 3 column 14 says PHB"]),
    ("\tPHB\tSYS\t0-31\nGPU2", "\tABC\tSYS\t0-31\nGPU2",
     ["line 3 column 14", "GPU1 to GPU2 is 'ABC'", "NV and a number, or PIX, PXB, PHB, NODE, SYS"]),
    ("\tNV2\tPIX", "\tNV\tPIX", ["line 2 column 14", "GPU0 to GPU2 is 'NV'"]),
    ("\tNV2\tPIX", "\tNV9999\tPIX", ["line 2 column 14", "GPU0 to GPU2 is 'NV9999'"]),
    ("\tNV2\tPIX", "\tnv2\tPIX", ["line 2 column 14", "GPU0 to GPU2 is 'nv2'"]),
    ("\tNV2\tPIX", "\tNV-2\tPIX", ["line 2 column 14", "GPU0 to GPU2 is 'NV-2'"]),
    ("\tNV2\tPIX", "\tX\tPIX", ["line 2 column 14", "GPU0 to GPU2 is 'X'"]),
    ("\tNV2\tPIX", "\tNV2NV2\tPIX", ["line 2 column 14", "is 'NV2NV2'"]),
    ("GPU1\tNV1\t X ", "GPU1\tNV1\tPIX", ["line 3 column 10", "GPU1 to GPU1 is 'PIX'",
                                          "expected X, as they are the same"]),
    ("\tPHB\tSYS\t0-31\nGPU2", "\t" + "A" * 99 + "\tSYS\t0-31\nGPU2", [f"is '{'A' * 40}';"]),
    ("GPU2\tNV2", "GPU1\tNV2", ["line 4", "a second row of GPU1"]),
    ("GPU2\tNV2", "GPU7\tNV2", ["line 4", "a row of GPU7, which the header lacks"]),
    ("GPU2\tNV2", "GPU22\tNV2", ["line 4", "a row of GPU22, which the header lacks"]),
    ("\tGPU1\tGPU2", "\tGPU1\tGPU1", ["line 1", "GPU1 is named twice in the header"]),
    ("\tGPU2\tmlx5_0", "\tGPU2\tGPU0", ["line 1", "GPU0 is named twice in the header"]),
    (GOOD[: GOOD.index("GPU0\t X")], "", ["line 1", "the row of GPU0 comes before any header"]),
    (GOOD[: GOOD.index("GPU1\tNV1")], "", ["line 1", "the row of GPU1 comes before any header"]),
]  # fmt: skip


def test_the_matrix_that_is_broken_below_is_sound() -> None:
    made = load(GOOD)
    assert nvlinks_of(made) == {(0, 1): 1, (0, 2): 2}
    assert made.gpus == (0, 1, 2)


@pytest.mark.parametrize(("old", "new", "words"), BAD)
def test_a_broken_matrix_is_told_where(old: str, new: str, words: list[str]) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(TopologyError) as told:
        load(GOOD.replace(old, new))
    assert str(told.value).startswith("nvidia-smi: ")
    assert [word for word in words if word not in str(told.value)] == [], str(told.value)


def test_lines_are_counted_in_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_text("$ nvidia-smi topo -m\n\n" + coloured(GOOD.replace("GPU1\tNV1", "GPU1\tNV3")))
    with pytest.raises(TopologyError, match=re.escape(f"{path}: line 5 column 6 says NV3")):
        load(path)


@pytest.mark.parametrize("name", SMI)
def test_a_text_cut_anywhere_in_its_rows_is_refused(name: str) -> None:
    """After any number of characters of the rows of the GPUs."""
    text = SMI[name]
    first = re.search(r"GPU0\s+X", text)
    last = re.search(rf"(?m)^\W*{MACHINES[name].labels[len(load(text).gpus) - 1]}\s", text)
    assert first and last
    for end in range(first.end() - 1, last.end(), 7):
        with pytest.raises(TopologyError, match="line"):
            load(text[:end] + "\n")


@pytest.mark.parametrize("name", ["dgx1-v100", "h100", "pairs", "commented", "mixed"])
def test_every_pair_must_be_told_alike_both_ways(name: str) -> None:
    rows = re.findall(r"(?m)^\W*(?:GPU|mlx|NIC)\S*\s.*$", SMI[name])[1:]
    for a, b in list(permutations(range(8), 2))[:: 5 if name != "dgx1-v100" else 1]:
        cells = re.split(r"(\s+)", rows[a].strip("# "))
        at = 2 + 2 * b
        cells[at] = "NV9" if cells[at] != "NV9" else "SYS"
        with pytest.raises(TopologyError, match=f"GPU{max(a, b)} to GPU{min(a, b)}, but line"):
            load(SMI[name].replace(rows[a].strip("# "), "".join(cells)))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (counts("X99 9X9 99X"), None),  # 18 a GPU: an H100's
        (counts("X991 9X.. 9.X. 1..X"), "would have 19 NVLinks, but no GPU has more than 18"),
        ({(0, 1): 19}, None),  # behind an NVSwitch they may
        ({(0, 1): 12, (0, 2): 12, (1, 2): 11}, "would have 24 NVLinks, .* GPU 1 and GPU 2"),
        ({**all_to_all(8, 18), (2, 6): 17},
         "would have 126 NVLinks, .* join GPU 2 and GPU 6 by 18, not 17"),
        ({pair: 18 for pair in all_to_all(8, 18) if pair != (3, 4)},
         "join GPU 3 and GPU 4 by 18, not 0"),
    ],
)  # fmt: skip
def test_counts_that_no_machine_can_have(table: Counts, words: str | None) -> None:
    size = 1 + max(b for _, b in table)
    text = tabs(Machine(table, "0 " * size, tails=["\t0-7\t0"] * size))
    if words is None:
        assert load(text).gpus == tuple(range(size))
    else:
        with pytest.raises(TopologyError, match=f"^nvidia-smi: GPU 0 .*{words}"):
            load(text)


def test_nics_have_no_nvlinks() -> None:
    text = GOOD.replace("GPU1\tNV1\t X \tPHB\tSYS", "GPU1\tNV1\t X \tPHB\tNV4")
    text = text.replace("mlx5_0\tPIX\tSYS", "mlx5_0\tPIX\tNV4")
    with pytest.raises(TopologyError, match="line 5 column 12: mlx5_0 and GPU1 cannot have NVL"):
        load(text)


def test_too_many_devices_are_refused() -> None:
    head = "\t".join(f"GPU{g}" for g in range(257))
    with pytest.raises(TopologyError, match="line 1: 257 devices; at most 256"):
        load(f"\t{head}\nGPU0\t X \n")


@pytest.mark.parametrize(
    "line",
    [f"GPU {'9' * 5000}: Tesla V100 (UUID: GPU-0)", f"GPU{'9' * 5000}", "GPU 0: " * 3000],
    ids=["a number in the list", "a label", "one long line"],
)
def test_a_hostile_line_is_no_crash(line: str) -> None:
    for text in (f"{line}\n{SMI['cloud']}", f"{SMI['cloud']}\n{line}\n"):
        try:
            load(text)
        except TopologyError:
            continue


def test_a_hostile_affinity_is_no_crash() -> None:
    many = "1" * 5000
    assert load(SMI["cloud"].replace("\t0-31\t\tN/A", f"\t0-31\t{many}")).gpus == (0, 1, 2, 3)
