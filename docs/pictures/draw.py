"""Draws the pictures of the documentation: python docs/pictures/draw.py"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from linkweave import overlap, topology
from linkweave.bench.command import gantt, view
from linkweave.bench.command.pictures import views_of
from linkweave.collectives.overlap.communication import whole

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
INK, LINE, FILLS = "#1a1a1a", "#555555", ("#dbe9f6", "#fde6cf", "#dcefdc")


def frame() -> None:
    """A moment of `linkweave view dgx1-v100 --plan overlapped_double_tree`, by Chromium."""
    machine, name = topology.load("dgx1-v100"), "overlapped_double_tree"
    with TemporaryDirectory() as folder:
        page = Path(folder) / "view.html"
        view.write(page, machine.name, view.about(machine), views_of(machine, [1 << 26], [name]))
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--window-size=1000,1060", "--virtual-time-budget=3000",
             f"--screenshot={HERE / 'view.png'}", f"file://{page}#64MiB/{name}/0.515/n0"],
            check=True, capture_output=True,
        )  # fmt: skip


def steps() -> None:
    """DDP's step beside C-Cube's, where an all-reduce takes as long as the forward pass."""
    profile = overlap.model_at("vgg16", 16, 6.28e12)
    network = overlap.Network.from_topology(topology.load("dgx1-v100"), "overlapped_double_tree")
    slow = replace(network, name="a DGX-1 with links a sixth as fast", timings=tuple(
        replace(one, nbytes=one.nbytes // 6) for one in network.timings
    ), seconds_per_byte=6 * network.seconds_per_byte)  # fmt: skip
    at_once = overlap.Schedule(
        "no overlap", profile, slow, (whole(profile, tuple(range(len(profile.layers)))),)
    )
    made = [at_once, *(overlap.plan(profile, slow, name) for name in ("ddp", "c-cube"))]
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
    boxes("call.png", (7.5, 4.4), [
        [("linkweave.allreduce(x)", 0)],
        [("arguments: dtype, op, shape, device", 0)],
        [("the plan of the size's class: rank 0 makes it once, all ranks agree", 1)],
        [("executor: each track carries out its steps", 2)],
        [("x holds the sum, with the same bits on all ranks", 2)],
    ])  # fmt: skip


def densities() -> None:
    """What gTop-k reaches by density, each seed a dot, beside dense, from recorded results."""
    tasks = (
        ("digits-narrow-4", "narrow CNN, digits"), ("digits-4", "wide CNN, digits"),
        ("digits-mlp-4", "MLP, digits"), ("bible-4", "LSTM, Bible"),
        ("bible-transformer-4", "AdamW transformer, Bible"),
    )  # fmt: skip
    figure, axes = plt.subplots(1, len(tasks), figsize=(17, 3.6), layout="constrained")
    for (record, name), axis in zip(tasks, axes, strict=True):
        file = ROOT / f"bench/results/convergence-{record}-epyc-2-cores.json"
        dense, *rows = json.loads(file.read_text())["rows"]
        axis.axhline(dense["mean"], color=INK, linestyle=":", label="dense")
        for conserve, colour in ((False, "C0"), (True, "C1")):
            mine = [r for r in rows if r["gtopk"]["conserve"] == conserve]
            x = [r["gtopk"]["density"] for r in mine]
            axis.plot(x, [r["mean"] for r in mine], color=colour, marker="o", markersize=5,
                      label="conserve=True" if conserve else "the default")  # fmt: skip
            for density, row in zip(x, mine, strict=True):
                axis.plot([density] * len(row["final"]), row["final"], ".", color=colour,
                          alpha=0.35, markersize=4)  # fmt: skip
        words = dense["predictions"] > 1
        axis.set_xscale("log")
        axis.set_title(f"{name}, {dense['steps']} steps", fontsize=10, loc="left")
        axis.set_xlabel("density")
        axis.set_ylabel("loss, nats a word" if words else "test accuracy, %")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "gtopk-densities.png", dpi=90, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    for picture in (frame, steps, layers, call, densities):
        picture()
