"""The scripts of docs/howto/recipes.md, under torchrun, where their packages are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = re.findall(r"```py\n(.*?)```", (ROOT / "docs/howto/recipes.md").read_text(), re.DOTALL)
SAID = {
    "accelerate": "2 processes, loss below 5: True", "lightning": "2 processes, linkweave",
    "transformers": "2 processes, linkweave loss below 5: True",
    "torch": "2 processes, loss below 5: True", "tensorboard": "exposed for",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("package", "script"), list(zip(SAID, SCRIPTS, strict=True)), ids=SAID)
def test_a_recipe_trains(package: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    path = tmp_path / "train.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(path)],
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert SAID[package] in done.stdout
