"""Habits of PyTorch training loops: on ranks they lead to what they lead to in one process, or to
an error that says why not. Each runs in several modes, all of a mode on the same ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.habits.page import PAGE, text
from tests.cpu.habits.ranks import Outcome, fault, run_all
from tests.cpu.habits.run import Mode
from tests.cpu.habits.table import HABITS, MODES

SIZES = (2, 3)
ROWS = [
    pytest.param(
        size, name, mode,
        marks=[] if size == 2 and mode in one.quick else pytest.mark.slow,
        id=f"{name}-{mode}-{size}",
    )
    for size in SIZES for mode in MODES for name, one in HABITS.items() if mode in one.modes
]  # fmt: skip


class Outcomes:
    """What all habits that a session has chosen led to; each mode runs once."""

    def __init__(self, chosen: set[tuple[int, str, str]], folder: Path) -> None:
        self._chosen, self._folder = chosen, folder
        self._alone: dict[tuple[int, torch.dtype], dict[str, Outcome]] = {}
        self._ranks: dict[tuple[int, str], dict[str, list[Outcome]]] = {}

    def alone(self, size: int, name: str, mode: Mode) -> Outcome:
        key = size, mode.dtype
        if key not in self._alone:
            of_dtype = {m.name for m in MODES.values() if m.dtype == mode.dtype}
            named = {n for s, n, m in self._chosen if s == size and m in of_dtype}
            found = self._run(named, mode, 1, size)
            self._alone[key] = {n: one for n, (one,) in found.items()}
        return self._alone[key][name]

    def ranks(self, size: int, name: str, mode: Mode) -> list[Outcome]:
        key = size, mode.name
        if key not in self._ranks:
            named = {n for s, n, m in self._chosen if (s, m) == key}
            self._ranks[key] = self._run(named, mode, size, size)
        return self._ranks[key][name]

    def _run(self, named: set[str], mode: Mode, size: int, ranks: int) -> dict[str, list[Outcome]]:
        folder = self._folder / f"{size} for {ranks}, {mode.name}"
        folder.mkdir()
        return run_all([n for n in HABITS if n in named], mode, size, ranks, folder)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    chosen = {
        (given["size"], given["name"], given["mode"])
        for item in request.session.items
        if item.path == request.path
        and (given := getattr(item, "callspec", None) and item.callspec.params)
    }
    return Outcomes(chosen, tmp_path_factory.mktemp("habits"))


@pytest.mark.timeout(1800)  # the first test of a mode runs all of its habits
@pytest.mark.parametrize(("size", "name", "mode"), ROWS)
def test_a_habit(size: int, name: str, mode: str, outcomes: Outcomes, record_property: Any) -> None:
    one = HABITS[name]
    alone = outcomes.alone(size, name, MODES[mode])
    ranks = outcomes.ranks(size, name, MODES[mode])
    record_property("chained", any(outcome.chained for outcome in ranks))
    wrong = fault(one, MODES[mode], ranks, alone)
    assert not wrong, wrong


def test_the_page_has_all_habits() -> None:
    """Write it anew by `python -m tests.cpu.habits.page`."""
    assert PAGE.read_text() == text()


def test_errors_are_explained() -> None:
    for one in HABITS.values():
        assert one.about or not (one.error or one.chained_error), one.name
