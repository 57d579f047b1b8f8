"""`linkweave reproduce schedules`: `auto` for all models, networks and numbers of workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from linkweave.collectives import overlap
from linkweave.collectives.overlap.policies import NAMED

WORKERS = (2, 8, 32, 128)
LIMIT_S = 1.0
TOTAL = len(overlap.models()) * len(overlap.PRESETS) * len(WORKERS)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of `auto`, of the best named policy and of MG-WFBP; shares of the lower bound."""

    model: str
    network: str
    workers: int
    seconds: float
    gap: float
    best: str
    best_seconds: float
    mg_wfbp: float


def rows(done: Callable[[], None] = lambda: None) -> list[Row]:
    found = []
    for name in overlap.models():
        profile = overlap.model(name)
        for preset in overlap.PRESETS:
            for workers in WORKERS:
                network = overlap.network(preset, workers)
                made = {p: overlap.plan(profile, network, p).predicted_seconds for p in NAMED}
                auto = overlap.plan(profile, network, limit_s=LIMIT_S)
                best = min(made, key=lambda policy: made[policy])
                found.append(Row(name, preset, workers, auto.predicted_seconds, auto.gap, best,
                                 made[best], made["mg-wfbp"]))  # fmt: skip
                done()
    return found


def table(found: list[Row]) -> str:
    lines = [f"{'model':18}{'network':14}{'workers':>8}{'auto ms':>11}{'above bound':>13}"
             f"{'best named':>16}{'x':>7}{'MG-WFBP x':>11}"]  # fmt: skip
    for r in found:
        lines.append(
            f"{r.model:18}{r.network:14}{r.workers:8}{r.seconds * 1e3:11.2f}{r.gap:13.1%}"
            f"{r.best:>16}{r.best_seconds / r.seconds:7.2f}{r.mg_wfbp / r.seconds:11.2f}"
        )
    gaps = [r.gap for r in found]
    slower = [r for r in found if r.seconds > r.best_seconds * (1 + 1e-12)]
    far = sum(g > 0.05 for g in gaps)
    lines.append(
        f"\nabove the bound: median {statistics.median(gaps):.1%}, at most {max(gaps):.1%}, more "
        f"than 5 % in {far} of {len(gaps)}; slower than a named policy: {len(slower)}\n"
        "all layer times are synthetic"
    )
    return "\n".join(lines)
