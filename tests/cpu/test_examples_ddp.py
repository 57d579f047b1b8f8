"""The examples in plain PyTorch: training by DDP and FSDP2, decoding by DTensor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_distributed import run
from typer.testing import CliRunner

from linkweave.bench.command.cli import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import ddp  # noqa: E402
import decode  # noqa: E402


@pytest.mark.parametrize(("backend", "words"), [
    pytest.param("linkweave", ["--steps", "60"], marks=pytest.mark.slow),
    pytest.param("gloo", ["--steps", "60"], marks=pytest.mark.slow),
    pytest.param("linkweave", ["--steps", "60", "--parallel", "fsdp"], marks=pytest.mark.slow),
])  # fmt: skip
def test_the_cnn_learns_under_torchrun(backend: str, words: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "examples/ddp.py", "--backend", backend, *words], cwd=ROOT, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"loss \S+, accuracy (\S+)%; all weights equal: True\n", done.stdout)
    assert said and float(said[1]) > 75, done.stdout


def losses(size: int, backend: str, parallel: str, steps: int) -> float:
    """The GPT's loss on held-out text, if all ranks found the same and have equal weights."""
    found = run(size, ddp.train, "gpt", parallel, steps, backend=backend)
    assert [equal for *_, equal in found] == [True] * size, found
    assert len({loss for loss, *_ in found}) == 1
    return float(found[0][0])


@pytest.mark.slow
def test_ddp_learns_the_same_over_linkweave_as_over_gloo() -> None:
    ours, gloo = (losses(4, backend, "ddp", 10) for backend in ("linkweave", "gloo"))
    assert ours == pytest.approx(gloo, rel=1e-5)


def test_fsdp_on_four_ranks_learns_the_same_as_one_process() -> None:
    alone = losses(1, "gloo", "ddp", 20)
    assert losses(4, "linkweave", "fsdp", 20) == pytest.approx(alone, rel=1e-4)
    assert alone < 3  # a guess among all characters costs 4.2


def decoded(rank: int) -> list[float]:
    return decode.measure(width=128, layers=2, tokens=8, rounds=2)  # raises if they differ


def test_ranks_decode_what_one_of_them_decodes_alone() -> None:
    for rates in run(2, decoded):
        assert len(rates) == 2 and min(rates) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [[], ["--fsdp"]])
def test_the_benchmark_prints_and_writes(sharded: list[str], tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    words = [*f"bench ddp -n 2 -s 64K -r 2 --out {out}".split(), *sharded]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["gloo", "linkweave"]
    assert all(min(row["step_ms"], row["compute_ms"], row["alone_ms"]) > 0 for row in rows)
    assert all(row["backend"] in done.output and row["nbytes"] <= 64 << 10 for row in rows)
