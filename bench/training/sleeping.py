"""Training of layers that sleep, over a throttled network: schedules as predicted and as they run.

Real layers and eight ranks contend for a few cores, which no schedule predicts. A layer that sleeps
for the seconds of a profile and a network that sleeps for those of its bytes leave what a schedule
decides: what is sent when, and what waits for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linkweave import collectives
from linkweave.bench.timing import schedule as batch_scheduling
from linkweave.collectives import overlap
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.overlap import Communication, Network
from linkweave.collectives.overlap.communication import REDUCE_SCATTER
from linkweave.collectives.overlap.units import ALIGN
from linkweave.collectives.training.gtopk.options import kept_in
from linkweave.collectives.training.transport import Counts, OverCommunicator, Queue
from linkweave.collectives.training.tuner import SPARSE, after_backward, unchained

NBYTES = 4_000_000
"""Gradients, few enough for their way through memory to take no time beside the network's."""
SEARCH_S = 2.0  # for the policies that search
HEADER = f"{'policy':25}{'predicted ms':>14}{'measured ms':>13}{'error':>8}{'all-reduces':>13}"
LEGEND = "measured: the median step of the slowest rank, from the end of a forward pass to the next"


class Sleeps:
    """Sleeps that add up: what one oversleeps, the next ones sleep less. So they do for the `own`
    seconds that a layer's pass takes beside its sleep."""

    def __init__(self, own: float) -> None:
        self._late, self._own = 0.0, own

    def sleep(self, seconds: float) -> None:
        begun = time.perf_counter()
        seconds -= self._own
        if (left := seconds - self._late) > 0:
            time.sleep(left)
        self._late += time.perf_counter() - begun - seconds
        self._late = max(0.0, self._late)


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, sleeps: Sleeps, forward_s: float, backward_s: float):
        ctx.weight, ctx.sleeps, ctx.backward_s = weight, sleeps, backward_s
        sleeps.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any):
        ctx.sleeps.sleep(ctx.backward_s)
        return gradient, torch.ones_like(ctx.weight), None, None, None


