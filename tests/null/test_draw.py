"""Pictures: files appear, and say what they must. How they look is for eyes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from linkweave.bench.command import what_if
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.topology import Link, Topology, TopologyError, load
from linkweave.topology.draw import _Picture, draw
from linkweave.topology.parts import parts_of

pytest.importorskip("matplotlib")

KINDS = ["dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "mesh-5", "ring-9", "pcie-6", "cpu-3"]


def svg(
    path: Path, topology: Topology, algorithm: str | None = None, part: int | None = None
) -> str:
    plan = None if algorithm is None else plan_allreduce(topology, 1 << 20, algorithm)
    draw(topology, [path / "picture.svg"], plan, part)
    return (path / "picture.svg").read_text()


def texts(picture: str) -> list[str]:
    """Matplotlib writes text as outlines, and what they say as a comment."""
    return re.findall(r"<!-- (.*?) -->", picture)


@pytest.mark.parametrize("name", KINDS)
def test_names_machine_gpus_and_switches(name: str, tmp_path: Path) -> None:
    topology = load(name)
    found = texts(svg(tmp_path, topology))
    switches = {v for k in topology.fabric for v in (k.src, k.dst) if isinstance(v, str)}
    assert {*map(str, topology.gpus), *switches} <= set(found)
    assert any(text.startswith(f"{name}: {len(topology.gpus)} ") for text in found)


def test_png_and_svg_at_once(tmp_path: Path) -> None:
    draw(load("ring-3"), [tmp_path / "a.png", str(tmp_path / "b.svg")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "b.svg").read_text()


def test_title_and_legend_say_what_a_line_is(tmp_path: Path) -> None:
    found = texts(svg(tmp_path, load("dgx1-v100")))
    assert "dgx1-v100: 8 GPUs, 24 NVLinks (PCIe not drawn)" in found
    assert "one line: one NVLink, 25 GB/s each way" in found
    assert found.count("x2") == 8  # the double links


def test_counts_beyond_three_are_numbers(tmp_path: Path) -> None:
    found = texts(svg(tmp_path, load("dgx-a100")))
    assert found.count("x12") == 8
    assert "a line marked x12: 12 NVLinks of 25 GB/s each way" in found


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("dgx1-v100", "overlapped_double_tree"),
        ("dgx1-v100", "ccube_dgx1"),
        ("dgx1-p100", "overlapped_double_tree"),
        ("ring-5", "overlapped_tree"),
        ("ring-4", "two_shot"),
        ("dgx1-v100", "ring"),
        ("pcie-5", "overlapped_double_tree"),
    ],
)
def test_dashed_exactly_where_the_plan_detours(name: str, algorithm: str, tmp_path: Path) -> None:
    topology = load(name)
    detours = plan_allreduce(topology, 1 << 20, algorithm).detours
    picture = svg(tmp_path, topology, algorithm)
    keys = [text for text in texts(picture) if text.startswith("dashed")]
    assert ("stroke-dasharray" in picture) == bool(keys) == bool(detours)
    ends = re.compile(r"dashed: detour (\d+) to (\d+) over GPU (\d+)")
    drawn = {tuple(map(int, found.groups())) for key in keys if (found := ends.fullmatch(key))}
    assert {(min(a, b), via, max(a, b)) for a, b, via in drawn} == set(detours)


@pytest.mark.parametrize(
    ("name", "arcs"),
    [("pcie-8", True), ("dgx-h100", True), ("dgx1-v100", False), ("ring-4", False)],
)
def test_arcs_are_said_to_go_over_switches(name: str, arcs: bool, tmp_path: Path) -> None:
    found = texts(svg(tmp_path, load(name), "ring"))
    assert ("arcs: who sends to whom; it goes over switches" in found) == arcs


def test_paper_detours_belong_to_their_trees(tmp_path: Path) -> None:
    picture = svg(tmp_path, load("dgx1-v100"), "ccube_dgx1")
    found = texts(picture)
    assert "tree 1 of 2: root GPU 0 (ringed), depth 3" in found
    assert "tree 2 of 2: root GPU 1 (ringed), depth 3" in found
    assert "dashed: detour 2 to 4 over GPU 0" in found  # from child to parent
    assert "dashed: detour 3 to 5 over GPU 1" in found
    dashed = [style for style in re.findall(r'style="([^"]*)"', picture) if "dasharray" in style]
    colors = {color[0] for style in dashed if (color := re.search(r"stroke: #\w+", style))}
    assert len(colors) == 2  # the two trees differ


def test_one_tree_detours_where_the_other_goes_straight(tmp_path: Path) -> None:
    """On adjacent GPUs only the plan's connections tell which tree detours."""
    found = texts(svg(tmp_path, load("dgx1-p100"), "overlapped_double_tree"))
    assert sum(text.startswith("dashed") for text in found) == 2


