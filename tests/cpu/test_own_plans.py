"""Plans and algorithms of a user's own, and plans that are kept for later processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linkweave import collectives
from linkweave.collectives import Plan, PlanError, plan_allreduce, plan_collective
from linkweave.collectives.calls import plans
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.calls.plans import PlanStore
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.runtime import reference
from linkweave.topology import Topology, load
from tests.cpu.helpers import error_of, values

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import own_algorithm  # noqa: E402


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert own_algorithm.main() == [(6.0, 1.5)] * 4
    assert "GB/s on mesh-64, simulated" in capsys.readouterr().out


def test_a_function_goes_where_a_name_goes() -> None:
    machine = load("mesh-5")
    plan = plan_allreduce(machine, 1 << 20, own_algorithm.line)
    assert plan.algorithm == "line" and collectives.simulate(plan, machine, 1 << 20).seconds > 0
    found = collectives.explain(machine, 1 << 20, algorithms=[own_algorithm.line, "ring"])
    assert sorted(row.algorithm for row in found.rows) == sorted({"line", "ring", found.choice})
    with pytest.raises(PlanError, match="must return an Algorithm, not int"):
        plan_allreduce(machine, 1, lambda topology: 3)  # type: ignore[arg-type,return-value]


def run_them(rank: int, plans: list[str], sizes: list[int]) -> list[bytes]:
    found = []
    for text in plans:
        plan = Plan.from_json(text)
        for n in sizes:
            for _ in range(2):
                x = values(rank, n)
                collectives.run(plan, x)
                found.append(x.tobytes())
    return found


def test_a_plan_runs_as_the_reference_says() -> None:
    machine, sizes = load("ring-5"), [0, 1, 17, 5000]
    plans = [plan_allreduce(machine, 20_000, name, 10) for name in ("ring", "chain", "one_shot")]
    got = collectives.spawn(run_them, 5, machine, ([p.to_json() for p in plans], sizes))
    want = []
    for plan in plans:
        for n in sizes:
            want += [reference.run(plan, [values(r, n) for r in range(5)])[0].tobytes()] * 2
    assert all(found == want for found in got)


def long_message(rank: int, text: str) -> list[float]:
    """Chunks that would not fit the slots."""
    x = np.full(1_000_000, rank, np.float32)
    collectives.run(Plan.from_json(text), x, "avg")
    return [float(x.min()), float(x.max())]


def test_chunks_that_do_not_fit_are_cut() -> None:
    text = plan_allreduce(load("cpu-3"), 64, "two_shot", 3).to_json()
    assert collectives.spawn(long_message, 3, args=(text,)) == [[1.0, 1.0]] * 3


def wrong_ones(rank: int) -> list[str]:
    comm = get_default()
    x = np.ones(100, np.float32)
    good = plan_allreduce(load("cpu-2"), 400, "tree", 2)
    shared = plan_collective("allgather", load("cpu-2"), 400)
    bad = replace(good, tracks=good.tracks[:1])
    other = good.with_chunks(2 * good.num_chunks) if rank else good
    said = [
        error_of(comm.run, bad, x), error_of(comm.run, other, x), error_of(comm.run, "tree", x),
        error_of(comm.run, shared, x),
        error_of(comm.run, plan_allreduce(load("cpu-3"), 400), x),
        error_of(comm.allreduce, x, algorithm=lambda topology: 3),
        error_of(comm.allreduce, x, algorithm=7),
    ]  # fmt: skip
    assert (x == 1).all()
    comm.run(good, x)
    assert (x == 2).all()
    return said


def test_wrong_plans_are_refused_on_every_rank() -> None:
    first, second = collectives.spawn(wrong_ones, 2)
    assert first[0] == second[0] and "PlanError" not in first[0] and first[0]
    assert "own algorithm" in first[1] and first[1] == second[1]
    assert "a Plan is needed, not str" in first[2]
    assert "run carries out allreduce, broadcast, reduce, not plans of allgather" in first[3]
    assert "the plan is for 3 ranks; there are 2" in first[4]
    assert "must return an Algorithm" in first[5] and first[5] == second[5]
    assert "algorithm must be a name or a function" in first[6]


def other_functions(rank: int) -> str:
    def here(topology: Topology) -> Algorithm:
        return own_algorithm.line(topology)

    def there(topology: Topology) -> Algorithm:
        print()
        return own_algorithm.line(topology)

    return error_of(collectives.allreduce, np.ones(9), algorithm=(here, there)[rank])


def test_functions_that_differ_are_noticed() -> None:
    assert all("differs" in said for said in collectives.spawn(other_functions, 2))


# ---- kept on disk --------------------------------------------------------------------------------
def first_call(rank: int) -> list[Any]:
    comm: Any = get_default()
    x = np.full(70_000, rank, np.float32)
    comm.allreduce(x)
    plans = comm._calls._plans
    return [float(x[-1]), bool(plans._encoded)]


def test_plans_that_took_long_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linkweave.collectives.calls.plans.LONG", 0.0)
    machine = load("mesh-3")
    assert any(planned for _, planned in collectives.spawn(first_call, 3, machine))
    again = collectives.spawn(first_call, 3, machine)
    assert again == [[3.0, False]] * 3


def test_what_is_kept_is_whole_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_folder", lambda: tmp_path)
    store = PlanStore("a map")
    assert store.read("q") is None
    store.write("q", b"an answer")
    assert store.read("q") == b"an answer" and PlanStore("another").read("q") is None
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert store.read("q") is None
    monkeypatch.setattr(plans, "_MOST_FILES", 2)
    for i in range(9):
        store.write(i, b"x")
    assert len(list(tmp_path.iterdir())) <= 4
    monkeypatch.setattr(plans, "_folder", lambda: tmp_path / "gone")
    store.write("q", b"nowhere")
    assert store.read("q") is None


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from linkweave.collectives.calls.plans import _folder; print(_folder())"
    (tmp_path / "linkweave").mkdir(mode=0o700)
    for mode, said in ((0o700, str(tmp_path / "linkweave" / "plans")), (0o777, "None")):
        (tmp_path / "linkweave").chmod(mode)
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        assert run_python(script, env) == said


def run_python(script: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
