"""The parts of `linkweave reproduce PAPER`, computed one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from linkweave.bench.reproduce import asc_wfbp, c_cube, embrace, gtopk, predictions, us_byte
from linkweave.bench.reproduce.rows import Make, Part

PAPERS: dict[str, dict[str, Make]] = {
    "c-cube": {
        "all-reduces": c_cube.communication, "steps": c_cube.training,
        "patterns": c_cube.patterns, "scaling": c_cube.scaling,
        "layers": c_cube.layers, "measurements": c_cube.measurements,
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


@dataclass(frozen=True)
class Done:
    paper: str
    name: str
    part: Part
    seconds: float


def parts_of(papers: Sequence[str]) -> list[tuple[str, str]]:
    return [(paper, name) for paper in papers for name in PAPERS[paper]]


def collect(
    papers: Sequence[str], begins: Callable[[str], None] = lambda name: None
) -> Iterator[Done]:
    """Yield all parts of the papers; `begins` is told the name of each."""
    for paper, name in parts_of(papers):
        begins(f"{paper}: {name}")
        start = time.perf_counter()
        part = PAPERS[paper][name]()
        yield Done(paper, name, part, time.perf_counter() - start)


def as_json(done: Sequence[Done]) -> str:
    return json.dumps([
        {
            "paper": one.paper, "part": one.name, "seconds": one.seconds,
            **asdict(one.part),
            "rows": [{**asdict(row), "difference": row.difference} for row in one.part.rows],
        }
        for one in done
    ])  # fmt: skip
