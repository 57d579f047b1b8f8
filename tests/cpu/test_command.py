"""The command as a newcomer uses it, and the README's own words."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest

from linkweave import collectives, topology
from linkweave.bench import collectives as collectives_bench
from linkweave.bench import links, peers
from linkweave.bench.command import demo, options
from linkweave.bench.command.options import parse_size, writable
from linkweave.collectives import CollectiveError, Plan, plan_allreduce, plan_collective, verify
from linkweave.collectives.distributed import engine
from linkweave.collectives.distributed.engine import CudaEngine
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.collectives.planning.explain import size_text
from tests.cpu.commands import ROOT, command, command_in_a_process


def test_topo_prints_the_matrix_and_draws(tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    done = command(
        "topo", "dgx1-v100", "--svg", str(svg), "--png", str(png), "--plan", "ccube_dgx1"
    )
    assert done.returncode == 0, done.stderr
    assert str(topology.load("dgx1-v100")) in done.stdout
    assert "tree 1" in svg.read_text() and png.read_bytes().startswith(b"\x89PNG")


def test_topo_json_reads_back() -> None:
    done = command("topo", "pcie-8", "--json")
    assert topology.load(done.stdout) == topology.load("pcie-8")


def test_topo_prints_links_bound_and_bottleneck() -> None:
    lines = command("topo", "dgx1-v100").stdout.splitlines()
    assert "  GPU 0 - GPU 3    NVLink              2 x 25 GB/s = 50 GB/s  5 us" in lines
    assert "plans and bounds use 32 of the 58 directed links" in lines
    assert lines[-4] == (
        "allreduce: at most 85.71 GB/s on the wires = 24/7 links over NVLink; bottleneck: each "
        "GPU's six links"
    )


def test_topo_of_some_gpus_has_their_bound() -> None:
    lines = command("topo", "dgx1-v100", "--gpus", "0-3,7").stdout.splitlines()
    assert lines[0].startswith("dgx1-v100[0,1,2,3,7]: 5 GPUs")
    assert lines[-4].endswith(
        "at most 25 GB/s on the wires = 1 link over NVLink; bottleneck: GPU 7's one link"
    )


def test_topo_compares() -> None:
    same = command("topo", "mesh-4", "--compare", "mesh-4").stdout
    assert same == "mesh-4 is isomorphic to mesh-4, with the GPUs numbered alike\n"
    other = command("topo", "dgx1-p100", "--compare", "dgx1-v100").stdout.splitlines()
    assert other[:3] == [
        "dgx1-p100 and dgx1-v100 are wired differently:",
        "16 NVLinks of 20 GB/s against 0",
        "0 NVLinks of 25 GB/s against 24",
    ]
    assert "  GPU 0 to GPU 3: NV1 against NV2" in other


def test_topo_writes_nccls_form(tmp_path: Path) -> None:
    path = tmp_path / "dgx1.xml"
    assert command("topo", "dgx1-v100", "--xml", str(path)).returncode == 0
    assert topology.load(path).isomorphic_to(topology.load("dgx1-v100"))


def test_bench_links_measures_what_load_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PINGS", 20)  # 2000 take long where ranks outnumber idle cores
    path = tmp_path / "links.json"
    done = command("bench", "links", "-n", "3", "-r", "2", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert "GB/s, row to column" in done.stdout and "all at once" in done.stdout
    pairs = json.loads(path.read_text())["pairs"]
    assert [(p["src"], p["dst"]) for p in pairs] == list(permutations(range(3), 2))
    assert all(p["bandwidth"] > 0 and p["latency_us"] > 0 for p in pairs)
    machine = topology.load("cpu-3", measured=path)
    best = max(p["bandwidth"] for p in pairs if p["src"] == 1)
    assert machine.by_ends[1, "store"].bandwidth == round(best)


def test_doctor_reports() -> None:
    done = command_in_a_process("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["shared memory"]["state"] == checks["peer processes"]["state"] == "ok"
    assert done.returncode == any(c["state"] == "problem" for c in checks.values())
    assert "peer processes   can open" in command("doctor").stdout


def test_plan_json_is_the_verified_plan() -> None:
    done = command("plan", "--topo", "dgx1-p100", "--size", "64M", "--json")
    machine = topology.load("dgx1-p100")
    plan = Plan.from_json(done.stdout)
    verify(plan, machine)
    assert plan == plan_allreduce(machine, 64 << 20)


def test_other_collectives_json_reads_back() -> None:
    done = command("plan", "-c", "alltoall", "-t", "ring-5", "-s", "5K", "--json")
    machine = topology.load("ring-5")
    plan = Plan.from_json(done.stdout)
    verify(plan, machine)
    assert plan == plan_collective("alltoall", machine, 5 << 10)


def test_plan_explains_itself() -> None:
    done = command("plan", "-t", "dgx1-v100", "-s", "8K", "--explain")
    lines = done.stdout.splitlines()
    assert lines[0] == "all-reduce of 8 KiB on dgx1-v100: one_shot"
    assert "start-ups decide" in lines[1] and "24/7 links" in done.stdout
    assert lines[-1].startswith("auto takes one_shot from 1 KiB, ")
    told = json.loads(command("plan", "-t", "mesh-3", "-s", "8K", "--explain", "--json").stdout)
    assert told["auto"] == told["rows"][0]["algorithm"] and "ccube_dgx1" in told["refused"]


def test_a_forced_algorithm_says_what_it_costs() -> None:
    done = command("plan", "-t", "dgx1-v100", "-s", "8K", "--force", "ring")
    assert done.returncode == 0 and "ring" in done.stdout
    assert "ring is predicted to take 6.02 times as long as one_shot" in done.stderr
    assert command("plan", "-t", "dgx1-v100", "-s", "8K").stderr == ""


def test_simulate_lists_all_and_traces_one(tmp_path: Path) -> None:
    done = command("simulate", "--topo", "dgx1-v100", "--size", "1M", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert {"overlapped_double_tree", "double_tree", "ring"} <= {r["algorithm"] for r in rows}
    assert [r["time_us"] for r in rows] == sorted(r["time_us"] for r in rows)
    trace = tmp_path / "t.json"
    done = command("simulate", "-t", "mesh-4", "-s", "64K", "-a", "ring", "--trace", str(trace))
    assert done.returncode == 0 and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("topo dgx9", "unknown machine 'dgx9': no such file, and no such name; did you mean dgx2?"),
        ("topo mesh-0", "must be from 1 to 4096, not 0"),
        ("topo dgx2 --png /nowhere/x.png", "/nowhere/x.png"),
        ("topo dgx2 --png x.jpeg", "x.jpeg"),
        ("topo '{\n oops}'", "topology JSON: line 2 column 2"),
        ("topo dgx2 --gpus 0,x", "--gpus is like 0,1,4-7, not '0,x'"),
        ("topo dgx2 --gpus 3-99", "dgx2 has no GPU 16"),
        ("topo dgx2 --measured none.json", "measured figures: no file 'none.json'"),
        ("topo '2 x dgx2 nics=3'", "nics='3': choose"),
        ("topo --xml x.xml '2 x dgx2'", "an NCCL topology is of one node"),
        ("plan -t mesh-3 -s 1M -k 100000000", "must be an integer from 1 to 65536, not 100000000"),
        ("topo dgx2 --gpu h100", "h100 cannot be the model of the GPUs of dgx2"),
        ("topo dgx2 --tree 2", "--tree draws: give --svg FILE or --png FILE"),
        ("topo dgx2 --png a.svg", "--png writes a file that ends in .png, not a"),
        ("topo dgx2 --tree 0", "--tree draws: give --svg FILE or --png FILE"),
        ("topo dgx2 --png x.png --plan x.json", "neither a file nor an algorithm"),
        ("plan ring-4 --topo dgx2 -s 1K", "is ring-4 or --topo dgx2: give one"),
        ("simulate dgx2 -s 1K --plan x.json -a ring", "leave those out"),
        ("topo dgx2 --png x.png --plan tree --tree 2", "no part 2 to draw"),
        ("bench links -n 1", "-n must be an integer of at least 2, not 1"),
        ("topo cpu-4 --xml x.xml", "cpu-4 has CPU ranks"),
        ("topo dgx2 --plan ring", "--plan draws: give --svg FILE or --png FILE"),
        ("plan -t dgx2 -s -5", "a size is like 1024, 64K, 16M or 1G, not '-5'"),
        ("plan -t dgx2 -s 1M -a rong", "unknown algorithm 'rong' of allreduce; choose from"),
        ("plan -t dgx2 -s 1M -a ccube_dgx1", "dgx2 is wired differently"),
        ("plan -t dgx2 -s 1M -k 0", "--chunks must be an integer from 1 to 65536, not 0"),
        ("bench allreduce -n 9 -t dgx1-v100", "has 8 GPUs, fewer than the 9"),
        ("bench allreduce -f 1", "-f must be an integer of at least 2, not 1"),
        ("reproduce nonsense", "unknown 'nonsense': choose a paper (c-cube, gtop-k"),
        ("simulate -c allgather -t ring-5 -s 1001", "needs 5 equal blocks; 1001 bytes cannot"),
        ("plan -c broadcast -t mesh-4 -s 8 --root 9", "root must be an integer from 0 to 3, not 9"),
        (
            "plan -c broadcast -t mesh-4 -s 1K --explain",
            "--explain is for all-reduce; simulate compares the others",
        ),
        ("demo --epochs 0", "--epochs must be an integer of at least 1, not 0"),
    ],
)
def test_bad_input_is_one_line_and_status_two(words: str, said: str) -> None:
    done = command(*shlex.split(words))
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_an_interrupt_ends_even_what_swallows_exceptions() -> None:
    code = (
        "import os, signal, linkweave.bench.command.cli as cli\n"
        "signal.signal(signal.SIGINT, cli.end_at_once)\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr


def test_version() -> None:
    assert re.fullmatch(r"linkweave \d+\.\d+\.\d+\n", command("--version").stdout)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("topo", ["dgx1-v100", "dgx-b200", "mesh-N", "halving_doubling"]),
        ("plan", ["dgx1-v100", "packed_trees", "reduce_scatter"]),
        ("schedule", ["vgg16", "10GbE", "us-byte", "backward_s"]),
        ("reproduce", ["us-byte", "5 min"]),
        ("bench sparse-allreduce", ["-n, --ranks", "-m, --elements", "30 s"]),
    ],
)
def test_help_names_what_there_is(words: str, named: list[str]) -> None:
    said = " ".join(command(*words.split(), "--help").stdout.split())
    assert [name for name in named if name not in said] == []


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_description_of_a_command_is_cut(words: list[str]) -> None:
    said = command(*words, "--help").stdout
    assert "Commands:" in said and "..." not in said.split("Commands:")[1]


def test_letters_mean_one_thing() -> None:
    for name in ("links", "allreduce", "algorithms", "topk", "sparsify", "coalesce", "queue"):
        lines = command("bench", name, "--help").stdout.splitlines()
        assert all("--ranks" in line for line in lines if line.lstrip().startswith("-n"))
        assert all("Largest" in line for line in lines if line.lstrip().startswith("-e"))


def test_a_plan_is_summed_up_and_its_steps_come_on_request() -> None:
    done = command("plan", "dgx1-v100", "-s", "64M")
    facts = {line[:11].strip(): line[11:] for line in done.stdout.splitlines()}
    assert facts["plan"] == "allreduce of 64 MiB on dgx1-v100"
    assert facts["algorithm"].startswith("packed_trees: auto expects it to be the fastest of 12")
    assert facts["predicted"].startswith("833.0 us, 80.56 GB/s")
    assert facts["bound"].startswith("allreduce: at most 85.71 GB/s")
    assert facts["made of"] == "17 trees, depth 2 to 3, on 34 channels"
    assert facts["detours"] == "none" and facts["chunks"].startswith("1768 of ")
    assert "there is nothing to choose between" in command("plan", "mesh-1", "-s", "1M").stdout
    times = ROOT / "bench/results/algorithms-cpu-8-epyc-2-cores.json"
    known = command("plan", "cpu-8", "-s", "1M", "--measured", str(times)).stdout
    assert ": the fastest by measured times" in known
    steps = command("plan", "-t", "ring-3", "-s", "1K", "-a", "ring", "--steps").stdout
    assert "rank 2 channel 0" in steps
    rings = command("plan", "-t", "ring-5", "-s", "1M", "-a", "ring", "--gpus", "0-4").stdout
    assert "made of    2 rings, on 2 channels" in rings


def test_a_plan_from_a_file_is_verified_simulated_and_drawn(tmp_path: Path) -> None:
    file, png = tmp_path / "plan.json", tmp_path / "a.png"
    file.write_text(command("plan", "-t", "ring-4", "-s", "1M", "-a", "chain", "--json").stdout)
    told = command("simulate", "-t", "ring-4", "-s", "1M", "--plan", str(file), "--json")
    (row,) = json.loads(told.stdout)["rows"]
    named = command("simulate", "-t", "ring-4", "-s", "1M", "-a", "chain", "--json")
    assert row == json.loads(named.stdout)["rows"][0]
    done = command("topo", "ring-4", "--png", str(png), "--plan", str(file), "--tree", "1")
    assert done.returncode == 0 and png.exists()
    wrong = command("simulate", "-t", "ring-5", "-s", "1M", "--plan", str(file))
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "simulate -t dgx1-v100 -s 64M",
        "simulate -t dgx2 -s 8K --gpus 0-3",
        "plan -t dgx1-v100 -s 8K --explain",
        "plan -t 2xmesh-2 -s 64M",
    ],
)
def test_tables_fit_a_hundred_columns(words: str) -> None:
    done = command(*words.split())
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_tables_have_legends() -> None:
    assert "sharing: the most connections" in command(
        "plan", "-t", "mesh-3", "-s", "8K", "--explain"
    ).stdout  # fmt: skip
    assert (
        "busiest link: share of the time" in command("simulate", "-t", "mesh-3", "-s", "8K").stdout
    )


def test_an_error_of_the_command_is_one_line_and_status_two() -> None:
    done = command_in_a_process("topo", "dgx9")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("linkweave: unknown machine 'dgx9'")


def test_sizes() -> None:
    assert [parse_size(t) for t in ("0", "7", "64K", "64kib", "16M", "1GB")] == [
        0, 7, 65536, 65536, 16 << 20, 1 << 30,
    ]  # fmt: skip
    sizes = [size_text(n) for n in (7, 1024, 3 << 20, 1 << 30)]
    assert sizes == ["7 bytes", "1 KiB", "3 MiB", "1 GiB"]
    with pytest.raises(CollectiveError, match="not '1T'"):
        parse_size("1T")


def test_bench_checks_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    kinds = "allreduce", "allgatherv", "alltoallv", "scatter"
    some = [word for kind in kinds for word in ("-c", kind)]
    done = command_in_a_process("bench", "collectives", *some, "-n", "3", "-b", "1K", "-e", "1K",
                                "-r", "1", "--out", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {r["size"] for r in rows} == {1020}  # whole blocks of three ranks
    assert {r["collective"] for r in rows} == {*kinds}
    assert {"linkweave", "linkweave empty", "gloo", "gloo default"} <= {r["library"] for r in rows}
    assert all(r["wrong"] == 0 and r["time_us"] > 0 for r in rows)
    assert "#wrong" in done.stdout and "busbw" in done.stdout
    done = command("bench", "collectives", "-c", "scan")
    assert done.returncode == 2 and "-c 'scan'; choose from allreduce, " in done.stderr


def test_bench_allreduce_is_a_case_of_it(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    words = "bench allreduce -n 2 -b 1K -e 4K -r 1 --no-peers --out"
    assert command(*words.split(), str(out)).returncode == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["collective"] for r in rows} == {"allreduce"}
    assert {r["size"] for r in rows} == {1024, 4096}


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "reduce_scatter", "gather"])
def test_figures_of_gpus_are_what_a_group_reads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rank runs here on CPU tensors beside gloo, which then passes for NCCL."""
    asked = collectives_bench.Settings(2, (4096,), "auto", 1, collectives=(kind,), device="cuda")
    arguments = kind, 4096, asked, str(tmp_path / "store"), "cpu", "gloo"
    rows, none = collectives.spawn(collectives_bench.torch_rank, 2, args=arguments)
    assert [row.library for row in rows] == ["linkweave", "gloo"] and none == []
    assert all(row.wrong == 0 and row.model_us is None for row in rows)
    rows[1] = replace(rows[1], library="nccl", time_us=rows[0].time_us)
    monkeypatch.setattr(engine, "model", lambda: "NVIDIA H100")
    assert str(rows[0]).startswith(f"{kind:14}       4096  linkweave")
    assert "2 GPUs on auto" in collectives_bench.header(asked)
    path = tmp_path / "figures.json"
    path.write_text(options.report(rows, **collectives_bench.about(asked)))
    monkeypatch.setenv("LINKWEAVE_CUDA", str(path))
    found = CudaEngine.choose(2, True)
    assert found.takes(kind, 4096) and not found.takes(kind, 4100)
    if kind == "allreduce":  # --measured takes the same file
        timings = topology.load("mesh-2", path.read_text()).timings
        assert [(t.algorithm, t.nbytes) for t in timings] == [
            (rows[0].algorithm, 4096), ("nccl", 4096)
        ]  # fmt: skip
        assert all(t.seconds == pytest.approx(rows[0].time_us / 1e6) for t in timings)
    else:
        with pytest.raises(topology.TopologyError, match="no all-reduces of linkweave or NCCL"):
            topology.load("mesh-2", path.read_text())


