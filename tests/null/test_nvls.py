"""All-reduce by switches that reduce and multicast, for MSCCL++."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mscclpp_engine import Engine

from linkweave import topology
from linkweave.bench.command.cli import app
from linkweave.collectives import CollectiveError, PlanError
from linkweave.collectives.foreign import mscclpp, mscclpp_timing, nvls
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.topology import bound, reducing_bound
from tests.null.helpers import linkweave

PUBLISHED = (273e9, 275e9)
"""algbw of NCCL with NVLS on eight H100: its issue 1455, and 212 of nccl-tests."""


def test_figures_of_eight_h100() -> None:
    """Without switches that reduce at most 257 GB/s; with them a bound above what was measured, and
    a prediction near that, of inputs that are NCCL's own."""
    machine = topology.load("dgx-h100")
    with_, without = reducing_bound(machine), bound(machine)
    assert with_ is not None
    assert f"{without.algbw / 1e9:.0f} {with_.algbw / 1e9:.0f}" == "257 450"
    told = nvls.predict(machine, 8 << 30)
    assert 265e9 < (8 << 30) / told.seconds < 285e9
    assert without.algbw < min(PUBLISHED) and max(PUBLISHED) < with_.algbw
    assert told.inputs.startswith("450 GB/s a GPU, of which 20.6 of 25 GB/s a link are payload")
    assert "85%" in told.inputs
    assert "74%" in nvls.predict(topology.load("dgx-b200"), 1 << 30).inputs


@pytest.mark.parametrize("gpus", [2, 3, 5, 8])
def test_the_plan_is_right(gpus: int) -> None:
    machine = topology.load("dgx-h100").subset(range(gpus))
    plan = nvls.nvls(machine)
    assert verify(plan, machine) == "" and mscclpp.read(plan.to_json()) == plan
    assert plan.least == 16 * gpus * nvls.BLOCKS
    Engine(json.loads(plan.to_json()), 2, lambda unit: unit, gpus).run(2)
    # by wires each GPU sends and receives 1 + 1/P times the message
    nbytes = plan.least << 14
    told = mscclpp_timing.simulate(plan, machine, nbytes)
    wires = nbytes * (1 + 1 / gpus) / 450e9
    assert wires < told.seconds < 1.05 * wires + 15e-6
    # without the first meeting, a rank adds up what others have not filled
    for one in (data := json.loads(plan.to_json()))["gpus"]:
        del one["threadblocks"][0]["ops"][:2]
    with pytest.raises(PlanError, match="race for input"):
        verify(mscclpp.read(json.dumps(data)))


def test_where_no_switch_reduces() -> None:
    for name in ("dgx-a100", "dgx1-v100", "mesh-4", "cpu-4", "mi300x"):
        with pytest.raises(PlanError, match="has no switch that reduces"):
            nvls.nvls(topology.load(name))
    plan = nvls.nvls(topology.load("dgx-h100"))
    with pytest.raises(PlanError, match="has no switch of theirs that multicasts"):
        verify(plan, topology.load("dgx-a100"))


def test_switches_of_different_nodes_reduce_for_no_group(tmp_path: Path) -> None:
    machine = topology.load("2 x dgx-h100").subset((0, 8))
    with pytest.raises(PlanError, match="has no switch that reduces for all GPUs"):
        nvls.nvls(machine)
    plan = nvls.nvls(topology.load("dgx-h100").subset((0, 1)))
    with pytest.raises(PlanError, match="has no switch of theirs that multicasts"):
        verify(plan, machine)


def test_nine_peers_are_too_many() -> None:
    machine = topology.load("dgx-h100")
    links = [link for link in machine.links if link.src == 0 or link.dst == 0]
    more = [
        topology.Link(g if k.src == 0 else k.src, g if k.dst == 0 else k.dst, k.bandwidth, k.count)
        for g in (8, 9) for k in links
    ]  # fmt: skip
    large = topology.Topology(
        "ten", tuple(range(10)), (*machine.links, *more), reducing=machine.reducing
    )
    with pytest.raises(PlanError, match="at most 8 channels in an op; each of 10 ranks"):
        nvls.nvls(large)


def test_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = linkweave("plan", "dgx-h100", "-s", "1G", "--to", "mscclpp", str(path))
    assert "nvls: auto expects it to be 1.3 times as fast" in " ".join(said.split())
    assert linkweave("verify", str(path), "--topo", "dgx-h100")
    said = linkweave("plan", "dgx-h100", "-s", "1K", "--to", "mscclpp", str(path))
    assert "nvls" not in said
    with pytest.raises(CollectiveError, match="only MSCCL"):
        app(["plan", "dgx-h100", "-s", "1G", "-a", "nvls"], standalone_mode=False)
    said = linkweave("simulate", "dgx-h100", "-s", "1G")
    assert "by switches, which plans for MSCCL++ use" in said
