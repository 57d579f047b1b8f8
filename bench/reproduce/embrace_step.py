"""Timelines of training steps with sparse embeddings, for figures 7 and 8 of the EmbRace paper.

A worker has one compute queue and one network, and each does one task at a time. Tables take no
time to look up. In the forward order, each table stands before its blocks; dense gradients and
computation are divided evenly over the blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from linkweave.bench.reproduce.embrace_costs import shared_seconds
from linkweave.bench.reproduce.embrace_paper import MB, Cluster, Model
from linkweave.bench.reproduce.embrace_tokens import Sizes

UTILISATIONS = (0.25, 0.5, 1.0)
"""Shares of the peak at which the GPUs may compute: assumed, as the paper has no times."""
BASELINES = {
    "BytePS": "ps", "Horovod AllReduce": "allreduce", "Horovod AllGather": "allgather",
    "Parallax": "ps",
}  # fmt: skip
"""How each sends the embeddings' gradients. BytePS sends all gradients so, and dense."""
STEPS = 8
FIRST, LAST = -1, 1 << 30
"""Priorities of prior and of delayed gradients; others have the position of their module."""


@dataclass(frozen=True, slots=True)
class Task:
    """`seconds` of work on the "compute" or the "network" resource, after the tasks with the
    indices `after`; of those that are ready, the one with the smallest `priority` goes first."""

    resource: str
    seconds: float
    priority: int
    after: tuple[int, ...]


def ends(tasks: list[Task]) -> list[float]:
    """Return when each task ends. A task that has begun is not interrupted."""
    users = defaultdict(list)
    waiting = [len(task.after) for task in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            users[before].append(index)
    ready: dict[str, list[tuple[int, int]]] = {"compute": [], "network": []}
    for index, task in enumerate(tasks):
        if not task.after:
            heappush(ready[task.resource], (task.priority, index))
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    found, now = [0.0] * len(tasks), 0.0
    while True:
        for resource, queue in ready.items():
            if queue and resource not in busy:
                index = heappop(queue)[1]
                busy.add(resource)
                heappush(running, (now + tasks[index].seconds, index))
        if not running:
            return found
        now = running[0][0]
        while running and running[0][0] == now:
            index = heappop(running)[1]
            found[index] = now
            busy.remove(tasks[index].resource)
            for user in users[index]:
                waiting[user] -= 1
                if not waiting[user]:
                    heappush(ready[tasks[user].resource], (tasks[user].priority, user))


@dataclass(frozen=True, slots=True)
class Step:
    """A training step's durations on one cluster: what all methods have in common."""

    model: Model
    cluster: Cluster
    sizes: Sizes
    forward_s: float

    @property
    def modules(self) -> list[bool]:
        """The modules in forward order; whether each is a table."""
        return [table for blocks in self.model.blocks for table in (True, *[False] * blocks)]

    def block_s(self) -> float:
        """The forward seconds of a block; the backward pass takes twice as long."""
        return self.forward_s / sum(self.model.blocks)

    def dense_s(self, way: str) -> float:
        """The seconds to communicate the dense gradients of a block."""
        dense = (self.model.whole - self.model.embedding) * MB / sum(self.model.blocks)
        return shared_seconds(way, self.cluster, dense)

    def table_s(self, way: str, rows: float) -> float:
        """The seconds to communicate so many rows of a table."""
        return shared_seconds(way, self.cluster, rows * self.model.width * 4)


def forward_seconds(model: Model, gpu: int, flops: float) -> float:
    """The seconds of two operations for each dense parameter and each token of a batch."""
    return 2 * (model.whole - model.embedding) * MB / 4 * model.tokens(gpu) / flops


@dataclass
class Tasks:
    """Tasks of several steps; compute tasks run in the order in which they are added."""

    tasks: list[Task] = field(default_factory=list)

    def compute(self, seconds: float, *after: int) -> int:
        order = len(self.tasks)
        return self._add(Task("compute", seconds, order, after))

    def send(self, seconds: float, priority: int, *after: int) -> int:
        return self._add(Task("network", seconds, priority, after))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


def baseline_period(step: Step, method: str) -> float:
    """The seconds of a step by a method of `BASELINES`: gradients leave as they become ready, and
    the next forward pass waits for all of them; with BytePS, each module for its own, and those
    first that are needed first."""
    made, modules = Tasks(), step.modules
    scheduled, way = method == "BytePS", BASELINES[method]
    rows = step.model.rows if scheduled or way == "allreduce" else step.sizes.original
    table_s, dense_s = step.table_s(way, rows), step.dense_s("ps" if scheduled else "allreduce")
    sent: list[int] = []
    last, marks = -1, []
    for _ in range(STEPS):
        for module, table in enumerate(modules):
            waits = sent[module : module + 1] if scheduled else sent
            last = made.compute(0.0 if table else step.block_s(), *_order(last), *waits)
        new = [0] * len(modules)
        for module, table in reversed([*enumerate(modules)]):
            last = made.compute(0.0 if table else 2 * step.block_s(), last)
            priority = module if scheduled else len(made.tasks)
            new[module] = made.send(table_s if table else dense_s, priority, last)
        sent = new
        marks.append(last)
    return period(made.tasks, marks)


def embrace_period(step: Step, in_order: bool = False) -> float:
    """The seconds of a step by EmbRace.

    Gradients of tables are coalesced. After the backward pass, prior rows leave, then the lookups
    of the next batch and dense gradients as they are needed, and last the delayed rows, for which
    the lookups of the batch after that wait. With `in_order`, as linkweave carries it out, nothing
    overtakes what is ready: dense gradients leave as the backward pass makes them, then the rows.
    """

    def priority(wanted: int) -> int:
        return len(made.tasks) if in_order else wanted

    made, modules, sizes = Tasks(), step.modules, step.sizes
    # table 2 has two all-to-alls, each of these is one
    prior_s, delayed_s, lookup_s = (
        step.table_s("alltoall", rows) / 2
        for rows in (sizes.prior, sizes.coalesced - sizes.prior, sizes.original)
    )
    dense_s = step.dense_s("allreduce")
    tables = [module for module, table in enumerate(modules) if table]
    sent: dict[int, int] = {}
    delayed: dict[int, int] = {}
    last, marks = -1, []
    for _ in range(STEPS):
        for module, table in enumerate(modules):
            waits = [sent[module]] if sent else []
            last = made.compute(0.0 if table else step.block_s(), *_order(last), *waits)
        for module, table in reversed([*enumerate(modules)]):
            last = made.compute(0.0 if table else 2 * step.block_s(), last)
            if not table:
                sent[module] = made.send(dense_s, priority(module), last)
        for table in tables:
            prior = made.send(prior_s, priority(FIRST), last)
            before = [delayed[table]] if delayed else []
            sent[table] = made.send(lookup_s, priority(table), prior, *before)
        delayed = {table: made.send(delayed_s, priority(LAST), last) for table in tables}
        marks.append(last)
    return period(made.tasks, marks)


def _order(last: int) -> tuple[int, ...]:
    return () if last < 0 else (last,)


def period(tasks: list[Task], marks: list[int]) -> float:
    """The mean seconds between ends of backward passes, when the first steps are over."""
    done = ends(tasks)
    half = len(marks) // 2
    return (done[marks[-1]] - done[marks[half - 1]]) / (len(marks) - half)
