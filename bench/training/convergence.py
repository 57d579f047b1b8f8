"""`linkweave bench convergence`: one model trained with several exchanges of gradients.

All train on CPU ranks, from the same weights and on the same batches: with the dense average, with
`GTopK`, and with one that conserves what merges drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from linkweave import collectives
from linkweave.bench.timing import rounds_of
from linkweave.bench.training.tasks import TASKS, Task
from linkweave.collectives import CollectiveError, DataParallel, GTopK
from linkweave.collectives.calls.communicator import get_default
from linkweave.topology.checks import shown

WARM_UP = (0.25, 0.0725, 0.015, 0.004)  # gTop-k, section IV-B
HEADER = (
    f"{'task':18}{'ranks':>6}{'steps':>7}{'rate':>7}  {'exchange':38}{'mean':>7}{'- dense':>9}"
    "  each seed"
)
LEGEND = (
    "digits: percent of the 297 test images that are recognised, and points more than dense\n"
    "bible: loss in nats a word over chapters not trained on, and percent more than dense\n"
    "conserving: what merges drop stays in residuals, where Shi et al., algorithm 4, loses it"
)


def named(gtopk: GTopK | None) -> str:
    if gtopk is None:
        return "dense"
    said = {"conserving": gtopk.conserve, "warm-up": gtopk.warmup, "by layer": gtopk.per == "unit"}
    return ", ".join([f"gTop-k {gtopk.density:g}", *(word for word in said if said[word])])


def exchange_of(text: str, epoch_steps: int) -> GTopK:
    """Read an exchange such as "density=0.01,warmup=on,conserve=on". Raises CollectiveError.

    The warm-up has the densities of Lin et al., in epochs of so many steps.
    """
    words = {"density": "", "warmup": "off", "per": "bucket", "conserve": "off"}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in words or (words[key] in ("on", "off") and value not in ("on", "off")):
            raise _unreadable(text)
        words[key] = value
    try:
        density = float(words["density"])
    except ValueError:
        raise _unreadable(text) from None
    warmup = WARM_UP if words["warmup"] == "on" else ()
    return GTopK(density, warmup, epoch_steps, words["per"], "gtopk", words["conserve"] == "on")


def _unreadable(text: str) -> CollectiveError:
    return CollectiveError(
        "--exchange is density=SHARE, with any of warmup=on, per=unit and "
        f"conserve=on, separated by commas, not {shown(text)}"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One exchange: the figures of `LEGEND` in the end, of each seed and their mean.

    A step takes `batch` samples of `predictions` classes each. `gtopk` has the options of the
    exchange.
    """

    task: str
    ranks: int
    steps: int
    batch: int
    predictions: int
    rate: float
    exchange: str
    gtopk: dict[str, Any] | None
    mean: float
    beyond_dense: float
    final: list[float]

    def __str__(self) -> str:
        each = " ".join(f"{figure:.2f}" for figure in self.final)
        return (
            f"{self.task:18}{self.ranks:6}{self.steps:7}{self.rate:7g}  {self.exchange:38}"
            f"{self.mean:7.3f}{self.beyond_dense:+9.2f}  {each}"
        )


def batches(samples: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """The numbers of the samples of each step, the same on all ranks; each epoch shuffles anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples // batch * batch].split(batch)


def _trained(
    rank: int, task: Task, exchange: GTopK | None, steps: int, rate: float, seed: int
) -> float:
    """The figure of the task in the end."""
    comm = get_default()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), rate)
    parallel = DataParallel(model, optimizer, schedule="ddp", exchange=exchange or "dense")
    x, y = (torch.from_numpy(part) for part in task.train)
    share = task.batch // comm.size
    drawn = batches(len(x), task.batch, seed)
    for _, every in zip(rounds_of(steps, rank == 0), drawn, strict=False):
        mine = every[rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        cross_entropy(parallel(x[mine]), y[mine].flatten()).backward()
        optimizer.step()
    parallel.close()
    return task.judge(model) if rank == 0 else 0.0


def convergence(
    name: str, ranks: int, exchanges: Sequence[str], steps: int, seeds: int,
    rate: float | None = None, epoch_steps: int | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Train with the dense average and with each of the exchanges, as `exchange_of` reads them.

    rate: the learning rate; default: the task's. epoch_steps: the steps of an epoch of the warm-up;
    default: those of a real one.
    Seeds, from 0, draw weights and batches, and divide digits. Raises CollectiveError.
    """
    if name not in TASKS:
        raise CollectiveError(f"--task must be one of {', '.join(TASKS)}, not {shown(name)}")
    tasks = [TASKS[name](seed) for seed in range(seeds)]
    task = tasks[0]
    if ranks > task.batch:
        raise CollectiveError(f"-n must be at most {task.batch}, a step's samples, not {ranks}")
    if rate is not None and not rate > 0:
        raise CollectiveError(f"--rate must be above 0, not {rate:g}")
    epoch = epoch_steps or len(task.train[1]) // task.batch
    rate = rate or task.rate
    chosen = [None, *(exchange_of(text, epoch) for text in exchanges)]
    dense = None
    for exchange in chosen:
        final = [
            collectives.spawn(_trained, ranks, args=(own, exchange, steps, rate, seed))[0]
            for seed, own in enumerate(tasks)
        ]
        found = mean(final)
        dense = found if dense is None else dense
        yield Row(
            name, ranks, steps, task.batch // ranks * ranks, task.predictions, rate,
            named(exchange), exchange and asdict(exchange), found,
            task.beyond(found, dense), final,
        )  # fmt: skip
