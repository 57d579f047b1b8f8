"""The parts of `linkweave reproduce PAPER`, computed one by one and kept.

A run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from linkweave.bench import timing
from linkweave.bench.reproduce import (
    asc_wfbp,
    c_cube,
    c_cube_steps,
    embrace,
    gtopk,
    predictions,
    us_byte,
)
from linkweave.bench.reproduce.rows import Make, Part, part_from
from linkweave.collectives import CollectiveError

PAPERS: dict[str, dict[str, Make]] = {
    "c-cube": {
        "all-reduces": c_cube.communication, "steps": c_cube_steps.training,
        "patterns": c_cube_steps.patterns, "scaling": c_cube.scaling,
        "layers": c_cube_steps.layers, "measurements": c_cube_steps.measurements,
    },
    "gtop-k": {"scaling": gtopk.scaling, "training": gtopk.training,
               "residuals": gtopk.residuals},
    "embrace": {"tables": embrace.tables, "training": embrace.training},
    "asc-wfbp": {"steps": asc_wfbp.steps, "network": asc_wfbp.network},
    "us-byte": {
        "speeds": us_byte.speeds, "orders": us_byte.orders, "analysis": us_byte.analysis,
        "measurements": us_byte.measurements,
    },
    "predictions": {"steps": predictions.steps},
}  # fmt: skip
"""The parts of each paper, by name. A new table is a function here."""
TITLES = {
    "c-cube": "C-Cube: overlapped trees, chained with computation",
    "gtop-k": "gTop-k: sparse gradients along a tree",
    "embrace": "EmbRace: embeddings by all-to-all, in two dimensions",
    "asc-wfbp": "ASC-WFBP: fusion and simultaneous all-reduces",
    "us-byte": "US-Byte: unequal blocks in near-optimal order",
    "predictions": "Predicted steps beside measured ones",
}
SOURCES = Path(__file__).parents[2]
"""The folder of the packages: linkweave's, or the top of a checkout."""


@dataclass(frozen=True)
class Done:
    """A part that was computed, now or by an earlier run."""

    paper: str
    name: str
    part: Part
    seconds: float


def parts_of(papers: Sequence[str]) -> list[tuple[str, str]]:
    """The names of all parts of these papers."""
    return [(paper, name) for paper in papers for name in PAPERS[paper]]


def collect(
    papers: Sequence[str], folder: Path, begins: Callable[[str], None] = lambda name: None
) -> Iterator[Done]:
    """Yield all parts of the papers, and keep each in the folder, once it is there.

    A part of the folder is taken as it is if the sources have not changed since. `begins` is told
    the name of each part.
    """
    if folder.exists() and not folder.is_dir():
        raise CollectiveError(f"--keep must be a folder, not the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    version = sources_hash()
    for paper, name in parts_of(papers):
        begins(f"{paper}: {name}")
        file = folder / f"{paper}-{name}.json"
        if (kept := _kept(file, version)) is not None:
            yield Done(paper, name, *kept)
            continue
        start = time.perf_counter()
        part = PAPERS[paper][name]()
        seconds = time.perf_counter() - start
        data = {"sources": version, "seconds": seconds, "part": asdict(part)}
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(data))
        unfinished.replace(file)
        yield Done(paper, name, part, seconds)


def _kept(file: Path, version: str) -> tuple[Part, float] | None:
    try:
        data = json.loads(file.read_text())
        if data["sources"] == version:
            return part_from(data["part"]), data["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def sources_hash() -> str:
    """A hash of what may change a value: our sources, the recorded results, the processor. Other
    versions of packages change measured times a little, and are not in it."""
    found = hashlib.sha256(str(timing.machine()["cpu"]).encode())
    for name in ("bench", "collectives", "kernels", "topology"):
        for path in sorted((SOURCES / name).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    return found.hexdigest()


def as_json(done: Sequence[Done]) -> str:
    """All parts, each row with its difference."""
    return json.dumps([
        {
            "paper": one.paper, "part": one.name, "seconds": one.seconds,
            **asdict(one.part),
            "rows": [{**asdict(row), "difference": row.difference} for row in one.part.rows],
        }
        for one in done
    ])  # fmt: skip