WANTED = {  # of four elements on two ranks: 0 1 2 3 and 1 2 3 4, or 0 1 and 1 2
    "allreduce": [[1, 3, 5, 7]] * 2, "broadcast": [[0, 1, 2, 3]] * 2,
    "reduce": [[1, 3, 5, 7], None], "allgather": [[0, 1, 1, 2]] * 2,
    "reduce_scatter": [[1, 3], [5, 7]], "alltoall": [[0, 1, 1, 2], [2, 3, 3, 4]],
    "gather": [[0, 1, 1, 2], None], "scatter": [[0, 1], [2, 3]],
    "allgatherv": [[0, 1, 2, 1]] * 2, "alltoallv": [[0, 1, 2, 1], [3, 2, 3, 4]],  # parts of 3 and 1
}  # fmt: skip


def test_what_the_benchmark_of_collectives_wants() -> None:
    assert WANTED.keys() == {*peers.KINDS} == {*PUBLIC, "allgatherv", "alltoallv"}
    for kind, rows in WANTED.items():
        for rank, row in enumerate(rows):
            found = peers.wanted(kind, rank, 2, 4)
            assert (found is None) == (row is None)
            assert found is None or found.reshape(-1).tolist() == row, kind
            room = peers.room(kind, 2, 4)
            assert found is None or kind in peers.IN_PLACE or found.shape == room


