"""The house: imports go one way, planning is light, and files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("topology", "kernels", "collectives", "bench")
FILES = sorted(
    path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*.py")
)
MAY_USE_KERNELS = ("collectives/runtime/", "collectives/sparse/")
MOST_LINES = 400
HEAVY = ("torch", "numba", "cupy", "triton", "matplotlib", "networkx")


def imports(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands in the file."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def wrong_arrows(source: str, file: str) -> list[str]:
    """Imports that point the wrong way, as `file:line imports module`."""
    home = file.split("/")[0]
    allowed = {
        "topology": {"topology"},
        "kernels": {"kernels"},
        "collectives": {"collectives", "topology"},
        "bench": set(FOLDERS),
    }[home]
    if file.startswith(MAY_USE_KERNELS):
        allowed = allowed | {"kernels"}
    forbidden = {*FOLDERS, "tests"} - allowed
    return [
        f"{file}:{line} imports {module}"
        for line, module in imports(source, file)
        if module.split(".")[0] in forbidden
    ]


def test_the_folders_are_there() -> None:
    assert {"topology", "collectives"} <= {file.split("/")[0] for file in FILES}
    assert "collectives/planning/planner.py" in FILES


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file: str) -> None:
    assert not wrong_arrows((ROOT / file).read_text(), file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("topology/draw.py", "from collectives.planning import plan"),
        ("topology/draw.py", "def f():\n    import bench.cli"),
        ("kernels/cpu.py", "import numpy, topology"),
        ("kernels/cpu.py", "from collectives import errors"),
        ("collectives/planning/plan.py", "import kernels.cpu as cpu"),
        ("collectives/communicator.py", "from kernels import cpu"),
        ("collectives/runtime/shm.py", "if True:\n    from bench.timing import median"),
        ("collectives/sparse/gtopk.py", "from tests.null import helpers"),
        ("collectives/planning/plan.py", "from ...kernels import cpu"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, source: str) -> None:
    assert len(wrong_arrows(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("topology/draw.py", "from topology.graph import Link\nimport json"),
        ("collectives/runtime/shm.py", "from kernels import cpu\nfrom topology import load"),
        ("collectives/sparse/gtopk.py", "import kernels"),
        ("collectives/planning/plan.py", "from . import trees\nfrom ..errors import PlanError"),
        ("bench/cli.py", "import collectives, kernels, topology, bench.timing"),
    ],
)
def test_a_right_arrow_passes(file: str, source: str) -> None:
    assert not wrong_arrows(source, file)


@pytest.mark.parametrize(
    "statement",
    [
        "import topology",
        "import collectives.planning.planner",
        "import collectives.planning.planner as p, topology as t; "
        "p.plan_allreduce(t.load('dgx1-v100'), 1 << 20)",
    ],
)
def test_planning_needs_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", FILES)
def test_files_are_short(file: str) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= MOST_LINES