def test_subset_speaks_of_gpus_not_ranks(tmp_path: Path) -> None:
    topology = load("dgx1-v100").subset([7, 5, 4, 6])
    found = texts(svg(tmp_path, topology, "tree"))
    root = plan_allreduce(topology, 1 << 20, "tree").trees[0].root
    assert any(f"root GPU {topology.gpus[root]} " in text for text in found)
    assert {"4", "5", "6", "7"} <= set(found)
    assert not {"0", "1", "2", "3"} & set(found)


def test_renumbered_dgx1_is_laid_out_as_one(tmp_path: Path) -> None:
    new = [3, 7, 1, 0, 6, 2, 5, 4]
    straight = load("dgx1-v100")
    links = tuple(Link(new[k.src], new[k.dst], k.bandwidth, k.count)
                  for k in straight.links
                  if isinstance(k.src, int) and isinstance(k.dst, int))  # fmt: skip
    picture = svg(tmp_path, Topology("other", straight.gpus, links, straight.assumptions))
    size = re.compile(r'viewBox="([^"]*)"')
    assert size.findall(picture) == size.findall(svg(tmp_path, straight))


def test_broadcast_detours(tmp_path: Path) -> None:
    topology = load("ring-5")
    plan = plan_collective("broadcast", topology, 1 << 20, algorithm="tree")
    draw(topology, [tmp_path / "picture.svg"], plan)
    keys = [t for t in texts((tmp_path / "picture.svg").read_text()) if t.startswith("dashed")]
    assert len(keys) == len(plan.detours) > 0


@pytest.mark.parametrize("name", ["mesh-1", "cpu-1", "pcie-1", "ring-2"])
@pytest.mark.filterwarnings("error")
def test_smallest(name: str, tmp_path: Path) -> None:
    assert "0" in texts(svg(tmp_path, load(name)))


def test_equal_every_time(tmp_path: Path) -> None:
    topology = load("mesh-4")
    first, second = (svg(tmp_path, topology, "overlapped_double_tree") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["picture.pdf", "picture"])
def test_other_suffixes_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=rf"{name}: can only draw to \.svg and \.png files"):
        draw(load("ring-3"), [tmp_path / "good.svg", tmp_path / name])
    assert not list(tmp_path.iterdir())


def test_plan_for_another_machine(tmp_path: Path) -> None:
    plan = plan_allreduce(load("ring-4"), 1 << 20, "chain")
    with pytest.raises(TopologyError, match="ring-3 has 3 GPUs; the plan is for 4"):
        draw(load("ring-3"), [tmp_path / "picture.svg"], plan)


@pytest.mark.parametrize(
    ("name", "algorithm", "part", "said"),
    [
        ("dgx1-v100", "ring", None, "ring: all 6 rings"),
        ("dgx1-v100", "ring", 2, "ring: ring 2 of 6"),
        ("dgx1-v100", "packed_trees", 3, "packed_trees: tree 3 of 17, arrows from child to parent"),
        ("dgx1-v100", "halving_doubling", 1, "halving_doubling: phase 1 of 2: reduce"),
        ("4 x mesh-2", "hierarchical", 2, "hierarchical: phase 2 of 4: reduce between nodes"),
        ("cpu-4", "one_shot", None, "one_shot: phase 1 of 1: reduce"),
    ],
)
def test_the_title_says_which_part(
    name: str, algorithm: str, part: int | None, said: str, tmp_path: Path
) -> None:
    assert said in texts(svg(tmp_path, load(name), algorithm, part))


def test_rings_together_take_what_each_takes_alone() -> None:
    topology = load("dgx1-v100")
    parts = parts_of(plan_allreduce(topology, 1 << 20, "ring"), topology)
    assert [part.name for part in parts] == [f"ring {i} of 6" for i in range(1, 7)]
    for part in parts:
        assert sorted(a for a, _ in part.arrows) == sorted(b for _, b in part.arrows) == [*range(8)]


