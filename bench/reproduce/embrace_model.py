"""The EmbRace paper's figures, models and clusters, their costs, and timelines of their steps.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks". Its MB are 2^20 bytes: GNMT-8's 252.5 MB are two float32 tables of 32,320 x 1024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from linkweave.collectives.overlap import network
from linkweave.collectives.planning import equations

MB = 1 << 20
BANDWIDTH = 100e9 / 8  # bytes/s of a node's InfiniBand (section 5.2.1)
STARTUP = network("56GbIB", 8).message[0]
"""Start-up of a message in seconds. The paper gives none: this is MG-WFBP's measurement."""
GPUS_A_NODE = 4
WORKERS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Cluster:
    workers: int
    nodes: int


CLUSTERS = tuple(Cluster(workers, workers // GPUS_A_NODE) for workers in WORKERS)
FIGURE4 = {"4a": Cluster(8, 2), "4b": Cluster(4, 4)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """`flops` is the peak of float32 operations a second, by NVIDIA's data sheets."""

    name: str
    flops: float


GPUS = (Gpu("RTX3090", 35.6e12), Gpu("RTX2080", 10.1e12))


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper; sizes in MB.

    `whole` and `embedding` are from table 1, `original`, `coalesced` and `prioritized` gradients
    from table 3 (RTX3090), `coalescing` and `priority` the reductions in % that the text states,
    `sparsity` that of section 4.1.2 in %. `batches` are the batch sizes by `GPUS`, `speedups` over
    the best baseline by `GPUS`, from section 5.3. The paper does not tell `width`, nor, but for
    LM, the number of tables, nor `blocks`, those that follow each table in the forward pass: they
    are those of the networks whose sizes fit (`DENSE`).
    """

    name: str
    whole: float
    embedding: float
    width: int
    blocks: tuple[int, ...]
    original: float
    coalesced: float
    prioritized: float
    coalescing: float
    priority: float
    sparsity: float
    batches: tuple[int, int]
    speedups: tuple[tuple[float, float], tuple[float, float]]

    @property
    def tables(self) -> int:
        return len(self.blocks)

    @property
    def rows(self) -> int:
        return round(self.embedding * MB / (self.tables * self.width * 4))

    def tokens(self, gpu: int = 0) -> int:
        """The tokens of a worker's batch that each table looks up, from the size of the original
        gradient, in proportion to the batch size."""
        rows = self.original * MB / (self.tables * self.width * 4)
        return round(rows * self.batches[gpu] / self.batches[0])


MODELS = (
    Model("LM", 3186.5, 3099.5, 512, (1, 0), 8.7, 6.9, 2.6, 20.4, 61.8, 99.7, (128, 128),
          ((1.18, 1.77), (1.99, 2.41))),
    Model("GNMT-8", 739.1, 252.5, 1024, (4, 4), 26.0, 12.2, 5.8, 53.1, 52.5, 89.7, (128, 32),
          ((1.103, 1.268), (1.094, 1.296))),
    Model("Transformer", 1067.5, 263.4, 1024, (6, 6), 35.2, 16.6, 8.9, 52.9, 46.3, 86.6,
          (5120, 500), ((1.115, 1.176), (1.105, 1.282))),
    Model("BERT-base", 417.7, 89.4, 768, (12,), 36.0, 5.5, 3.2, 84.7, 41.9, 59.7, (32, 4),
          ((1.02, 1.06), (1.10, 1.40))),
)  # fmt: skip


def lstm(inputs: int, hidden: int) -> int:
    return 4 * hidden * (inputs + hidden + 2)


def linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def lm(words: int) -> int:
    """One layer of 2,048, a linear layer to 512 after it, and the softmax's bias: its weights are
    the second table."""
    return lstm(512, 2048) + linear(2048, 512) + words


def gnmt(words: int) -> int:
    """NVIDIA's GNMT with two tables: four layers each, the first of the encoder in both directions,
    normalized attention."""
    encoder = 4 * lstm(1024, 1024) + lstm(2048, 1024)
    decoder = lstm(1024, 1024) + 3 * lstm(2048, 1024)
    return encoder + decoder + 2 * 1024 * 1024 + 2 * 1024 + 1 + linear(1024, words)


def transformer(words: int) -> int:
    """The big one of Vaswani and others (2017), table 3, whose last layer shares no weights."""
    attention, norm = 4 * linear(1024, 1024), 2 * 1024
    inner = linear(1024, 4096) + linear(4096, 1024)
    return 6 * (3 * attention + 2 * inner + 5 * norm) + 1024 * words


DENSE = {"LM": lm, "GNMT-8": gnmt, "Transformer": transformer}
"""The parameters beside the embeddings, of a vocabulary: the paper names no sources of its models,
these are networks whose sizes are within 0.3 MB of the printed ones."""

SHARES = {"LM": 97.27, "GNMT-8": 34.16, "Transformer": 24.67, "BERT-base": 21.42}
"""Table 1: the embeddings' share of a model in %."""
STALLS = {"RTX3090": (1.45, 2.56), "RTX2080": (1.37, 3.02)}
"""Figure 8: stalls on 16 GPUs as multiples of EmbRace's, over all models (section 5.4)."""


EXPONENT = 1.0  # of the Zipf streams: the word of rank r has a frequency in proportion to 1 / r
STEPS = 8  # batches of a stream at most, and steps that are simulated


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a worker's gradient, averaged over workers and steps."""

    original: float
    coalesced: float
    prior: float
    own_prior: float


def zipf(vocabulary: int, workers: int, tokens: int) -> np.ndarray:
    """Return a stream of independent tokens, always the same one."""
    upto = np.cumsum(np.arange(1, vocabulary + 1) ** -EXPONENT)
    drawn = np.random.default_rng(0).random((STEPS, workers, tokens)) * upto[-1]
    return np.minimum(np.searchsorted(upto, drawn), vocabulary - 1)


def sizes(stream: np.ndarray) -> Sizes:
    """Count rows of the gradients of all steps but the last, after which nothing is looked up."""
    tokens = stream.shape[-1]
    distinct = [[np.unique(batch) for batch in step] for step in stream]
    counts = []
    for now, after in zip(distinct, distinct[1:], strict=False):
        union = np.unique(np.concatenate(after))
        for mine, own in zip(now, after, strict=True):
            prior = np.intersect1d(mine, union, assume_unique=True).size
            own_prior = np.intersect1d(mine, own, assume_unique=True).size
            counts.append((tokens, mine.size, prior, own_prior))
    return Sizes(*np.mean(counts, axis=0).tolist())


WAYS = ("alltoall", "allreduce", "ps", "allgather")

Cost = Callable[[str, Cluster, float], float]


def equation_seconds(way: str, cluster: Cluster, nbytes: float) -> float:
    """Table 2, for gradients of `nbytes` (with "allreduce", the whole table)."""
    return _equation(way, cluster, nbytes / BANDWIDTH)


def shared_seconds(way: str, cluster: Cluster, nbytes: float) -> float:
    """Table 2, or the bytes through a node's adapter and the start-ups if those take longer."""
    adapter = adapter_bytes(way, cluster, nbytes) / BANDWIDTH
    return max(equation_seconds(way, cluster, nbytes), adapter + _equation(way, cluster, 0.0))


def adapter_bytes(way: str, cluster: Cluster, nbytes: float) -> float:
    """The bytes that leave a node, and as many arrive. Rings enter and leave it once."""
    workers, nodes = cluster.workers, cluster.nodes
    if nodes == 1:
        return 0.0
    inside = workers // nodes
    if way == "alltoall":
        return 2 * inside * (workers - inside) * nbytes / workers
    if way == "allreduce":
        return 2 * (workers - 1) * nbytes / workers
    if way == "ps":
        return 2 * (workers - inside) * nbytes / nodes
    return (workers - 1) * nbytes


def _equation(way: str, cluster: Cluster, seconds: float) -> float:
    if way == "ps":
        how = cluster.workers, cluster.nodes, STARTUP, seconds
        return equations.parameter_server_seconds(*how)
    return getattr(equations, f"{way}_seconds")(cluster.workers, STARTUP, seconds)


def wins(cost: Cost, cluster: Cluster, other: str, nbytes: float) -> tuple[float, float] | None:
    """The sparsities, from and to, at which "alltoall" of a table of `nbytes` takes no longer than
    another way; None if there are none. All costs are linear in the density."""

    def ahead(density: float) -> float:
        whole = nbytes if other == "allreduce" else density * nbytes
        return cost("alltoall", cluster, density * nbytes) - cost(other, cluster, whole)

    sparse, dense = ahead(0.0), ahead(1.0)
    if min(sparse, dense) > 0:
        return None
    if max(sparse, dense) <= 0:
        return 0.0, 1.0
    crossing = 1 - sparse / (sparse - dense)
    return (crossing, 1.0) if sparse <= 0 else (0.0, crossing)


UTILISATIONS = (0.25, 0.5, 1.0)
"""Shares of the peak at which the GPUs may compute: assumed, as the paper has no times."""
BASELINES = {
    "BytePS": "ps", "Horovod AllReduce": "allreduce", "Horovod AllGather": "allgather",
    "Parallax": "ps",
}  # fmt: skip
"""How each sends the embeddings' gradients. BytePS sends all gradients so, and dense."""
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
        return [table for blocks in self.model.blocks for table in (True, *[False] * blocks)]

    def block_s(self) -> float:
        return self.forward_s / sum(self.model.blocks)

    def dense_s(self, way: str) -> float:
        dense = (self.model.whole - self.model.embedding) * MB / sum(self.model.blocks)
        return shared_seconds(way, self.cluster, dense)

    def table_s(self, way: str, rows: float) -> float:
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
