"""What is right and what is not, and habits that hang or end their process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cpu.habits import ranks
from tests.cpu.habits.ranks import Outcome, fault, run_all
from tests.cpu.habits.run import HABITS, MODES, Habit, Run

AUTO, MAYBE, CHAINED = MODES["auto"], MODES["auto chained"], MODES["c-cube"]


def outcome(value: float, mean: float = 0.0) -> Outcome:
    weight = torch.tensor([value], dtype=torch.float64)
    return Outcome(parameters={"weight": weight}, means={"loss": torch.tensor(mean)})


def failed(words: str, ours: bool = True) -> Outcome:
    return Outcome(f"CollectiveError: {words}", ours)


def row(**extra: str) -> Habit:
    return Habit("one", lambda run: None, "loops", **extra)  # type: ignore[arg-type]


def test_what_is_equal() -> None:
    alone = outcome(1.0, 0.5)
    assert fault(row(), AUTO, [outcome(1.0, 0.25), outcome(1.0, 0.75)], alone) == ""
    assert fault(row(), AUTO, [outcome(1 + 1e-11, 0.5)] * 2, alone) == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("silent: weight of ranks 0 and 1 differ", [outcome(1.0), outcome(1 + 1e-15)]),
        ("silent: weight differs from one process", [outcome(1 + 1e-9)] * 2),
        ("silent: weight differs from one process", [outcome(float("nan"))] * 2),
        ("silent: the mean of loss", [outcome(1.0), outcome(1.0, 1.0)]),
        ("rank 1: CollectiveError: no", [outcome(1.0), failed("no")]),
        ("rank 0 has []", [Outcome(), outcome(1.0)]),
    ],
)
def test_what_is_not_equal(words: str, found: list[Outcome]) -> None:
    assert words in fault(row(), AUTO, found, outcome(1.0))


def test_errors() -> None:
    right, wrong, foreign = failed("fc.weight"), failed("timeout"), failed("fc.weight", ours=False)
    fine, alone = outcome(1.0), outcome(1.0)
    expected = row(error=r"fc\.weight")
    assert fault(expected, AUTO, [right, wrong], alone) == ""
    assert "no error, where" in fault(expected, AUTO, [fine, fine], alone)
    assert "another error" in fault(expected, AUTO, [wrong, wrong], alone)
    assert "not linkweave's" in fault(expected, AUTO, [right, foreign], alone)
    assert "not all ranks" in fault(expected, AUTO, [right, fine], alone)
    one = Habit("one", lambda run: None, "loops", error="weight", by=1)
    assert fault(one, AUTO, [fine, right], alone) == ""
    assert "another error" in fault(one, AUTO, [right, fine], alone)


def test_errors_of_chained_schedules() -> None:
    right, fine, alone = failed("fc.weight"), outcome(1.0), outcome(1.0)
    chained = row(chained_error=r"fc\.weight")
    assert fault(chained, AUTO, [fine, fine], alone) == ""
    assert "rank 0: CollectiveError: fc.weight" in fault(chained, AUTO, [right, right], alone)
    assert fault(chained, CHAINED, [right, right], alone) == ""
    assert "no error, where" in fault(chained, CHAINED, [fine, fine], alone)
    assert fault(chained, MAYBE, [right, right], alone) == ""
    assert fault(chained, MAYBE, [fine, fine], alone) == ""
    assert "differ" in fault(chained, MAYBE, [outcome(2.0)] * 2, alone)


@pytest.mark.slow  # the others wait for 5 s until their processes are ended
def test_a_hang_or_a_death_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fine(run: Run) -> None:
        run.same("rank", 0)

    def hangs(run: Run) -> None:
        time.sleep(60 * run.rank)

    def dies(run: Run) -> None:
        if run.rank == 0:
            os._exit(3)

    bodies: dict[str, Callable[[Run], None]] = {
        "fine": fine, "hangs": hangs, "also fine": fine, "dies": dies, "still fine": fine
    }  # fmt: skip
    for name, body in bodies.items():
        monkeypatch.setitem(HABITS, name, Habit(name, body, "loops"))
    monkeypatch.setattr(ranks, "DEADLINE", 1.0)
    found = run_all([*bodies], AUTO, 2, 2, tmp_path)
    assert {*found} == {*bodies}
    for name in ("fine", "also fine", "still fine"):
        assert [one.error for one in found[name]] == ["", ""]
    assert "hang" in found["hangs"][1].error
    assert "hangs" in found["hangs"][1].trace
    assert "exited with status 3" in found["dies"][0].error
