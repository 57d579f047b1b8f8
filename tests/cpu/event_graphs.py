"""What waits for what on a GPU in three steps of training, recorded from the code that enqueues it.

`python -m tests.cpu.event_graphs` draws them: docs/pictures/streams.png. Tensors have no memory,
and streams write down what is enqueued and which events they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from linkweave import GTopK
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.embedding import exchange as row_exchange
from linkweave.collectives.training.embedding.exchange import RowExchange, RowLane
from linkweave.collectives.training.embedding.optimizer import Embeddings, RowOptimizer
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.exchange import Dense, Exchange
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.gtopk.exchange import SparseExchange
from linkweave.collectives.training.lanes import StreamLanes
from linkweave.collectives.training.program import Op, Program, Span
from linkweave.kernels.embedding import gpu as rows_gpu
from linkweave.kernels.embedding import steps as rows
from linkweave.kernels.gtopk import gpu, steps
from tests.cpu.fake_ranks import FakeTransport

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "streams.png"
MAIN, HOST = "main stream", "host waits"
SIZE = 2


@dataclass
class Graph:
    """What has been enqueued: (stream, what) in order, and (earlier, later) for waits."""

    items: list[tuple[str, str]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)
    current: list[Stream] = field(default_factory=list)
    op: str = ""  # that a lane of rows carries out
    read: int | None = None  # by the host, before what is enqueued next

    def stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream(self, name))

    def do(self, what: str, on: Stream | None = None) -> None:
        """Enqueue, by default on the current stream."""
        stream = on or self.current[-1]
        for earlier in sorted(stream.awaited):
            if self.items[earlier][0] != stream.name:
                self.waits.append((earlier, len(self.items)))
        if self.read is not None:
            self.waits.append((self.read, len(self.items)))
            self.read = None
        stream.awaited.clear()
        stream.last = len(self.items)
        self.items.append((stream.name, what))

    def reads(self, event: Event, what: str) -> None:
        """The host waits for an event, and enqueues nothing before."""
        host = self.stream(HOST)
        host.wait_event(event)
        self.do(what, host)
        self.read = host.last

    @property
    def arrows(self) -> list[str]:
        """Each wait: from what to what, by stream."""
        names = [f"{stream}: {what}" for stream, what in self.items]
        return [f"{names[earlier]} > {names[later]}" for earlier, later in self.waits]


@dataclass
class Event:
    at: int | None


@dataclass
class Stream:
    graph: Graph
    name: str
    last: int | None = None
    awaited: set[int] = field(default_factory=set)

    def record_event(self) -> Event:
        # what it waits for is before the event as well
        at = max((i for i in (self.last, *self.awaited) if i is not None), default=None)
        return Event(at)

    def wait_event(self, event: Event) -> None:
        if event.at is not None:
            self.awaited.add(event.at)

    def synchronize(self) -> None: ...


class Transport(FakeTransport):
    """Rank 1 of two, which enqueues the names of what it sends."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(1, SIZE)
        self._graph = graph

    def told(self, name: str, x: torch.Tensor) -> None:
        op = self._graph.op
        names = {
            "average": "all-reduce", "pairwise": "send", "total": "flags",
            "alltoall": {"update prior": "prior", "no tokens": "tokens"}.get(op, op),
        }  # fmt: skip
        self._graph.do(names.get(name, name))


def watched(graph: Graph, module: Any, names: dict[str, str]) -> Any:
    """The functions of a module, which enqueue their names."""

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            graph.do(names[name])
            return function(*arguments, **named)

        return call

    own = {name: told(name, getattr(module, name)) for name in names}
    return SimpleNamespace(**vars(module) | own)


@contextmanager
def recording() -> Iterator[Graph]:
    """Inside, streams of torch.cuda and kernels are recorded, and tensors have no memory."""
    graph = Graph()
    graph.current.append(graph.stream(MAIN))
    made = iter(("lane 0", "lane 1", "lane 2"))

    @contextmanager
    def inside(of: Stream) -> Iterator[None]:
        graph.current.append(of)
        yield
        graph.current.pop()

    def copied(lengths: torch.Tensor) -> Any:
        """Each rank has three tokens, of which two are prior ones."""
        found = [2 if graph.op == "prior" else 3] * len(lengths)
        return SimpleNamespace(tolist=lambda: found)

    class Copied(Event):
        def synchronize(self) -> None:
            graph.reads(self, "reads lengths")

    carried_out = RowLane._steps

    def named(lane: RowLane, name: str, op: Any) -> Any:
        graph.op = name
        return carried_out(lane, name, op)

    sparse = watched(graph, gpu, {"select": "select", "keep": "keep", "scatter": "scatter"})
    of_rows = watched(graph, rows_gpu, {"lookup": "look up", "sgd": "update rows"})
    record = Stream.record_event
    with ExitStack() as last:
        for where, name, what in (
            (torch.cuda, "Stream", lambda device, priority: graph.stream(next(made))),
            (torch.cuda, "stream", inside),
            (torch.cuda, "current_stream", lambda device=None: graph.current[-1]),
            (torch.Tensor, "record_stream", lambda x, stream: None),
            (row_exchange, "_copied", copied),
            (RowExchange, "device", torch.device("cuda:0")),
            (RowLane, "_steps", named),
            (Stream, "record_event", lambda stream: Copied(record(stream).at)),
            (steps, "_kernels", lambda device: sparse),
            (rows, "_kernels", lambda device: of_rows),
            (rows.cpu, "first_wrong", lambda *_: -1),
        ):
            last.enter_context(mock.patch.object(where, name, what))
        last.enter_context(FakeTensorMode())
        yield graph


