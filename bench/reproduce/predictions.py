"""Predicted training steps and all-reduces beside measured ones, from all recorded results."""

from __future__ import annotations

from statistics import median

from linkweave.bench.reproduce.measured import Recorded, recorded
from linkweave.bench.reproduce.rows import NETWORK, SLEEPING, Part, Plot, Row, Series

LANES = (
    "steps-resnet50-epyc-2-cores", "steps-vgg16-epyc-2-cores", "steps-bert-base-epyc-2-cores",
    "steps-gtopk-resnet50-epyc-2-cores", "steps-gtopk-vgg16-epyc-2-cores",
    "steps-embedding-bert-base-epyc-2-cores",
)  # fmt: skip
"""Layers that sleep and all-reduces on throttled lanes."""
HOSTS = ("embedding-131072-4-hosts-1gbit", "embedding-12605-4-hosts-1gbit")
"""Real training on hosts that are namespaces, all on two cores."""
ALLREDUCES = ("network-4x2-1gbit", "network-4x2-10gbit")
LARGE = 16 << 20
"""Bytes from which bandwidth, not waiting for a turn on the shared cores, takes the time."""


def pairs(found: Recorded) -> list[tuple[float, float]]:
    """(predicted, measured) in ms of each row that has both."""
    if found.name in ALLREDUCES:
        return [
            (1e3 * r["predicted"], 1e3 * r["seconds"])
            for r in found.rows
            if r["nbytes"] >= LARGE and (r["collective"], r["op"]) == ("allreduce", "sum")
        ]
    measured = "step_ms" if found.name in HOSTS else "measured_ms"
    return [(r["predicted_ms"], r[measured]) for r in found.rows if r["predicted_ms"]]


def errors(points: list[tuple[float, float]]) -> list[float]:
    return [100 * abs(predicted / measured - 1) for predicted, measured in points]


def steps() -> Part:
    """Errors of each file and of all steps, and all of them in one plot."""
    rows, series, every = [], [], []
    kinds = (
        (LANES, SLEEPING, ""),
        (HOSTS, NETWORK, "real layers on hosts that share two cores, which slow each other down"),
        (ALLREDUCES, NETWORK, "all-reduces of 16 MB or more"),
    )
    for names, how, words in kinds:
        for name in names:
            found = recorded(name)
            points = pairs(found)
            short = name.removesuffix("-epyc-2-cores").removeprefix("steps-")
            if names is not ALLREDUCES:
                every += points
            rows.append(Row(
                "steps" if names is not ALLREDUCES else "all-reduces",
                f"{short}: median error of {len(points)}", None,
                median(errors(points)), f"{how}, {found.where}", "%", words, name,
            ))  # fmt: skip
            series.append(Series(short, *map(tuple, zip(*points, strict=True))))
    rows.insert(
        0,
        Row(
            "steps",
            f"median error of all {len(every)} steps, at most",
            5.0,
            median(errors(every)),
            f"{SLEEPING} and on hosts",
            "%",
        ),
    )
    plot = Plot(
        "Predicted and measured times", "Steps of all policies and models, and all-reduces between "
        "hosts; on the dotted line both are equal.", "predicted ms", "measured ms", tuple(series),
        "scatter", log="xy", diagonal=True,
    )  # fmt: skip
    return Part(tuple(rows), (plot,))
