"""The benchmarks of sparse kernels, small: they check, measure, print and write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from linkweave import kernels
from linkweave.bench.command.cli import app
from linkweave.bench.sparse import topk
from linkweave.collectives import CollectiveError

CASES = {
    "topk": ("topk -m 200000 --density 0.01 -r 1", ["linkweave", "torch.topk", "numpy.partition"]),
    "sparsify": ("sparsify -m 200000 -j 2 -r 1", ["linkweave", "torch, call by call"]),
    "coalesce": ("coalesce -m 5000 -w 8 -v 300 -r 1", ["linkweave", "torch"]),
    "sparse-allreduce": (
        "sparse-allreduce -n 3 -m 50000 -r 1",
        ["linkweave", "gtopk with selection", "all-gather and sum", "linkweave, dense",
         "gloo, dense"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_printed_and_written(name: str, tmp_path: Path) -> None:
    words, wanted = CASES[name]
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench", *words.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["implementation"] for row in rows] == wanted
    assert rows[0]["times_ours"] == 1 and all(row["ms"] > 0 for row in rows)
    assert all(row["implementation"] in done.output for row in rows)
    assert "x ours: its time over" in done.output


@pytest.mark.parametrize("name", CASES)
def test_without_torch_our_rows_stand_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, wanted = CASES[name]
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(app, ["bench", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    ours = [name for name in wanted if "torch" not in name and "gloo" not in name]
    assert [row["implementation"] for row in rows] == ours
    assert "torch is not installed" in done.stderr and "pip install torch==" in done.stderr


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.topk_abs

    def wrong(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        values, indices = right(x, k)
        return values, np.roll(indices, 1)

    monkeypatch.setattr(kernels, "topk_abs", wrong)
    with pytest.raises(CollectiveError, match=r"^topk_abs is wrong$"):
        list(topk(10_000, 0.01, 1, 1))


@pytest.mark.parametrize("words", ["topk --density 0", "sparsify -m 0", "coalesce -r 0"])
def test_what_makes_no_sense_is_refused(words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words.split()])
    assert done.exit_code != 0
