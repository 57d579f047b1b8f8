"""The structure: imports follow the arrows listed here, planning is light, files stay short, and
retired words do not come back."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("topology", "kernels", "collectives", "bench")


def listed(folder: str, *endings: str) -> list[str]:
    """The files in a folder with one of these endings."""
    paths = (path for ending in endings for path in (ROOT / folder).rglob(f"*.{ending}"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


FILES = sorted(file for folder in FOLDERS for file in listed(folder, "py"))
SOURCES = listed("kernels", "cu", "h")
TESTS = listed("tests", "py", "h", "cpp")
MOST_LINES = 600
MOST_LOOSE = 3
HEAVY = ("torch", "numba", "cupy", "triton", "matplotlib", "networkx")

ARROWS = {"collectives": "topology", "bench": "topology collectives kernels"}
"""Which folders a folder may import."""

ROOMS = {
    "": "errors planning calls cluster launch training",  # its public names
    "overlap": "errors planning",
    "planning": "errors kernels",  # the simulator's loop, compiled
    "foreign": "errors planning",
    "settings": "errors",
    "runtime": "errors planning kernels",  # one table of dtypes
    "runtime.cpu": "errors planning runtime kernels",
    "runtime.gpu": "errors planning runtime runtime.cpu settings kernels",  # ranks meet on the host
    "calls": "errors settings planning runtime runtime.cpu runtime.gpu kernels",
    "launch": "errors settings runtime runtime.cpu runtime.gpu calls",
    "cluster": "errors settings planning overlap runtime runtime.cpu calls kernels",
    "distributed": "errors settings runtime calls cluster kernels",
    "training": "errors planning overlap runtime calls cluster distributed kernels",
}
"""Which rooms a room of `collectives` may import (besides `topology`). "" is its face."""

RETIRED = {
    "place": ("", "position, path, context"),
    "lane": (
        r"topology/(?!speeds)|kernels/|collectives/planning/|collectives/runtime/gpu/"
        r"|tests/null/(?!literal|test_overlap)",
        "width of a launch, strand of a link",
    ),
    "stream": (
        r"collectives/planning/|kernels/plan/timeline|tests/null/|tests/cpu/test_plan_kernel",
        "track",
    ),
    "face": ("", "api"),
}
"""Words that no identifier may contain: where (a pattern of files; all where empty), and what to
write instead."""


def imports(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} has a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room(module: str) -> str:
    """The room of a module of `collectives`; a loose file is its own."""
    parts = module.split(".")[1:]
    if parts[:1] == ["runtime"] and parts[1:2] in (["cpu"], ["gpu"]):
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(file): file for file in FILES}


def targets(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, module of ours) of every import; `tests` and names of our folders without the package
    count as themselves."""
    for line, found in imports(source, file):
        inner = found.removeprefix("linkweave.")
        top = inner.split(".")[0]
        if found.split(".")[0] == "linkweave" and top not in FOLDERS:  # its functions are theirs
            yield line, "collectives"
        elif top in FOLDERS and inner == found:
            yield line, f"bare {top}"
        elif top in (*FOLDERS, "tests"):
            yield line, inner if inner in MODULES else inner.rpartition(".")[0]


