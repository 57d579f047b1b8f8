"""Ranks that are started from a notebook, and from programs that are no files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HELLO = """\
import numpy as np
import linkweave
SCALE = 10

class Answer:
    def __init__(self, value):
        self.value = value

def work(rank, more):
    x = np.full(4, rank + more, np.float32)
    linkweave.allreduce(x)
    return Answer(float(SCALE * x.sum()))
"""


def run(*cells: str) -> list[str]:
    """What each cell prints or shows."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    done = NotebookClient(book, timeout=120, kernel_name="python3").execute()
    return [
        "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "")
                for out in cell["outputs"])
        for cell in done["cells"]
    ]  # fmt: skip


def test_the_recipe_runs() -> None:
    page = Path(__file__).parents[2] / "docs/howto/recipes.md"
    (cells,) = re.findall(r"```ipython\n(.*?)```", page.read_text(), re.DOTALL)
    found, plan = run(*cells.split("# %%\n"))[1:]
    assert found and f"shows `{found}`" in page.read_text() and plan.startswith("<Plan: allreduce")


def test_a_notebook_starts_ranks() -> None:
    told = run(
        HELLO, "[one.value for one in linkweave.spawn(work, 3, args=(1,))]",
        "print([type(one) is Answer for one in linkweave.spawn(work, 2, args=(0,))])",
    )  # fmt: skip
    assert told[1] == "[240.0, 240.0, 240.0]"
    assert "True" in told[2] and "False" not in told[2]


def test_an_error_in_a_notebook_names_its_rank() -> None:
    with pytest.raises(CellExecutionError, match="rank 1"):
        run(HELLO, "def bad(rank):\n    return 1 / (1 - rank)\nlinkweave.spawn(bad, 2)")


def test_a_notebooks_own_error_arrives_as_it_is() -> None:
    told = run(
        HELLO + "class Mine(Exception):\n    pass\n",
        "def bad(rank):\n    raise Mine('no')\n"
        "try:\n    linkweave.spawn(bad, 2)\nexcept Mine as error:\n    print(type(error), error)",
        "import threading\ntry:\n    linkweave.spawn(work, 2, args=(threading.Lock(),))\n"
        "except linkweave.CollectiveError as error:\n    print(error)",
    )
    assert told[1] == "<class '__main__.Mine'> no\n"
    assert told[2].startswith("ranks of a notebook get what they run by value, which this is not:")


def test_a_program_without_a_file_that_runs_threads() -> None:
    program = HELLO + (
        "import threading\n"
        "event = threading.Event()\n"
        "threading.Thread(target=event.wait, daemon=True).start()\n"
        "print([one.value for one in linkweave.spawn(work, 2, args=(1,))])\n"
    )
    for how in (["-c", program], ["-"]):
        done = subprocess.run(
            [sys.executable, *how], input=program, capture_output=True, text=True, timeout=120
        )
        assert done.stdout == "[120.0, 120.0]\n", done.stderr
