"""All habits, by theme: importing this fills the table."""

from __future__ import annotations

from tests.cpu.habits import gradients, layers, loops, modules, optimizers, passes, refused, tools
from tests.cpu.habits.run import HABITS, MODES, Habit

THEMES = {
    loops: "The loop", passes: "Passes", gradients: "Gradients and weights",
    optimizers: "Optimizers",
    modules: "Models", layers: "Layers, inputs and outputs", tools: "Tools", refused: "Refused",
}  # fmt: skip
"""The headings of the files of habits."""


def rows(module: object) -> list[Habit]:
    """Those of a file."""
    name = getattr(module, "__name__", "").rpartition(".")[2]
    return [one for one in HABITS.values() if one.theme == name]


__all__ = ["HABITS", "MODES", "THEMES", "rows"]