def wrong_arrows(source: str, file: str) -> list[str]:
    """Imports that no arrow allows, as `file:line imports module`."""
    home, here = file.split("/")[0], room(module_of(file))
    found = []
    for line, target in targets(source, file):
        top = target.split(".")[0]
        if home == "collectives" and top in ("collectives", "kernels"):
            there = room(target) if top == "collectives" else "kernels"
            fine = here == there or there in ROOMS.get(here, "").split()
        else:
            fine = home == top or top in ARROWS.get(home, "").split()
        if not fine:
            found.append(f"{file}:{line} imports {target}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_arrows(file: str) -> None:
    assert not wrong_arrows((ROOT / file).read_text(), file)


def test_no_arrow_leads_back() -> None:
    """The rooms of `collectives` stand on floors: each imports rooms further down only."""
    below: dict[str, set[str]] = defaultdict(set)
    for here, allowed in ROOMS.items():
        home = here.split(".")[0]
        below[home] |= {there.split(".")[0] for there in allowed.split()} - {home}
    floors: list[set[str]] = []
    left = {*below, *chain.from_iterable(below.values())}
    while left:
        floors.append({room for room in left if not below[room] & left})
        assert floors[-1], f"each of {sorted(left)} imports another one"
        left -= floors[-1]
    assert len(floors) <= 8


def test_every_arrow_is_used() -> None:
    used = set()
    for file in FILES:
        for _, target in targets((ROOT / file).read_text(), file):
            home, top = file.split("/")[0], target.split(".")[0]
            if home == "collectives" and top in ("collectives", "kernels"):
                there = room(target) if top == "collectives" else "kernels"
                used.add((room(module_of(file)), there))
    allowed = {(here, there) for here, every in ROOMS.items() for there in every.split()}
    assert allowed <= used


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("topology/draw.py", "from linkweave.collectives.planning import plan"),
        ("topology/draw.py", "def f():\n    import linkweave.bench.command.cli"),
        ("topology/draw.py", "from topology import load"),
        ("topology/draw.py", "from linkweave import allreduce"),
        ("kernels/api.py", "import linkweave"),
        ("kernels/api.py", "import numpy, linkweave.topology.load"),
        ("kernels/api.py", "from linkweave.collectives import errors"),
        ("collectives/planning/plan.py", "from linkweave.collectives.calls import host"),
        ("collectives/settings.py", "from linkweave.kernels import dtypes"),
        ("collectives/runtime/cpu/arena.py", "if True:\n    from linkweave.bench import timing"),
        ("collectives/runtime/buffer.py", "from linkweave.collectives.runtime.cpu import arena"),
        ("collectives/calls/sparse/gpu.py", "from tests.null import helpers"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, source: str) -> None:
    assert len(wrong_arrows(source, file)) == 1


def cycles(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules from which imports lead back to themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            if (module := todo.pop()) not in seen:
                seen.add(module)
                todo += edges[module]
        return seen

    return sorted(module for module in list(edges) if module in reached(module))


def test_no_imports_lead_back() -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        edges[module_of(file)] |= {t for _, t in targets((ROOT / file).read_text(), file)}
    assert cycles(edges) == []
    assert cycles(defaultdict(set, a={"b"}, b={"c"}, c={"a"}, d={"a"})) == ["a", "b", "c"]


def test_collectives_has_few_loose_files() -> None:
    assert len(list((ROOT / "collectives").glob("*.py"))) <= MOST_LOOSE


@pytest.mark.parametrize(
    "statement",
    [
        "import linkweave",
        "from linkweave import topology",
        "import linkweave.collectives.planning.planner",
        "from linkweave import collectives as c, topology as t; "
        "c.plan_allreduce(t.load('dgx1-v100'), 1 << 20)",
    ],
)
def test_planning_needs_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", [*FILES, *SOURCES])
def test_files_are_short(file: str) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= MOST_LINES


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a Python file defines or assigns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


PROSE = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL)
"""Comments and literals of C++."""


def words_of_code(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every name and keyword in a file of C++ or CUDA."""
    code = PROSE.sub(lambda text: "\n" * text.group().count("\n"), source)
    for line, text in enumerate(code.splitlines(), 1):
        yield from ((line, name) for name in re.findall(r"[A-Za-z_]\w*", text))


def retired(source: str, file: str) -> list[str]:
    """Identifiers that contain a retired word, as `file:line name: write ...`."""
    found = []
    for line, name in identifiers(source) if file.endswith(".py") else words_of_code(source):
        plain = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name).lower().replace("in_place", "")
        words = re.findall(r"[a-z]+", plain)
        for word, (where, instead) in RETIRED.items():
            if {word, f"{word}s"} & {*words} and re.match(where, file):
                found.append(f"{file}:{line} {name}: write {instead}")
    return found


@pytest.mark.parametrize("file", [*FILES, *SOURCES, *TESTS])
def test_retired_words_do_not_come_back(file: str) -> None:
    assert retired((ROOT / file).read_text(), file) == []


def test_a_retired_word_is_seen() -> None:
    source = "class GpuPlace: ...\ndef f(lane): lanes = 1; x.place_of = 2; replace = in_place = 3"
    assert len(retired(source, "kernels/plan/interpreter.py")) == 4
    assert len(retired(source, "collectives/overlap/timeline.py")) == 2
    source = 'int lane;  // a lane\n/* a\nface */ f("lane \\" face", \'"\', place_of(x));'
    assert [found.split()[0] for found in retired(source, "kernels/plan/plan.cu")] == [
        "kernels/plan/plan.cu:1", "kernels/plan/plan.cu:3"
    ]  # fmt: skip
