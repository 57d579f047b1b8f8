"""The backend on other versions of torch, whose CUDA builds a machine without a GPU runs too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
RUN = """
import tempfile
import numpy, torch, torch.distributed as dist
import linkweave
from linkweave import collectives


def rank_of(rank):
    linkweave.allreduce(x := torch.ones(3))
    return x.tolist()


print(collectives.spawn(rank_of, 2))
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("linkweave", init_method=f"file://{file.name}", rank=0, world_size=1)
"""

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Python]:
    """Runs an interpreter that has this version of torch, of some 6 GB."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    own = [word for word in requires("linkweave") or () if "extra ==" not in word]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "venv/bin/python", *words], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    tests = ["pytest", "pytest-timeout", "hypothesis", "expecttest", "scikit-learn"]
    done = run("-m", "pip", "install", "--quiet", f"torch=={request.param}", *own, *tests)
    assert done.returncode == 0, done.stderr
    yield run
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("python", ["2.14.1"], indirect=True)
def test_a_later_version_passes_the_tests_of_the_backend(python: Python) -> None:
    which = "not registers_itself"  # for that the package is installed
    files = [
        "tests/cpu/test_distributed.py",
        "tests/cpu/test_fake_cuda.py",
        "tests/cpu/test_fake_training.py",
    ]
    words = ["-q", "-m", "not slow", "-k", which, *files]
    done = python("-m", "pytest", *words)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("python", ["2.9.1"], indirect=True)
def test_an_older_version_is_refused_by_the_backend_alone(python: Python) -> None:
    done = python("-c", RUN)
    assert "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]" in done.stdout
    assert "2.9.1" in done.stderr and "2.13" in done.stderr, done.stderr


@pytest.mark.parametrize("python", ["2.10.0"], indirect=True)
def test_the_version_for_older_gpus_trains(python: Python) -> None:
    """By schedules and exchanges whose collectives had other names in torch."""
    files = ["transports", "training", "gtopk_training", "embedding_training", "gtopk_hook"]
    words = ["-q", "-m", "not slow", *(f"tests/cpu/test_{name}.py" for name in files)]
    done = python("-m", "pytest", *words)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("extra", "cuda", "gpus"), [("cuda12", "12.8", 70), ("cuda13", "13.0", 75)]
)
def test_the_packages_for_gpus_fit_each_other(
    extra: str, cuda: str, gpus: int, tmp_path: Path
) -> None:
    """pip finds a set of them, of one CUDA, and its torch has code for the GPUs of the docs."""
    pip, report = [sys.executable, "-m", "pip"], tmp_path / "report.json"
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
    subprocess.run([*pip, "install", *options, f".[{extra}]"], cwd=ROOT, check=True)
    rows = [row["metadata"] for row in json.loads(report.read_text())["install"]]
    found = {row["name"]: row["version"] for row in rows}
    assert found["cuda-toolkit"].startswith(cuda), found
    triton = tuple(map(int, found["triton"].split(".")[:2]))
    assert (3, 6) <= triton <= (3, 8), found
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(tmp_path)]
    subprocess.run([*pip, *words, f"torch=={found['torch']}"], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("torch-*.whl"))) as wheel:
        flags = re.search(rb"sm_\d+( sm_\d+)+", wheel.read("torch/lib/libtorch_python.so"))
    assert flags is not None  # what torch._C._cuda_getArchFlags() returns
    codes = [int(word[3:]) for word in flags[0].decode().split()]
    assert min(codes) == gpus and {80, 90, 100, 120} <= {*codes}
