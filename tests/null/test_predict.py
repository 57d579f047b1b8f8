"""`linkweave predict`: steps from a machine's links and its GPUs' speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linkweave import topology
from linkweave.bench.command.cli import app
from linkweave.bench.command.predict import MODELS, PEAKS, REACHED, network_of, ranks_of, work_of
from linkweave.collectives import CollectiveError, overlap
from linkweave.topology.speeds import compute_capability
from tests.null.helpers import linkweave


def test_a_step_is_that_of_the_planned_network(tmp_path: Path) -> None:
    words = "predict vgg16 --topo dgx1-v100 --batch 8 --policy c-cube --json"
    files = "--png", f"{tmp_path}/g.png", "--trace", f"{tmp_path}/t.json"
    data = json.loads(linkweave(*words.split(), *files))
    machine = topology.load("dgx1-v100")
    profile = overlap.model_at("vgg16", 8, REACHED * 15.7e12)
    made = overlap.plan(profile, network_of(machine), "c-cube")
    (row,) = data["schedules"]
    assert row["predicted_seconds"] == made.predicted_seconds
    compute = profile.forward_s + profile.backward_s
    assert row["efficiency"] == pytest.approx(compute / made.predicted_seconds)
    assert data["batch"] == 8
    assert data["all_reduce_seconds"] == made.network.seconds(profile.nbytes)
    assert (tmp_path / "g.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_the_text_says_what_is_assumed() -> None:
    words = "predict resnet50 dgx1-v100 --batch 32 --policy ddp --ranks 4"
    out = linkweave(*words.split())
    whole = " ".join(out.split())
    assert "samples of 3x224x224, computed at 6.28 TFLOP/s, 40% of the V100's 15.7 in FP32" in whole
    assert "(assumed; --tflops sets it)" in whole
    assert "resnet50, batch 32" in out and "4 GPUs train" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_speed_is_that_of_the_gpus_or_given() -> None:
    fast = work_of("resnet50", topology.load("2 x dgx-h100"))
    slow = work_of("resnet50", topology.load("dgx2"))
    assert slow.profile.forward_s / fast.profile.forward_s == pytest.approx(494.7 / 15.7)
    given = work_of("resnet50", topology.load("mesh-2"), 64, 6.28)
    assert given.profile.forward_s == pytest.approx(slow.profile.forward_s)
    with pytest.raises(
        CollectiveError, match=r"the GPUs of mesh-2 compute is not known.* or --gpu"
    ):
        work_of("resnet50", topology.load("mesh-2"))
    assert {compute_capability(model) for model in MODELS} == {*PEAKS}


def test_the_speed_is_that_of_the_model_given_for_a_cluster() -> None:
    alone = work_of("resnet50", topology.load("pcie-8", gpu="a100"))
    for nodes in (1, 2):
        found = topology.load(f"{nodes} x pcie-8 nic=1.25GB/s", gpu="a100")
        assert found.name == f"{nodes} x pcie-8 of a100 nic=1.25GB/s"
        assert [(d.gpu, d.sm) for d in found.devices] == [(g, 80) for g in range(8 * nodes)]
        assert work_of("resnet50", found) == alone


def test_a_cluster_of_a_file_without_models_goes_by_its_name(tmp_path: Path) -> None:
    matrix = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n"
    (tmp_path / "dgx-a100.txt").write_text(matrix)
    found = topology.load(f"2 x {tmp_path / 'dgx-a100.txt'}")
    assert work_of("resnet50", found) == work_of("resnet50", topology.load("dgx-a100"))


def test_a_measured_profile_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("name,nbytes,forward_s,backward_s\na,1024,0.1,0.2\n")
    assert work_of(str(path), topology.load("mesh-2")).profile.forward_s == 0.1
    with pytest.raises(CollectiveError, match="measured times: leave out --batch"):
        work_of(str(path), topology.load("mesh-2"), batch=3)


def test_ranks_are_the_first_gpus() -> None:
    assert ranks_of(topology.load("dgx1-v100"), 3).gpus == (0, 1, 2)
    with pytest.raises(CollectiveError, match="--ranks must be an integer from 1 to 2, not 3"):
        ranks_of(topology.load("mesh-2"), 3)


def test_a_gpu_of_unknown_speed_is_not_asked_for_its_model() -> None:
    """It has been given."""
    with pytest.raises(CollectiveError) as error:
        work_of("resnet50", topology.load("pcie-2", gpu="rtx4090"))
    assert "only of P100, V100, A100, H100, H200, B200, B300: give --tflops" in str(error.value)
    assert "--gpu" not in str(error.value)
    swapped = CliRunner().invoke(app, ["predict", "mesh-2", "resnet50"])
    assert "the model comes first: predict resnet50 mesh-2" in str(swapped.exception)
