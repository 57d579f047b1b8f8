"""Draws the pictures of the documentation: python docs/pictures/draw.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import linkweave
from linkweave import overlap, topology
from linkweave.bench import gantt

HERE = Path(__file__).parent
INK, LINE, FILLS = "#1a1a1a", "#555555", ("#dbe9f6", "#fde6cf", "#dcefdc")


def trees() -> None:
    machine = topology.load("dgx1-v100")
    plan = linkweave.plan_allreduce(machine, 1 << 26, "overlapped_double_tree")
    topology.draw(machine, [HERE / "dgx1-trees.png"], plan)


def steps() -> None:
    """DDP's step beside chained ones, where communication takes as long as computation."""
    profile = overlap.model_at("resnet50", 16, 6.28e12)
    network = overlap.Network.from_topology(topology.load("dgx1-v100"), "overlapped_double_tree")
    slow = overlap.Network.from_measurements(
        [(one.nbytes, 25 * one.seconds) for one in network.timings], network.workers
    )
    made = [overlap.plan(profile, slow, name) for name in ("ddp", "us-byte", "c-cube")]
    gantt.draw([gantt.predicted(one) for one in made], HERE / "steps.png")


def boxes(name: str, size: tuple[float, float], rows: list[list[tuple[str, int]]]) -> None:
    """Rows of boxes, an arrow from each row to the next; a box has a text and a colour."""
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.set_axis_off()
    axis.set_xlim(0, 1)
    axis.set_ylim(-len(rows) + 0.5, 0.6)
    for y, row in enumerate(rows):
        for x, (text, fill) in enumerate(row):
            at = (x + 0.5) / len(row)
            axis.text(
                at, -y, text, ha="center", va="center", fontsize=10, color=INK,
                bbox={"boxstyle": "round,pad=0.5", "fc": FILLS[fill], "ec": LINE},
            )  # fmt: skip
            if y:
                start = at if len(rows[y - 1]) == len(row) else 0.5
                axis.annotate(
                    "", (at, -y + 0.22), (start, -y + 0.75),
                    arrowprops={"arrowstyle": "->", "color": LINE},
                )  # fmt: skip
    figure.savefig(HERE / name, dpi=110, facecolor="white")
    plt.close(figure)


def layers() -> None:
    boxes("layers.png", (8.5, 4.6), [
        [("topology: GPUs, switches, links", 0)],
        [("algorithm: which chunk goes where", 0)],
        [("plan: steps of each rank and channel\nverify: no race or deadlock; right result", 1)],
        [("simulator", 2), ("reference\n(NumPy)", 2), ("CPU ranks\n(shared memory)", 2),
         ("GPU ranks\n(persistent kernel)", 2)],
    ])  # fmt: skip


def call() -> None:
    boxes("call.png", (7.5, 5.2), [
        [("linkweave.allreduce(x)", 0)],
        [("arguments: dtype, op, shape, device", 0)],
        [("first call of a kind: rank 0 plans, the ranks agree", 1)],
        [("later calls: the plan of the size's class", 1)],
        [("executor: each track carries out its steps", 2)],
        [("x holds the sum, with the same bits on all ranks", 2)],
    ])  # fmt: skip


if __name__ == "__main__":
    for picture in (trees, steps, layers, call):
        picture()