class Sleeper(nn.Module):
    """A layer with so many float32 weights, whose passes take these seconds."""

    def __init__(self, layer: overlap.Layer, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layer.nbytes // 4 - ALIGN // 4))
        self._times = sleeps, layer.forward_s, layer.backward_s

    def forward(self, x: Any) -> Any:
        return _Asleep.apply(x, self.weight, *self._times)


def sleepers(layers: Sequence[overlap.Layer], own: float) -> nn.Sequential:
    """Layers that sleep, whose passes take `own` seconds beside it."""
    sleeps = Sleeps(own)
    return nn.Sequential(*(Sleeper(layer, sleeps) for layer in layers))


def own_seconds(layers: Sequence[overlap.Layer]) -> float:
    """What a pass of a layer takes beside its sleep: Python, and autograd of torch."""
    model = sleepers(layers, 0.0)
    nominal = sum(layer.forward_s + layer.backward_s for layer in layers)
    found = []
    for _ in range(4):
        model.zero_grad()
        begun = time.perf_counter()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        found.append(time.perf_counter() - begun)
    return max(0.0, statistics.median(found[1:]) - nominal) / (2 * len(layers))


def scaled(
    profile: overlap.Profile, network: overlap.Network, nbytes: int, seconds: float
) -> tuple[overlap.Profile, overlap.Network]:
    """The profile with so many bytes and seconds of computation in all, in units that a model of
    `Sleeper` has, and the network on which it has the same share of communication."""
    bytes_by = nbytes / profile.nbytes
    time_by = seconds / (profile.forward_s + profile.backward_s)
    layers = tuple(
        overlap.Layer(
            layer.name, ALIGN * max(2, round(layer.nbytes * bytes_by / ALIGN)),
            layer.forward_s * time_by, layer.backward_s * time_by,
        )
        for layer in profile.layers
    )  # fmt: skip
    slower = replace(
        network, startup_s=network.startup_s * time_by,
        seconds_per_byte=network.seconds_per_byte * time_by / bytes_by, overhead_s=0.0,
    )  # fmt: skip
    return replace(profile, layers=layers), slower


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    predicted_ms: float
    measured_ms: float
    chained: bool
    all_reduces: int

    def __str__(self) -> str:
        return (
            f"{self.policy:25}{self.predicted_ms:14.1f}{self.measured_ms:13.1f}{self.error:+8.1%}"
            f"{self.all_reduces:13}" + "  chained" * self.chained
        )

    @property
    def error(self) -> float:
        """By which share the step took longer than predicted."""
        return self.measured_ms / self.predicted_ms - 1


def plans(
    profile: overlap.Profile, network: overlap.Network, policies: Sequence[str]
) -> list[overlap.Schedule]:
    limited = ("auto", "optimal")
    return [
        overlap.plan(profile, network, name, **({"limit_s": SEARCH_S} if name in limited else {}))
        for name in policies
    ]


def even(profile: overlap.Profile) -> overlap.Profile:
    each = profile.backward_s / len(profile.layers)
    return replace(
        profile, layers=tuple(replace(layer, backward_s=each) for layer in profile.layers)
    )


def by_program(profile: overlap.Profile, network: overlap.Network) -> overlap.Schedule:
    """ASC-WFBP by the rule of its authors' program."""
    made = overlap.plan(profile, network, "asc-wfbp", rule="program")
    return replace(made, policy="asc-wfbp, program's rule")


def sparse_plans(profile: overlap.Profile, network: overlap.Network) -> list[overlap.Schedule]:
    """The schedules of an exchange of whole layers, the first of which overlaps with nothing."""
    return [after_backward(profile, network), *map(unchained, plans(profile, network, SPARSE))]


def with_unchained(schedules: Iterable[overlap.Schedule]) -> list[overlap.Schedule]:
    """The schedules, each chained one followed by the same one unchained."""
    return [
        replace(schedule, chained=chained)
        for schedule in schedules for chained in ((True, False) if schedule.chained else (False,))
    ]  # fmt: skip


def rows(
    schedules: Sequence[overlap.Schedule], ranks: int, steps: int, folder: str = "",
    density: float | None = None,
) -> list[Row]:  # fmt: skip
    """Train each schedule for some steps on so many ranks; times are medians of the slowest.

    Into `folder` goes the last step under each policy, for `linkweave train-trace`. With a
    `density` gradients are exchanged by `GTopK`.
    """
    texts = [schedule.to_json() for schedule in schedules]
    found = collectives.spawn(_rank, ranks, args=(texts, steps, folder, density), timeout=120)
    slowest = [max(column) for column in zip(*found, strict=True)]
    return [
        Row(s.policy, 1e3 * s.predicted_seconds, 1e3 * t, s.chained, s.all_reduces)
        for s, t in zip(schedules, slowest, strict=True)
    ]


def _rank(
    rank: int, texts: Sequence[str], steps: int, folder: str, density: float | None
) -> list[float]:
    batch_scheduling(True)
    torch.set_num_threads(1)
    schedules = [overlap.Schedule.from_json(text) for text in texts]
    own = own_seconds(schedules[0].profile.layers)
    found = []
    for schedule in schedules:
        save = Path(folder) / f"{schedule.policy}.json" if folder and not rank else None
        found.append(_train(schedule, own, steps, save, density))
    return found


def _train(
    schedule: overlap.Schedule, own: float, steps: int, save: Path | None, density: float | None
) -> float:
    """The median time from the end of a forward pass to the end of the next; the last step goes to
    the file `save`."""
    model = sleepers(schedule.profile.layers, own)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    comm = get_default()
    x = torch.zeros(1, requires_grad=True)
    group = Throttled(comm, schedule.network, density=density or 1.0)
    exchange: Any = "dense"
    if density is not None:
        exchange = collectives.GTopK(density, mode="gtopk")
    with collectives.DataParallel(
        model, optimizer, schedule=schedule, exchange=exchange, group=group
    ) as trained:
        trained.record_steps(save is not None)
        seconds = median_step(trained, optimizer, [x] * (steps + 2))
        trained.finish()
        if save:
            trained.save_step(save)
        wanted = -float(steps + 2)  # on average, with what has not been sent
        kept = kept_in(optimizer.state_dict()).get("residual", {})
        left = torch.tensor([sum(float(x.double().sum()) for x in kept.values()) / comm.size])
        comm.allreduce(left)
        moved = sum(float(layer.weight.detach().double().sum()) for layer in model)
        total = sum(layer.weight.numel() for layer in model)
        if abs((moved - float(left)) / total - wanted) > 1e-6 * -wanted:
            raise collectives.CollectiveError(f"{schedule.policy}: the weights are wrong")
    return seconds


def median_step(trained: Any, optimizer: Any, inputs: Iterable[Any]) -> float:
    """Train on some inputs. Returns the median time from the end of a forward pass to the end of
    the next, but for the first."""
    ends = []
    for x in inputs:
        optimizer.zero_grad()
        y = trained(x)
        ends.append(time.perf_counter())
        y.sum().backward()
        optimizer.step()
    return statistics.median(b - a for a, b in zip(ends[1:], ends[2:], strict=False))


HALF = Communication((), kind=REDUCE_SCATTER).share


class Link:
    """Bytes under way on the network of one rank."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._changed = threading.Condition()
        self._left: dict[int, float] = {}  # bytes of each transmission, as of `_then`
        self._then = 0.0
        self._made = 0

    def begin(self, nbytes: float) -> int:
        with self._changed:
            self._advance()
            self._made += 1
            self._left[self._made] = float(nbytes)
            self._changed.notify_all()
            return self._made

    def until(self, number: int, left: float) -> None:
        """Block until at most so many bytes of a transmission are left; at 0, it is over."""
        with self._changed:
            while True:
                self._advance()
                behind = self._left[number] - left
                if behind <= 1e-6:
                    break
                self._changed.wait(behind * self._pace())
            if left <= 0:
                del self._left[number]
                self._changed.notify_all()

    def _pace(self) -> float:
        return self._network.seconds_per_byte * self._network.crowding(max(1, len(self._left)))

    def _advance(self) -> None:
        now = time.perf_counter()
        if pace := self._pace():
            sent = (now - self._then) / pace
            self._left = {number: left - sent for number, left in self._left.items()}
        else:
            self._left = dict.fromkeys(self._left, 0.0)
        self._then = now


class Throttled(OverCommunicator):
    """Lanes over a communicator of one machine, slowed to a network, which others may share."""

    def __init__(
        self, communicator: Any, network: Network, link: Link | None = None, density: float = 1.0
    ) -> None:
        super().__init__(communicator)
        self._network, self._link, self._density = network, link or Link(network), density

    def average(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().average, lane, x, 1.0)

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().scatter, lane, x, HALF)

    def gather(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().gather, lane, x, HALF)

    def _slowed(self, call: Any, lane: int, x: torch.Tensor, share: float) -> None:
        begun = time.perf_counter()
        call(lane, x)
        self._link.until(self._begin(begun, x, share), 0)

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        """On a lane, the last call of a sparse exchange: for as long as the network, which is one
        of such exchanges, takes for all elements."""
        begun = time.perf_counter()
        super().broadcast(x, source, lane)
        if lane is not None:
            time.sleep(max(0.0, begun + self._network.startup_s - time.perf_counter()))
            elements = x.shape[-1] / self._density
            self._link.until(self._link.begin(4 * elements), 0)

    def alltoall(self, lane: int, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        """A message to each other rank; the network is one of all-reduces, made of messages."""
        begun = time.perf_counter()
        found = super().alltoall(lane, x, counts)
        startup, pace = self._network.message
        others = self.size - 1
        time.sleep(max(0.0, begun + others * startup - time.perf_counter()))
        sends = counts[self.rank]
        sent = (sum(sends) - sends[self.rank]) * x.element_size()
        share = pace / self._network.seconds_per_byte if self._network.seconds_per_byte else 0.0
        self._link.until(self._link.begin(sent * share), 0)
        return found

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Queue:
        begun = time.perf_counter()
        queue = super().stream(lane, x, sizes)
        return _Stream(queue, self._link, self._begin(begun, x), x.element_size(), sizes)

    def _begin(self, begun: float, x: torch.Tensor, share: float = 1.0) -> int:
        """Begin to transmit a share of an all-reduce once its start-up has passed."""
        time.sleep(max(0.0, begun + share * self._network.startup_s - time.perf_counter()))
        return self._link.begin(share * x.nbytes)


class _Stream:
    def __init__(
        self, queue: Queue, link: Link, number: int, item: int, sizes: Sequence[int]
    ) -> None:
        self._queue, self._link, self._number = queue, link, number
        self._behind = [item * sum(sizes[i + 1 :]) for i in range(len(sizes))]

    def dequeue(self, layer: int) -> None:
        self._queue.dequeue(layer)
        self._link.until(self._number, self._behind[layer])

    def wait(self) -> None:
        self._queue.wait()