def test_the_demo_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "POLICIES", ("ddp", "c-cube"))
    monkeypatch.setattr(demo, "STEP_S", 0.2)
    result = demo.run(2, 6, tmp_path)
    assert result["accuracy"] > 0.8
    assert [row["policy"] for row in result["rows"]] == ["ddp", "c-cube"]
    assert [row["chained"] for row in result["chaining"]] == [True, False]
    text = demo.summary(result)
    assert "0 to 8 (4)  streamed" in text and "times faster than unchained, predicted 1.3" in text
    for name in ("dgx1-double-tree.png", "steps.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    folder = tmp_path / "x.png"
    folder.mkdir()
    with pytest.raises(CollectiveError, match=r"--png \S+x.png: Is a directory"):
        writable(png=folder)
    with pytest.raises(CollectiveError, match=r"--xml \S+: there is no folder \S+none"):
        writable(xml=tmp_path / "none" / "x.xml")
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("rows")
    writable(out=kept, trace=new)
    assert kept.read_text() == "rows" and not new.exists()
    done = command("simulate", "dgx1-v100", "--size", "1M", "-a", "ring", "--trace", "none/x.json")
    assert done.returncode == 2 and "--trace none/x.json: there is no folder none" in done.stderr


def test_what_figures_depend_on_is_asked_after_they_are_taken(tmp_path: Path) -> None:
    """It may start CUDA in this process, which then could not fork ranks."""
    order: list[str] = []
    module = SimpleNamespace(HEADER="", LEGEND="")

    def about() -> dict[str, str]:
        order.append("about")
        return {"gpu": "one"}

    out = tmp_path / "x.json"
    options.tell(module, lambda: order.append("rows") or (), out, False, about=about)
    assert order == ["rows", "about"] and json.loads(out.read_text())["gpu"] == "one"
