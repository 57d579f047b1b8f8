"""`linkweave bench embedding` and `bench steps --tokens`: predictions, batches, the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from linkweave.bench.training import sleeping_embedding
from linkweave.bench.training.embedding import batches_of, measure
from linkweave.bench.training.sleeping_embedding import step_seconds
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import Communication, Layer, Network, Piece, Profile, Schedule

ROOT = Path(__file__).parents[2]
ROWS = {"tokens": 1.0, "lookup": 3.0, "prior": 2.0, "delayed": 4.0}
PROFILE = Profile((Layer("a", 10, 5.0, 7.0), Layer("b", 20, 6.0, 8.0)))


def schedule(pace: float, chained: bool) -> Schedule:
    sends = tuple(Communication((Piece(i, 0, PROFILE.layers[i].nbytes),)) for i in (1, 0))
    return Schedule("wfbp", PROFILE, Network(0.0, pace, workers=2), sends, chained)


def test_steps_that_only_compute_and_exchange_rows() -> None:
    free = schedule(0.0, chained=False)
    # tokens, lookup, passes of both layers, prior rows
    assert step_seconds(free, ROWS, prefetched=False) == 1 + 3 + 26 + 2
    # tokens leave beside the forward pass, delayed rows beside the next one
    assert step_seconds(free, ROWS, prefetched=True) == 26 + 2 + 3


def test_rows_leave_before_dense_gradients_that_wait() -> None:
    # b's gradients leave beside the backward pass of a, and those of a after prior rows and lookups
    assert step_seconds(schedule(0.25, chained=False), ROWS, prefetched=True) == 26 + 2 + 3 + 2.5
    # the forward pass of a waits for a's gradients alone
    assert step_seconds(schedule(0.35, chained=True), ROWS, prefetched=True) == 26 + 2 + 3 + 3.5


def test_batches_are_text_in_its_order() -> None:
    words = np.arange(100, dtype=np.int64) % 50
    found = [list(islice(batches_of(words, 50, 2, 5, rank, 2), 5)) for rank in (0, 1)]
    first, target = found[0][0]
    assert first.tolist() == [[0, 1, 2, 3, 4], [25, 26, 27, 28, 29]]
    assert target.tolist() == [1, 2, 3, 4, 5, 26, 27, 28, 29, 30]
    assert found[1][0][0].tolist() == [[0, 1, 2, 3, 4], [25, 26, 27, 28, 29]]  # words 50, 75
    assert [x[0, 0].item() for x, _ in found[0]] == [0, 5, 10, 15, 0]
    hashed, _ = next(batches_of(words, 1000, 1, 99, 0, 1))
    assert hashed.min() >= 0 and 50 < hashed.max() < 1000
    assert hashed[0, 10] == hashed[0, 60]  # the same pair of words


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(CollectiveError, match="--embedding must be one of DDP, dense; DDP, sparse"):
        measure(None, 1, 1, 1, True, ("rows",))


def test_sleeping_layers_behind_an_embedding() -> None:
    layers = tuple(Layer(name, 64, 0.01, 0.02) for name in "ab")
    plan = overlap.plan(Profile(layers), Network(1e-3, 1e-8, workers=2), "wfbp")
    off, on = sleeping_embedding.rows([plan], 2, 2, 300)
    assert (off.prefetched, on.prefetched) == (False, True)
    # the same rows in one part or two, and a start-up more
    assert off.row_ms["lookup"] > 0 and off.row_ms["delayed"] == 0 < on.row_ms["delayed"]
    assert on.row_ms["prior"] < off.row_ms["prior"]
    assert on.predicted_ms < off.predicted_ms
    for row in (off, on):
        seconds = {name: ms / 1e3 for name, ms in row.row_ms.items()}
        assert row.predicted_ms == pytest.approx(1e3 * step_seconds(plan, seconds, row.prefetched))
        assert row.measured_ms > 0


@pytest.mark.slow
def test_bench_embedding(tmp_path: Path) -> None:
    text = "In the beginning God created the heaven and the earth."
    package = tmp_path / "bible"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    verses = [{"chapter": n, "text": text} for n in range(1, 40)]
    (package / "data/kjv.jsonl").write_text("\n".join(map(json.dumps, verses)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
         "linkweave", "bench", "embedding", "-r", "1", "--rows", "1000", "--length", "4",
         "--batch", "2", "--json"],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["embedding"] for row in rows] == [
        "DDP, dense", "DDP, sparse=True", "columns, FIFO", "columns, 2D"
    ]  # fmt: skip
    assert len({f"{row['loss']:.4f}" for row in rows}) == 1
    assert [row["predicted_ms"] is None for row in rows] == [True, True, False, False]
