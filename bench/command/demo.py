"""The demo: data-parallel training, chained with the next forward pass, and what schedules gain.

A small CNN learns scikit-learn's 1,797 handwritten digits on CPU ranks, which average gradients by
the DGX-1's plan. Then layers that sleep train over a throttled network under each policy.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from linkweave import collectives, topology
from linkweave.bench.command import gantt, options
from linkweave.bench.training import sleeping
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.calls.communicator import get_default
from linkweave.topology.checks import integer

MACHINE = "dgx1-v100"
SCHEDULE = "c-cube"
MODEL = "vgg16"  # of the layers that sleep
POLICIES = ("ddp", "wfbp", "mg-wfbp", "asc-wfbp", "bytescheduler", "us-byte", "c-cube", "optimal")
STEP_S = 0.6  # forward and backward pass together
SLEEPERS = 2  # ranks of these layers: more would wait for the cores
COMMUNICATION = 3.0  # in forward passes
NBYTES = 2_000_000
STEPS = 3
BATCH = 256  # over all ranks
SEED = 7


def run(ranks: int, epochs: int, out: Path) -> dict[str, Any]:
    """Train, compare policies and draw. Returns what `summary` prints; raises CollectiveError."""
    integer(epochs, "--epochs", 1)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CollectiveError(
            f"the demo needs scikit-learn, and {error.name} is missing: pip install scikit-learn"
        ) from None
    out.mkdir(parents=True, exist_ok=True)  # fails before the training, not after
    data = load_digits()
    start = time.perf_counter()
    results = collectives.spawn(_train, ranks, MACHINE, (data.data, data.target, epochs))
    result: dict[str, Any] = results[0]
    result |= {"ranks": ranks, "epochs": epochs, "seconds": time.perf_counter() - start}
    result["rows"], result["chaining"] = _policies(out)
    machine = topology.load(MACHINE)
    plan = collectives.plan_allreduce(machine, 1 << 26, "overlapped_double_tree")
    result["steps"] = str(out / "steps.png")
    result["trees"] = str(out / "dgx1-double-tree.png")
    topology.draw(machine, [out / "dgx1-double-tree.png"], plan)
    return result


def _train(rank: int, images: Any, labels: Any, epochs: int) -> dict[str, Any]:
    import torch

    from linkweave.bench.training.train_models import digits_cnn

    comm = get_default()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x))
    train, test = order[:1500], order[1500:]
    share = BATCH // comm.size or 1
    model = digits_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model = collectives.DataParallel(model, optimizer, schedule=SCHEDULE)
    passes: Any = range(epochs)
    if rank == 0:  # drawn by the rank itself: a thread beside `spawn` would rule out forking
        passes = track(passes, f"training on {comm.size} ranks", console=Console(stderr=True))
    for _ in passes:
        shuffled = train[torch.randperm(len(train))]
        for first in range(0, len(shuffled) - BATCH + 1, BATCH):
            mine = shuffled[first + rank * share : first + (rank + 1) * share]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        correct = (model.eval()(x[test]).argmax(1) == y[test]).float().mean()
    program = str(model.program or "one rank sends nothing")
    model.close()
    return {"accuracy": float(correct), "program": program}


def _network(share: float, workers: int) -> tuple[overlap.Profile, overlap.Network]:
    """Layers that sleep, and a network that takes `share` of their forward pass for a gradient."""
    known = overlap.model(MODEL)
    network = overlap.Network(
        known.forward_s / 100, share * known.forward_s / known.nbytes, 2.0, workers, "throttled"
    )
    return sleeping.scaled(known, network, NBYTES, STEP_S)


def _policies(out: Path) -> tuple[list[Any], list[Any]]:
    """Steps under each policy, and of C-Cube chained and unchained where communication takes as
    long as the forward pass."""
    Console(stderr=True).print(f"training {len(POLICIES) + 2} schedules", highlight=False)
    schedules = sleeping.plans(*_network(COMMUNICATION, SLEEPERS), POLICIES)
    rows = sleeping.rows(schedules, SLEEPERS, STEPS, str(out))
    files = [out / f"{row.policy}.json" for row in rows]
    steps = [overlap.MeasuredStep.from_json(file.read_text()) for file in files]
    charts = [
        gantt.measured(step.schedule, step.timeline, f"{step.schedule.policy}, measured")
        for step in steps
    ]
    gantt.draw(charts, out / "steps.png")
    chained = sleeping.plans(*_network(1.0, SLEEPERS), [SCHEDULE])
    pair = sleeping.rows(sleeping.with_unchained(chained), SLEEPERS, STEPS)
    return [asdict(row) for row in rows], [asdict(row) for row in pair]


def summary(result: dict[str, Any]) -> str:
    rows = result["rows"]
    base = rows[0]
    table = options.table(
        ("policy", "predicted ms", "measured ms", "error", "x ddp predicted", "x ddp measured"),
        [
            (row["policy"], f"{row['predicted_ms']:.1f}", f"{row['measured_ms']:.1f}",
             f"{row['measured_ms'] / row['predicted_ms'] - 1:+.1%}",
             f"{base['predicted_ms'] / row['predicted_ms']:.2f}",
             f"{base['measured_ms'] / row['measured_ms']:.2f}")
            for row in rows
        ],
        (0,),
    )  # fmt: skip
    chained, not_chained = result["chaining"]
    gained = [not_chained[name] / chained[name] for name in ("predicted_ms", "measured_ms")]
    return "\n".join([
        f"trained {result['epochs']} epochs on {result['ranks']} ranks in "
        f"{result['seconds']:.1f} s, all-reduces on the links of {MACHINE}, each layer updated "
        "just before its next use",
        f"accuracy on {1797 - 1500} held-out digits: {result['accuracy']:.1%}",
        result["program"],
        "",
        f"a step of {MODEL}'s layers, which sleep, over a network that takes as long as forward "
        "and backward pass:",
        table,
        f"C-Cube's all-reduce chained with the forward pass, where both take as long: "
        f"{gained[1]:.2f} times faster than unchained, predicted {gained[0]:.2f}",
        f"pictures: {result['trees']} (trees on the links), {result['steps']} (steps)",
    ])  # fmt: skip
