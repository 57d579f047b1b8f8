"""`linkweave reproduce schedules`: `auto` on all models, networks and worker counts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from linkweave.bench.command import options
from linkweave.collectives import overlap
from linkweave.collectives.overlap.policies import NAMED

WORKERS = (2, 8, 32, 128)
LIMIT_S = 1.0
TOTAL = len(overlap.models()) * len(overlap.PRESETS) * len(WORKERS)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    network: str
    workers: int
    seconds: float
    gap: float
    best: str
    best_seconds: float
    mg_wfbp: float


def rows() -> Iterator[Row]:
    for name, preset, workers in product(overlap.models(), overlap.PRESETS, WORKERS):
        profile, network = overlap.model(name), overlap.network(preset, workers)
        made = {p: overlap.plan(profile, network, p).predicted_seconds for p in NAMED}
        auto = overlap.plan(profile, network, limit_s=LIMIT_S)
        best = min(made, key=made.__getitem__)
        yield Row(name, preset, workers, auto.predicted_seconds, auto.gap, best, made[best],
                  made["mg-wfbp"])  # fmt: skip


def table(found: list[Row]) -> str:
    rows = [
        (r.model, r.network, r.workers, f"{r.seconds * 1e3:.2f}", f"{r.gap:.1%}", r.best,
         f"{r.best_seconds / r.seconds:.2f}", f"{r.mg_wfbp / r.seconds:.2f}")
        for r in found
    ]  # fmt: skip
    heads = ("model", "network", "workers", "auto ms", "above bound", "best named", "x auto",
             "MG-WFBP x auto")  # fmt: skip
    gaps = [r.gap for r in found]
    slower = [r for r in found if r.seconds > r.best_seconds * (1 + 1e-12)]
    far = sum(g > 0.05 for g in gaps)
    return (
        f"{options.table(heads, rows, (0, 1, 5))}\n\nabove the bound: median "
        f"{statistics.median(gaps):.1%}, at most {max(gaps):.1%}, more than 5 % in {far} of "
        f"{len(gaps)}; slower than a named policy: {len(slower)}\nall layer times are synthetic"
    )
