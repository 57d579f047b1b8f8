"""What a newcomer types, and is told in a line."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from linkweave import collectives, topology
from linkweave.topology import machines, speeds
from tests.cpu.commands import command
from tests.null.helpers import linkweave

WRONG = {
    "train-trace nosuch.json": "nosuch.json: No such file or directory",
    "bench compare nosuch.json x.json": "nosuch.json: no such file",
    "schedule --profile /etc/passwd":
        "/etc/passwd: a profile in CSV begins with name,nbytes,forward_s,backward_s",
    "topo '1000000 x dgx-a100'": "1000000 nodes of dgx-a100 with 8 GPUs each",
    "bench topk -m 99999999999999": "not enough memory",
    "simulate dgx2 -s 1M --root 99": "root must be",
    "simulate dgx2": "Missing option '--size'",
    "view mesh-3 --batch 3": "belong to --train MODEL",
    "view mesh-3 --train nosuch": "'nosuch' is neither a file nor a model",
    "view mesh-3 -o page.txt": "ends in .html",
    "predict resnet51 dgx2": "neither a file nor a model; did you mean resnet50?",
    "predict resnet50 dgx2 --trace x.json": "--trace needs one policy",
    "predict resnet50 dgx2 --tflops 0": "--tflops must be a number from 0.001",
    "reproduce c-cub": "unknown 'c-cub': choose a paper",
    "reproduce choice --html x.html": "--html is for papers, not for choice",
    "reproduce c-cube --html x.pdf": "a file that ends in .html, not x.pdf",
    "reproduce c-cube --html none/x.html": "--html none/x.html: there is no folder none",
    "what-if dgx1-v100": "name what changes",
    "what-if dgx1-v100 --to dgx2 --add-link 0-1": "name what changes",
    "what-if dgx1-v100 --remove-link 2-9": "has no link 2-9; 2 has links to 0, 1, 3, 6",
    "what-if dgx1-v100 --remove-link 0-3=3": "has 2 links from 0 to 3: cannot remove 3",
    "what-if dgx1-v100 --add-link 0-9": "has no GPU or switch 9",
    "what-if dgx-h100 --remove-link 0-1": "has no link 0-1; 0 has links to nvswitch",
    "plan mesh-3 -s 1M --json --steps": "leave out --steps",
    "schedule --profile vgg16 --network 100GbE": "linkweave predict takes a cluster",
    "topo DGX-1": "did you mean dgx1-v100 or dgx1-p100?",
    "topo g5.48xlarge": "and no such name; names are auto",
    "topo p5.48xlarg": "did you mean p5.48xlarge?",
    "topo pcie-4 --gpu mi300x": "give one of its generation",
    "predict nofile.json dgx2": "'nofile.json' is neither a file nor a model",
    "topo rtx5090": "did you mean pcie-8 --gpu rtx5090?",
    "topo 'p5.48xlarge x 4'": "did you mean 4 x p5.48xlarge?",
    "topo '2 x RTX 4090'": "did you mean pcie-2 --gpu 'rtx 4090'?",
    "topo '4 nodes of dgx-a100'": "did you mean 4 x dgx-a100?",
    "topo '8 H100'": "did you mean dgx-h100?",
    "topo dgx-v100": "did you mean dgx1-v100?",
    "topo v100": "did you mean dgx1-v100?",
    "topo dumps/h100.txt": "and no such name; names are auto",
    "topo x": "and no such name; names are auto",
    "topo pcie-8 --gpu dgx-a100": "unknown GPU model 'dgx-a100'",
    "predict gpt2 mi300x": "what training reaches on one of them\n",
    "what-if dgx1-v100 --add-nic 1": "is one machine: NICs join the nodes",
    "what-if ring-4 --add-link 0-2 --png a.svg": "a file that ends in .png, not a.svg",
    "what-if mesh-2 --remove-link 0-1": "from GPU 0",
    "what-if dgx1-v100 --to dgx2 --gpus 0-3":
        "--gpus would take GPUs out of the first machine only",
    "what-if dgx1-v100 --add-link 2-6 --batch 0": "--batch belongs to --model MODEL",
    "what-if dgx1-v100 --add-link 2-6 --tflops 1": "--tflops belongs to --model MODEL",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_an_error_is_a_line(words: str, tmp_path: Path) -> None:
    done = command(*shlex.split(words), cwd=tmp_path)
    assert done.returncode == 2 and WRONG[words] in done.stderr
    if "Missing option" not in done.stderr:  # which the parser tells
        assert done.stderr.startswith("linkweave: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["-h"], ["topo", "-h"], ["bench", "-h"], ["bench", "topk", "-h"]]
)
def test_help_is_short(words: list[str]) -> None:
    assert linkweave(*words).lstrip().startswith("Usage: ")


@pytest.mark.parametrize("name", [*machines.CLOUD, "Standard_ND96asr_v4"])
def test_rented_machines_have_names(name: str) -> None:
    made = topology.load(name)
    like, provider = machines.CLOUD[name.lower().removeprefix("standard_")]
    assert made.name == name and made.links == topology.load(like).links
    assert any(provider in told and "NICs not known" in told for told in made.assumptions)
    assert topology.load(f"2 x {name}").gpus == tuple(range(16))


def test_a_rack_of_72() -> None:
    rack = topology.load("gb200-nvl72")
    assert len(rack.gpus) == 72 and rack.reducing == ("nvswitch",)
    assert topology.allreduce_bound(rack) == pytest.approx(900e9 * 72 / (2 * 71))


def test_what_is_assumed_of_nics_is_told() -> None:
    for machine, words in (
        ("dgx-h100", "NICs of 48 GB/s, as a dgx-h100 is sold: nic= tells others"),
        ("dgx1-v100", "NICs of 12 GB/s, as a dgx1-v100 is sold: nic= tells others"),
        ("dgx-a100", "NICs of 24 GB/s, as a dgx-a100 is sold: nic= tells others"),
        ("mesh-4", "NICs of 24 GB/s: nic= tells others"),
    ):
        assert words in topology.load(f"2 x {machine}").assumptions
    for text in ("2 x dgx-h100 nic=50GB/s", "1 x dgx-h100"):
        assert not any(told.startswith("NICs") for told in topology.load(text).assumptions)
    # which a GPU's port, of which nothing is known, does not limit
    fast = topology.load("2 x dgx-h100 nic=96GB/s")
    assert "GPUs' PCIe ports as fast as the NICs" in fast.assumptions


def test_another_models_optimizer_is_refused_on_one_rank_too() -> None:
    torch = pytest.importorskip("torch")
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(
        collectives.CollectiveError, match="SGD has none of the module's parameters"
    ):
        collectives.DataParallel(torch.nn.Linear(2, 2), other)


@pytest.mark.parametrize(
    ("model", "sm", "rate", "apart"),
    [("rtx4090", 89, 24, True), ("4090", 89, 24, True), ("rtx 5090", 120, 48, True),
     ("rtx5090", 120, 48, True), ("5090", 120, 48, True), ("RTX 5080", 120, 48, True),
     ("a6000", 86, 24, False), ("RTX3090", 86, 24, False), ("RTX 6000 Ada", 89, 24, False),
     ("v100", 70, 12, False), ("2080", 75, 12, False)],
)  # fmt: skip
def test_cards_are_known_as_people_write_them(model: str, sm: int, rate: int, apart: bool) -> None:
    machine = topology.load("pcie-8", gpu=model)
    assert {device.sm for device in machine.devices} == {sm} and len(machine.devices) == 8
    assert {link.bandwidth for link in machine.links} == {rate * 10**9}
    assert any("GeForce RTX 40 and 50 do not" in told for told in machine.assumptions) == apart


def test_two_cards_of_a_dump_are_told_apart() -> None:
    dump = (
        "GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-0)\nGPU 1: NVIDIA GeForce RTX 5090 (UUID: GPU-1)"
        "\n\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n"
    )
    assert speeds.PEERS in topology.load(dump).assumptions
    assert speeds.PEERS not in topology.load(dump.replace("5090", "A6000")).assumptions


def test_a_mesh_of_a_model_keeps_its_links() -> None:
    machine = topology.load("mesh-4", gpu="v100")
    assert machine.links == topology.load("mesh-4").links
    assert {device.sm for device in machine.devices} == {70}


def test_rented_machines_compute_as_those_they_are_like() -> None:
    said = linkweave("predict", "resnet50", "2 x Standard_ND96isr_H100_v5", "--policy", "ddp")
    assert "40% of the H100's 494.7" in said


def test_underlines_that_lost_their_escape_do_no_harm() -> None:
    rows = ["\tGPU0\tGPU1\tCPU Affinity", "GPU0\t X \tNV4\t0-7", "GPU1\tNV4\t X \t0-7"]
    plain = topology.load("\n".join(rows) + "\n")
    assert topology.load("\n".join([f"[4m{rows[0]}[0m", *rows[1:]]) + "\n").links == plain.links


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """What a process without torch prints and returns."""
    words = [sys.executable, "-c", f"{NO_TORCH}\n{code}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


NO_TORCH = """
import sys
import builtins
real = builtins.__import__
def without(name, *args, **kwargs):
    if name.split(".")[0] == "torch":
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return real(name, *args, **kwargs)
builtins.__import__ = without
"""


@pytest.mark.parametrize("words", ["train", "gtopk", "convergence", "embedding", "steps"])
def test_a_command_without_torch_says_what_to_install(words: str) -> None:
    done = without_torch(
        f"sys.argv = ['linkweave', 'bench', {words!r}]\n"
        "from linkweave.bench.command.cli import main\nmain()"
    )
    assert done.returncode == 2, done.stderr
    assert "needs torch" in done.stderr and "pip install torch==2.13.0" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_self_test_leaves_torch_out_where_it_is_not() -> None:
    done = without_torch(
        "from linkweave.bench.command import selftest\n"
        "rows = [*selftest.tests(())]\n"
        "need = [row for row in rows if any(w in row.name for w in ('torch', 'training', 'DDP'))]\n"
        "found = [selftest.in_process(row, 60)['state'] for row in need]\n"
        "print(len(rows), found)"
    )
    assert done.stdout == f"8 {['left out: torch is not installed'] * 4}\n", done.stderr


def test_a_name_without_torch_says_what_to_install() -> None:
    last = without_torch("import linkweave\nlinkweave.DataParallel").stderr.splitlines()[-1]
    assert last == "ImportError: linkweave.DataParallel needs torch: pip install torch==2.13.0"
