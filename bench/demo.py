"""The demo: data-parallel training whose gradients travel over the planned double tree.

A small CNN learns scikit-learn's 1,797 handwritten digits on CPU ranks; every step averages the
gradients with `collectives.allreduce` on the DGX-1's plan. The same training with gloo runs beside.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from linkweave import collectives, topology
from linkweave.bench.options import at_least
from linkweave.collectives import CollectiveError
from linkweave.collectives.launch.default import get_default

MACHINE = "dgx1-v100"
ALGORITHM = "overlapped_double_tree"
BATCH = 256  # over all ranks
SEED = 7


def run(ranks: int, epochs: int, out: Path) -> dict[str, Any]:
    """Train, predict and draw; see `summary` for what comes back. Raises CollectiveError."""
    at_least(("--epochs", epochs, 1))
    try:
        import torch  # noqa: F401  (loaded before the ranks are forked, which then share it)
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CollectiveError(
            f"the demo needs torch and scikit-learn, and {error.name} is missing: pip install "
            "torch==2.13.0, then pip install scikit-learn"
        ) from None
    out.mkdir(parents=True, exist_ok=True)  # told before the training, not after
    data = load_digits()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        results = collectives.spawn(_train, ranks, MACHINE, (data.data, data.target, epochs, store))
    result: dict[str, Any] = results[0]
    result["ranks"], result["epochs"] = ranks, epochs
    result["seconds"] = time.perf_counter() - start
    result["predictions"] = _predict(result["gradient_bytes"])
    machine = topology.load(MACHINE)
    plan = collectives.plan_allreduce(machine, result["gradient_bytes"], ALGORITHM)
    result["picture"] = str(out / "dgx1-double-tree.png")
    topology.draw(machine, [out / "dgx1-double-tree.png", out / "dgx1-double-tree.svg"], plan)
    return result


def _model() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def _train(rank: int, images: Any, labels: Any, epochs: int, store: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    comm = get_default()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, comm.size), rank=rank, world_size=comm.size
    )
    torch.manual_seed(SEED)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x))
    train, test = order[:1500], order[1500:]
    share = BATCH // comm.size or 1
    models = {"linkweave": _model(), "gloo": _model()}
    models["gloo"].load_state_dict(models["linkweave"].state_dict())
    steps = {name: torch.optim.Adam(m.parameters(), lr=2e-3) for name, m in models.items()}
    spent: dict[str, list[float]] = {name: [] for name in models}  # seconds of each call
    difference = 0.0
    passes: Any = range(epochs)
    if rank == 0:  # drawn by the rank itself: a thread beside `spawn` would rule out forking
        passes = track(passes, f"training on {comm.size} ranks", console=Console(stderr=True))
    for _ in passes:
        shuffled = train[torch.randperm(len(train))]
        for first in range(0, len(shuffled) - BATCH + 1, BATCH):
            mine = shuffled[first + rank * share : first + (rank + 1) * share]
            for name, model in models.items():
                steps[name].zero_grad()
                torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
                gradients = [p.grad for p in model.parameters()]
                comm.barrier()  # what ranks wait for a slower one is nobody's all-reduce
                start = time.perf_counter()
                if name == "linkweave":
                    collectives.allreduce(gradients, "avg", algorithm=ALGORITHM)
                else:
                    flat = torch.cat([g.reshape(-1) for g in gradients])
                    dist.all_reduce(flat)
                    flat /= comm.size
                    at = 0
                    for g in gradients:
                        g.copy_(flat[at : at + g.numel()].view_as(g))
                        at += g.numel()
                spent[name].append(time.perf_counter() - start)
                steps[name].step()
    for ours, theirs in zip(*(m.parameters() for m in models.values()), strict=True):
        difference = max(difference, float((ours - theirs).abs().max().detach()))
    with torch.no_grad():
        correct = (models["linkweave"](x[test]).argmax(1) == y[test]).float().mean()
        theirs = (models["gloo"](x[test]).argmax(1) == y[test]).float().mean()
    dist.destroy_process_group()
    return {
        "accuracy": float(correct),
        "accuracy_gloo": float(theirs),
        "largest_difference": difference,
        "gradient_bytes": sum(p.numel() * 4 for p in models["linkweave"].parameters()),
        "allreduce_seconds": spent["linkweave"],
        "allreduce_seconds_gloo": spent["gloo"],
        "algorithm": ALGORITHM,
    }


def _predict(nbytes: int) -> list[dict[str, Any]]:
    """Simulated on the real DGX-1: this model's gradients, and ResNet-50's."""
    machine = topology.load(MACHINE)
    rows = []
    for label, size in (("this model", nbytes), ("ResNet-50", 25_557_032 * 4)):
        row: dict[str, Any] = {"gradients": label, "bytes": size}
        for name in (ALGORITHM, "ring", "double_tree", "tree", "auto"):
            plan = collectives.plan_allreduce(machine, size, name)
            row[f"{name}_us"] = collectives.simulate(plan, machine, size).seconds * 1e6
        row["auto"] = plan.algorithm
        rows.append(row)
    return rows


def summary(result: dict[str, Any]) -> str:
    """The demo's last words."""
    lines = [
        f"trained {result['epochs']} epochs on {result['ranks']} ranks in "
        f"{result['seconds']:.1f} s (and once more with gloo, in the same time)",
        f"accuracy on {1797 - 1500} held-out digits: {result['accuracy']:.1%}; "
        f"with gloo: {result['accuracy_gloo']:.1%}",
        f"largest difference of any weight from the training through gloo: "
        f"{result['largest_difference']:.2e}",
        f"time in all-reduce, by {result['algorithm']} on the links of {MACHINE}: "
        f"{_times(result['allreduce_seconds'])}",
        f"  with gloo: {_times(result['allreduce_seconds_gloo'])}",
        f"predicted on a real {MACHINE} (simulated, 5 us a step):",
    ]
    for row in result["predictions"]:
        lines.append(
            f"  {row['gradients']:11} {row['bytes'] / 1e6:7.2f} MB: overlapped double tree "
            f"{row[ALGORITHM + '_us']:8.0f} us, ring {row['ring_us']:8.0f} us, baseline double "
            f"tree {row['double_tree_us']:8.0f} us, one tree {row['tree_us']:8.0f} us; auto takes "
            f"{row['auto']}, {row['auto_us']:.0f} us"
        )
    lines.append(
        "  a large message is fastest over rings or packed trees, which take all six links of a "
        "GPU; two trees leave some idle"
    )
    lines.append(f"picture of the trees on the links: {result['picture']}")
    return "\n".join(lines)


def _times(seconds: list[float]) -> str:
    """Of all calls, the first of which may plan or connect."""
    return (
        f"{sum(seconds):.2f} s in {len(seconds)} calls; the first {seconds[0] * 1e3:.0f} ms, "
        f"the median of the others {median(seconds[1:] or seconds) * 1e3:.1f} ms"
    )
