"""Every algorithm run on CPU ranks, by name and side by side."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import topology
from linkweave.bench.algorithms import Settings, run
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.planning.planner import candidates, choose, plan_allreduce
from tests.cpu.commands import command as linkweave

CPU2 = topology.load("cpu-2")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return linkweave("bench", "algorithms", *words)


def test_it_times_every_algorithm_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    done = command("-n", "2", "-b", "1K", "-e", "4K", "-r", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["format"], report["version"]) == ("linkweave-timings", 1)
    assert report["topology"] == "cpu-2" and report["machine"]["cores"] == os.cpu_count()
    found = {(row["algorithm"], row["nbytes"]): row for row in report["rows"]}
    assert len(found) == len(report["rows"])
    chosen = [(choose(CPU2, nbytes), nbytes) for nbytes in (1024, 4096)]
    assert set(chosen) <= set(found) <= {(a, n) for a in candidates(CPU2) for n in (1024, 4096)}
    for (name, nbytes), row in found.items():
        assert set(row) == {"algorithm", "nbytes", "num_chunks", "seconds"}
        assert row["num_chunks"] == plan_allreduce(CPU2, nbytes, name).num_chunks
        assert 1e-6 < row["seconds"] < 10
    lines = [line.split() for line in done.stdout.splitlines() if " KiB " in line]
    assert [line[:3] for line in lines] == [["1", "KiB", chosen[0][0]], ["4", "KiB", chosen[1][0]]]
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_json_alone_and_no_progress_in_it() -> None:
    done = command("-n", "2", "-b", "8", "-e", "8", "-r", "1", "--json", "--no-sched-batch")
    assert done.returncode == 0, done.stderr
    assert {row["nbytes"] for row in json.loads(done.stdout)["rows"]} == {8}


def test_the_hopeless_are_left_out_but_not_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(machine: topology.Topology, nbytes: int, name: str) -> tuple[float, int]:
        return {"ring": 1.0, "chain": 29.0}.get(name, 31.0), 1

    monkeypatch.setattr("linkweave.bench.algorithms.predict", predict)
    monkeypatch.setattr("linkweave.bench.algorithms.SLOW", float("inf"))  # busy or not
    (row,) = run(Settings(2, (64,), CPU2, rounds=1))
    choice = choose(CPU2, 64)
    assert set(row.timings) == {"ring", "chain", choice} and row.choice == choice
    assert row.ratios[choice] == 1 and row.ratios[row.best] >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1"], "-n must be an integer of at least 2, not 1"),
        (["-r", "0"], "-r must be an integer of at least 1, not 0"),
        (["-f", "1"], "-f must be an integer of at least 2, not 1"),
        (["-b", "4K", "-e", "1K"], "-b 4K and -e 1K: sizes from 4 bytes up, -b not above -e"),
        (["--out", "/nowhere/x.json"], "/nowhere/x.json"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_two(words: list[str], said: str) -> None:
    done = command(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1


def refusal(**kwargs: str) -> str:
    """What the communicator says to an all-reduce asked for with these arguments."""
    try:
        get_default().allreduce(np.ones(3, np.float32), **kwargs)
    except CollectiveError as error:
        return str(error)
    return ""


@on_ranks(3)
def test_an_algorithm_by_name(rank: int) -> None:
    comm = get_default()
    for name in ("auto", *candidates(comm.topology)):
        x, parts = np.full(1001, rank, np.float32), [np.full(n, rank) for n in (3, 1)]
        comm.allreduce(x, algorithm=name)
        comm.allreduce(parts, algorithm=name)
        assert (x == 3).all() and all((p == 3).all() for p in parts), name
    assert "unknown algorithm 'rong'; choose from auto, " in refusal(algorithm="rong")
    assert "ccube_dgx1" in refusal(algorithm="ccube_dgx1")
    assert "calls differ: " in refusal(algorithm="tree" if rank else "ring")
    assert refusal() == ""


@on_ranks(2, order="fixed")
def test_a_fixed_order_refuses_a_name(rank: int) -> None:
    assert "order='fixed' chooses the algorithm" in refusal(algorithm="ring")
    assert refusal() == ""
