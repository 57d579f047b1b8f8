"""What a notebook or a prompt shows of machines, plans, simulations and schedules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from linkweave import collectives, topology
from linkweave.collectives import overlap

MACHINE = "dgx1-v100"
PLAN = collectives.plan_allreduce(MACHINE, 1 << 26, "overlapped_double_tree")
RUN = collectives.simulate(PLAN, MACHINE, 1 << 26)
SCHEDULE = overlap.plan(overlap.model("resnet50"), overlap.network("10GbE"), "mg-wfbp")


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (topology.load(MACHINE), "<Topology dgx1-v100: 8 GPUs, 24 NVLinks, "),
        (topology.load("128 x dgx-h100"), "<Topology 128 x dgx-h100: 1024 GPUs"),
        (PLAN, "<Plan: allreduce by overlapped_double_tree: 8 ranks, "),
        (RUN, "<Timeline: allreduce of 67108864 bytes by overlapped_double_tree on 8 ranks, "),
        (SCHEDULE, "<Schedule: mg-wfbp for resnet50, "),
        (SCHEDULE.profile, "<Profile resnet50: 161 tensors, "),
        (SCHEDULE.timeline, "<StepTimeline: "),
        (overlap.Network.from_topology("mesh-2"), "<Network mesh-2: 2 workers, "),
    ],
)
def test_a_line_says_what_it_is(thing: Any, words: str) -> None:
    assert repr(thing).startswith(words) and repr(thing).endswith(">")
    assert len(repr(thing)) < 200 and "\n" not in repr(thing)


@pytest.mark.parametrize("thing", [PLAN, RUN, SCHEDULE])
def test_a_notebook_shows_a_table(thing: Any) -> None:
    table = ElementTree.fromstring(thing._repr_html_())
    assert table.tag == "table" and table.findtext("caption")
    assert 2 < len(table.findall("tr")) < 30


def test_a_table_has_all_detours() -> None:
    plan = collectives.plan_allreduce(MACHINE, 1 << 10, "two_shot")
    rows = ElementTree.fromstring(plan._repr_html_()).findall("tr/th")
    assert sum((row.text or "").startswith("detour") for row in rows) == len(plan.detours) > 9


def test_a_notebook_draws_a_machine() -> None:
    picture = topology.load(MACHINE)._repr_svg_()
    assert picture is not None and ElementTree.fromstring(picture).tag.endswith("svg")
    assert topology.load("mesh-65")._repr_svg_() is None  # which nobody could read


def test_a_name_goes_wherever_a_machine_goes(tmp_path: Path) -> None:
    machine = topology.load(MACHINE)
    assert collectives.plan_allreduce(machine, 1 << 26, "overlapped_double_tree") == PLAN
    assert RUN.seconds == collectives.simulate(PLAN, machine, 1 << 26).seconds
    collectives.verify(PLAN, MACHINE)
    assert topology.bound(MACHINE) == topology.bound(machine)
    assert topology.allreduce_bound(MACHINE) == topology.allreduce_bound(machine)
    assert topology.reducing_bound("dgx-h100") is not None
    assert topology.to_nccl_xml(MACHINE) == topology.to_nccl_xml(machine)
    assert topology.compare(MACHINE, "dgx1-p100") == topology.compare(machine, "dgx1-p100")
    assert str(collectives.explain("mesh-3", 1024)) == str(
        collectives.explain(topology.load("mesh-3"), 1024)
    )
    topology.draw(MACHINE, tmp_path / "one.svg", PLAN)
    topology.draw(machine, [str(tmp_path / "two.svg")], PLAN)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    for call in (topology.bound, lambda name: collectives.plan_allreduce(name, 8)):
        with pytest.raises(topology.TopologyError, match=re.escape("'dgx-9'")):
            call("dgx-9")
