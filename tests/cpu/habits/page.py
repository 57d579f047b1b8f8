"""Writes docs/howto/habits.md, the table of all habits: python -m tests.cpu.habits.page"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.cpu.habits.run import Habit
from tests.cpu.habits.table import HABITS, MODES, THEMES, rows

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "habits.md"
HEAD = """\
# Habits of training loops

<!-- Written by python -m tests.cpu.habits.page -->

After this page you know which habits of PyTorch loops are right with `linkweave.DataParallel`,
and which raise an error.

Each row is a few lines of a loop. A test runs them in one process with the whole batch, and on 2
and 3 ranks with its parts. **equal**: afterwards all ranks have the same bits, and the parameters
of one process within 1e-10 in float64, 1e-5 in float32. **error**: an error that contains these
words. Nothing else passes: no silent difference, no hang.

The columns are kinds of schedules: those that are not chained ({unchained}), chained ones
({chained}), and `GTopK` with a density of 1, in float32. A dash: not tested.

There are {count} habits.
"""
CHAINED = [name for name, mode in MODES.items() if mode.chains != "no"]
UNCHAINED = [n for n, mode in MODES.items() if mode.chains == "no" and n != "gtopk"]
COLUMNS = {"not chained": UNCHAINED, "chained": CHAINED, "GTopK": ["gtopk"]}


def cell(one: Habit, modes: list[str], chained: bool) -> str:
    """What a habit leads to in a column."""
    if not {*modes} & {*one.modes}:
        return "-"
    pattern = one.error or (one.chained_error if chained else "")
    return f"error: {plain(pattern)}" if pattern else "equal"


def plain(pattern: str) -> str:
    """The words of a regular expression, the first of several choices."""
    pattern = re.sub(r"\(([^()]*)\)\?", "", pattern)
    pattern = re.sub(r"\(([^()|]*)(\|[^()]*)?\)", r"\1", pattern).split("|")[0]
    return pattern.replace(".*", " ... ").replace("\\", "")


def lines() -> Iterator[str]:
    named = {name: ", ".join(f"`{mode}`" for mode in modes) for name, modes in COLUMNS.items()}
    yield HEAD.format(count=len(HABITS), unchained=named["not chained"], chained=named["chained"])
    for module, title in THEMES.items():
        yield f"## {title}\n"
        yield f"| habit | {' | '.join(COLUMNS)} | |"
        yield "|---" * (len(COLUMNS) + 2) + "|"
        for one in rows(module):
            cells = [cell(one, modes, name == "chained") for name, modes in COLUMNS.items()]
            yield f"| {one.name} | {' | '.join(cells)} | {one.about} |"
        yield ""


def text() -> str:
    return "\n".join(lines())


if __name__ == "__main__":
    PAGE.write_text(text())