def test_phases_of_a_cluster_stay_inside_nodes_or_cross() -> None:
    topology = load("4 x mesh-2")
    parts = parts_of(plan_allreduce(topology, 1 << 20, "hierarchical"), topology)
    crossing = [{a // 2 != b // 2 for a, b in part.arrows} for part in parts]
    assert crossing == [{False}, {True}, {True}, {False}]
    assert [part.name.split(": ")[1] for part in parts] == [
        "reduce inside nodes", "reduce between nodes", "copy between nodes", "copy inside nodes",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["5 x dgx-h100", "128 x dgx1-v100 leaf=8"])
def test_a_large_cluster_is_a_node_with_what_joins_it_to_the_others(
    name: str, tmp_path: Path
) -> None:
    topology = load(name)
    said = texts(svg(tmp_path, topology))
    nodes = len(topology.gpus) // 8
    beyond = "; their links to the spine are not drawn" * ("leaf" in name)
    assert f"node 0 of {nodes}, and the switches that its NICs reach{beyond}" in said
    assert {str(gpu) for gpu in range(8)} <= {*said} and "8" not in said
    near = {v for k in topology.links if str(k.src).startswith("node0.nic") for v in (k.src, k.dst)}
    names = {str(v).removeprefix("node0.") for v in near if isinstance(v, str)}
    assert names <= {*said} and len(names) >= 8  # NICs, rails or leaves, and PCIe switches


def test_many_trees_are_lines_with_counts(tmp_path: Path) -> None:
    found = texts(svg(tmp_path, load("mesh-9"), "two_shot"))
    assert "used by 2 of the 9 trees" in found


def test_cpu_ranks_are_called_ranks(tmp_path: Path) -> None:
    found = texts(svg(tmp_path, load("cpu-4"), "overlapped_double_tree"))
    assert "GPU" not in " ".join(found)
    assert any("root rank " in text for text in found)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="no part 7 to draw: the picture has parts 1 to 6"):
        svg(tmp_path, load("dgx1-v100"), "ring", 7)
    with pytest.raises(TopologyError, match="no part 1 to draw: the picture has no plan"):
        draw(load("ring-3"), [tmp_path / "a.svg"], None, 1)


def test_everything_is_drawn_on_request(tmp_path: Path) -> None:
    draw(load("dgx1-v100"), [tmp_path / "a.svg"], everything=True)
    found = texts((tmp_path / "a.svg").read_text())
    assert {"cpu0", "switch3"} <= set(found) and not any("not drawn" in text for text in found)


def test_importing_stays_free_of_matplotlib() -> None:
    code = "import sys, linkweave.topology.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("algorithm", ["ccube_dgx1", "two_shot", "overlapped_double_tree"])
def test_trees_are_found_whatever_their_channels_are_called(algorithm: str) -> None:
    topology = load("dgx1-v100")
    plan = plan_allreduce(topology, 1 << 20, algorithm)
    last = max(c.dst_channel for c in plan.connections)
    other = replace(
        plan,
        connections=tuple(
            replace(c, src_channel=last - c.src_channel, dst_channel=last - c.dst_channel)
            for c in plan.connections
        ),
        tracks=tuple(replace(t, channel=last - t.channel) for t in plan.tracks),
    )
    assert parts_of(other, topology) == parts_of(plan, topology)


CHANGES = [
    ("dgx1-v100", ["0-3"], [], True), ("dgx1-v100", ["0-3"], ["1-6"], True),
    ("pcie-2", [], ["0-1"], False), ("dgx1-v100", ["0-1", "0-2", "0-3", "0-4"], [], False),
]  # fmt: skip
"""Machines, links taken out and added, and whether GPUs then stand where they stood: they do not
where one of the two is drawn with its PCIe."""


@pytest.mark.parametrize(("name", "without", "more", "alike"), CHANGES)
def test_both_machines_of_what_if_are_drawn_alike(
    name: str, without: list[str], more: list[str], alike: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seats, vertices = [], _Picture.vertices

    def noted(self: _Picture) -> None:
        seats.append(self.layout.seats)
        vertices(self)

    monkeypatch.setattr(_Picture, "vertices", noted)
    before = load(name)
    both = before, what_if.edited(before, without, more, 0)
    among = what_if.edited(before, (), more, 0)
    what_if.draw(both, among, 1 << 20, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    assert (seats[0] == seats[1]) == alike


@pytest.mark.parametrize(
    ("gone", "dashed"), [([], 0), ([(0, 3)], 1), ([(0, 3), (3, 0)], 1), ([(0, 3), (5, 6)], 2)]
)
def test_links_that_a_machine_lacks_are_dashed(
    gone: list[tuple[int, int]], dashed: int, tmp_path: Path
) -> None:
    whole = load("dgx1-v100")
    links = tuple(k for k in whole.links if (k.src, k.dst) not in gone)
    draw(replace(whole, links=links), tmp_path / "one.svg", like=whole)
    picture = (tmp_path / "one.svg").read_text()
    assert ("dashed: links that this machine lacks" in texts(picture)) is (dashed > 0)
    assert picture.count("stroke-dasharray") == dashed + (dashed > 0)  # and in the legend