def lanes_of(
    graph: Graph, exchange_of: Callable[[GradientBuffers, Transport], Exchange]
) -> tuple[StreamLanes, GradientBuffers, Exchange]:
    """Two units, an op each, on two lanes."""
    units = [Unit(str(i), ("w",), (nn.Parameter(torch.empty(500)),)) for i in range(2)]
    transport: Any = Transport(graph)
    gradients = GradientBuffers(units, transport.empty, flagged=False)
    ops = tuple(
        Op(0, (Span(n, slot.first, slot.first + slot.nbytes),), lane)
        for lane, (n, slot) in enumerate(reversed([*enumerate(gradients.slots)]))
    )
    exchange = exchange_of(gradients, transport)
    program = Program("wfbp", ops, ("0", "1"))
    lanes = StreamLanes(transport, gradients, program, exchange, Embeddings())
    exchange.begin()
    lanes.begin(False)
    return lanes, gradients, exchange


def backward(graph: Graph, lanes: StreamLanes, gradients: GradientBuffers) -> None:
    for unit in (1, 0):
        graph.do(f"backward {unit}")
        gradients.units[unit].parameters[0].grad = torch.empty(500)
        gradients.collect(unit)
        lanes.ready(unit)


def gtopk_step() -> Graph:
    with recording() as graph:
        spec: Any = GTopK(0.01, mode="gtopk")
        made: Any = lanes_of(graph, lambda g, transport: SparseExchange(spec, g, transport))  # type: ignore[arg-type]
        lanes, gradients, exchange = made
        backward(graph, lanes, gradients)
        lanes.wait_all()
        with mock.patch("torch._subclasses.fake_tensor.FakeTensor.tolist", lambda x: [1] * len(x)):
            exchange.settle()
        graph.reads(graph.stream(MAIN).record_event(), "reads: skip?")
        graph.do("step")
    return graph


def chained_step() -> Graph:
    with recording() as graph:
        made: Any = lanes_of(graph, lambda g, transport: Dense(g, transport))  # type: ignore[arg-type]
        lanes, gradients, _ = made
        backward(graph, lanes, gradients)
        for unit in (0, 1):
            for _ in lanes.arrivals(unit):
                graph.do(f"update {unit}")
            graph.do(f"forward {unit}")
    return graph


def row_step() -> Graph:
    """The second step of an embedding in batches of `prefetch`, whose tokens are known."""
    with recording() as graph:
        table = ShardedEmbedding(50, 8, group=Transport(graph))
        optimizer = RowOptimizer(torch.optim.SGD([table.weight], lr=0.1), [table])
        ids = [torch.empty(6, dtype=torch.int64) for _ in range(3)]
        schedule: Any = table.schedule
        for step in range(2):
            first = len(graph.items)
            schedule.look_up(ids[step], True)
            graph.do("forward")
            schedule.announce(ids[step + 1])
            graph.do("rest of forward")
            graph.do("backward")
            for batch in schedule._used:
                batch.leaf.grad = torch.empty_like(batch.leaf)
            schedule.end_backward()
            optimizer.step()
            graph.do("dense step")
        schedule.look_up(ids[2], True)
        graph.do("next forward")
        table.close()
    waits = [(a - first, b - first) for a, b in graph.waits if a >= first]
    return Graph(graph.items[first:], waits)


def draw(graphs: dict[str, Graph], path: Path) -> None:
    """Streams from left to right, each thing as long as any other, after all that it waits for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(graphs), 1, figsize=(13, 8.5), layout="constrained")
    for axis, (title, graph) in zip(axes, graphs.items(), strict=True):
        names = [name for name in (MAIN, "lane 0", "lane 1", HOST)
                 if any(name == stream for stream, _ in graph.items)]  # fmt: skip
        ends: dict[str, float] = {}
        at: list[float] = []
        for number, (stream, what) in enumerate(graph.items):
            needs = [at[earlier] + 1 for earlier, later in graph.waits if later == number]
            at.append(max([ends.get(stream, 0.0), *needs]))
            ends[stream] = at[-1] + 1
            y = -names.index(stream)
            fill = {MAIN: "#dbe9f6", HOST: "#f6d5d5"}.get(stream, "#fde6cf")
            axis.barh(y, 0.94, 0.5, at[-1], color=fill, edgecolor="#555555")
            axis.text(at[-1] + 0.47, y, what.replace(" ", "\n", 1), ha="center", va="center",
                      fontsize=7.5)  # fmt: skip
        for earlier, later in graph.waits:
            start, end = graph.items[earlier][0], graph.items[later][0]
            axis.annotate("", (at[later] + 0.03, -names.index(end)),
                          (at[earlier] + 0.94, -names.index(start)),
                          arrowprops={"arrowstyle": "->", "color": "#a03030"})  # fmt: skip
        axis.set_yticks([-i for i in range(len(names))], names)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks([])
        axis.set_xlim(-0.1, max(at) + 1.1)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=80)


def main() -> None:
    draw({
        "gTop-k, two layers on two lanes: the host waits once, to learn whether to skip the step":
            gtopk_step(),
        "Rows of an embedding, with prefetch: the op after the one that makes lengths reads them":
            row_step(),
        "Dense gradients, chained: each layer of the next forward pass waits for its own":
            chained_step(),
    }, PICTURE)  # fmt: skip


if __name__ == "__main__":
    main()
