"""The time of all-reduces on a network: start-up, time per byte, and contention.

An all-reduce of m bytes alone takes a + b m seconds (ASC-WFBP, equation 3; US-Byte, equation 1).
While two all-reduces transmit simultaneously, a byte of each takes gamma b (ASC-WFBP, section III).
The paper does not define the case of more than two; here two of them saturate the link, so that a
byte of each of n takes gamma b n / 2. Start-ups do not slow each other down. With gamma = 2 a
single all-reduce saturates the link; with a smaller gamma, simultaneous ones use it better. If b
and gamma come from different fits, like the paper's, gamma b / 2 may exceed the link's speed.

A network that was planned on a topology, or measured, knows more than two numbers: `timings` has
the time of an all-reduce by size, which no a + b m fits where the algorithm changes with the size,
and when the parts of a gradient queue arrive. Policies decide by a and b, a fit; timelines follow
the timings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import timing
from linkweave.collectives.overlap.profile import MAX_BYTES, MAX_NUMBER
from linkweave.collectives.overlap.timing import SHARES, Timing, timings_of
from linkweave.collectives.planning.algorithms.registry import Named
from linkweave.collectives.planning.collective import ALLREDUCE
from linkweave.collectives.planning.equations import gtopk_seconds, topk_seconds
from linkweave.collectives.planning.plan import Plan, Step
from linkweave.collectives.planning.planner import choose, plan_collective, predict
from linkweave.collectives.planning.simulate import Timeline, simulate
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer, number, parse_json, shown
from linkweave.topology.text import counted


@dataclass(frozen=True)
class Network:
    """The parameters a (`startup_s`), b (`seconds_per_byte`) and `gamma` (at least 1) of an
    all-reduce over all `workers`, and its `timings` by size, if they are known. Raises
    CollectiveError for numbers out of range.

    overhead_s: by how much each all-reduce prolongs the computation beside it, whenever it runs,
        because it needs the processor (the overhead o of LogP, Culler et al. 1993).
    """

    startup_s: float
    seconds_per_byte: float
    gamma: float = 2.0
    workers: int = 2
    name: str = "network"
    timings: tuple[Timing, ...] = ()
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise CollectiveError(f"name must be text, not {shown(self.name)}")
        number(self.startup_s, "startup_s", 0, MAX_NUMBER)
        number(self.seconds_per_byte, "seconds_per_byte", 0, MAX_NUMBER)
        number(self.gamma, "gamma", 1, MAX_NUMBER)
        number(self.overhead_s, "overhead_s", 0, MAX_NUMBER)
        workers = integer(self.workers, "workers", 1, int(MAX_NUMBER))
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "timings", timing.checked(self.timings))

    @staticmethod
    def from_topology(topology: Topology | str, algorithm: Named = "auto") -> Network:
        """Return the network of a machine or cluster, one worker for each GPU.

        All-reduces of 4 KiB to 1 GiB are planned and simulated, alone, as gradient queues, and two
        at once. With "auto" each size takes the algorithm that `planner.choose` takes; queues take
        the one whose first chunk is final earliest, as at run time. Takes some seconds on a
        machine, and minutes on a cluster of 32 nodes. Raises PlanError for an algorithm that it
        cannot run.
        """
        topology = load(topology)
        timings = tuple(_timing(topology, nbytes, algorithm) for nbytes in SIZES)
        gamma, name = contention(topology, algorithm), topology.name
        made = fit([(t.nbytes, t.seconds) for t in timings], len(topology.gpus), gamma).network
        if algorithm != "auto":
            name = f"{name}, {algorithm if isinstance(algorithm, str) else algorithm.__name__}"
        return replace(made, name=name, timings=timings)

    @staticmethod
    def from_measurements(
        pairs: Iterable[tuple[int, float]], workers: int = 2, gamma: float = 2.0
    ) -> Network:
        """Return the network of measured all-reduces, pairs of bytes and seconds in any order.

        Of several of one size the median counts. Where a size took less than a smaller one, both
        and all between them get their median, the lower of two. Raises CollectiveError for numbers
        out of range and for fewer than two sizes.
        """
        by_size: dict[int, list[float]] = {}
        for nbytes, seconds in _in_range(pairs):
            by_size.setdefault(nbytes, []).append(seconds)
        sizes = sorted(by_size)
        medians = [float(np.median(by_size[size])) for size in sizes]
        made = fit(list(zip(sizes, medians, strict=True)), workers, gamma).network
        timings = tuple(map(Timing, sizes, timing.increasing(medians)))
        return replace(made, name="measured", timings=timings)

    def __repr__(self) -> str:
        return f"<Network {self}>"

    def __str__(self) -> str:
        more = f", overhead {self.overhead_s * 1e3:.3f} ms" if self.overhead_s else ""
        return (
            f"{self.name}: {counted(self.workers, 'worker')}, start-up {self.startup_s * 1e3:.3f} "
            f"ms, {self.seconds_per_byte * 1e9:.3f} ns a byte, gamma {self.gamma:.3g}{more}"
        )

    def seconds(self, nbytes: float) -> float:
        """Return the time of an all-reduce that has the network to itself."""
        if self.timings:
            return timing.seconds(self.timings, nbytes)
        return self.startup_s + self.seconds_per_byte * nbytes

    def arrivals(self, nbytes: float, upto: Iterable[float]) -> list[float]:
        """Return when the first so many bytes of a gradient queue's all-reduce of `nbytes` are
        final, in seconds after its start. Increasing numbers are expected."""
        if self.timings and self.timings[0].arrivals:
            return timing.arrivals(self.timings, nbytes, upto)
        startup, pace = self.startup(nbytes), self.least[1]
        return [startup + pace * some for some in upto]

    @cached_property
    def least(self) -> tuple[float, float]:
        """The start-up and the seconds per byte that no all-reduce of the network beats."""
        if self.timings:
            return timing.fastest(self.timings)
        return self.startup_s, self.seconds_per_byte

    def startup(self, nbytes: float) -> float:
        """Return the part of `seconds` in which an all-reduce does not transmit at its best pace,
        that of `least`."""
        if self.timings:
            return self.seconds(nbytes) - self.least[1] * nbytes
        return self.startup_s

    @property
    def message(self) -> tuple[float, float]:
        """The start-up in seconds and the seconds per byte of one message, if a ring carries out
        the all-reduce in 2 (N - 1) messages of an Nth of the bytes (US-Byte, equation 14)."""
        steps = max(1, self.workers - 1)
        return self.startup_s / (2 * steps), self.seconds_per_byte * self.workers / (2 * steps)

    def crowding(self, transmitting: int) -> float:
        """Return the factor by which a byte takes longer while so many all-reduces transmit."""
        return 1.0 if transmitting == 1 else self.gamma * transmitting / 2

    def sharing(self, lanes: int) -> float:
        """Return the factor by which a byte of all together is faster at most, with at most
        `lanes` all-reduces at once."""
        return min(1.0, self.gamma / 2) if lanes > 1 else 1.0

    def at(self, workers: int) -> Network:
        """Return the network with other workers in a ring of the same links.

        US-Byte, equation 14: a = 2 (N - 1) alpha, b = 2 (N - 1) / N beta, where beta includes the
        time to add. Raises CollectiveError, also for a network with timings, which hold for its own
        workers only.
        """
        made = replace(self, workers=workers)
        if workers == self.workers:
            return made
        if self.timings:
            raise CollectiveError(
                f"{self.name} has timings of {self.workers} workers, which determine none of "
                f"{shown(workers)}"
            )
        if workers == 1:
            return replace(made, startup_s=0.0, seconds_per_byte=0.0)
        if self.workers == 1:
            raise CollectiveError("a network of one worker does not determine one of several")
        steps = (workers - 1) / (self.workers - 1)
        share = steps * self.workers / workers
        return replace(
            made, startup_s=self.startup_s * steps, seconds_per_byte=self.seconds_per_byte * share
        )


PRESETS: dict[str, tuple[Network, ...]] = {
    "10GbE": (Network(0.0014, 1.7e-9, 1.5, 8),),
    "10GbE-mgwfbp": (
        Network(5.230272768511732e-4, 8.570746975492128e-10, 2.0, 8),
        Network(9.080981007148093e-4, 7.395651186836712e-10, 2.0, 16),
    ),
    "10GbE-dear": (
        Network(0.004042923236574415, 8.643300782166769e-10, 2.0, 32),
        Network(0.0055429232365744145, 9.643300782166768e-10, 2.0, 48),
        Network(0.007042923236574414, 9.643300782166768e-10, 2.0, 64),
    ),
    "56GbIB": (
        Network(2.554691138304671e-06, 9.837548167872609e-11, 2.0, 2),
        Network(4.204298980348825e-05, 2.0589360830118177e-10, 2.0, 4),
        Network(9.75367204301171e-05, 3.0568230536676206e-10, 2.0, 8),
        Network(2.3583677659915685e-4, 4.0594787739537565e-10, 2.0, 16),
    ),
    "1GbE": (
        Network(0.0044, 5.8e-9, 2.0, 2),
        Network(0.0056, 7.4e-9, 2.0, 4),
        Network(0.00768, 8.2e-9, 2.0, 8),
    ),
    "1GbE-gtopk": (Network(2 * 0.000436, 9e-9, 2.0, 2),),
    "10GbE-gtopk": (Network(2 * 4.525e-05, 9.934107462565104e-10, 2.0, 2),),
}
"""Published fits, for the numbers of workers that were measured, in seconds and bytes.

10GbE: ASC-WFBP, section VI-B, 8 nodes. 10GbE-mgwfbp, 56GbIB, 1GbE (large messages): the MG-WFBP
repository, without the smallest rows of 10GbE, which were measured on one node. 10GbE-dear: the
DeAR repository, which scales start-ups by hand. -gtopk: the gTop-k repository, between two nodes.
US-Byte's table is not included, because it gives seconds per parameter on one machine."""


def network(name: str, workers: int | None = None) -> Network:
    """Return a preset, scaled by US-Byte's equation 14 from the nearest number of workers.

    Raises CollectiveError for an unknown name.
    """
    if name not in PRESETS:
        raise CollectiveError(f"unknown network {shown(name)}; choose from {', '.join(PRESETS)}")
    known = PRESETS[name]
    if workers is None:
        workers = known[-1].workers
    workers = integer(workers, "workers", 1, int(MAX_NUMBER))
    nearest = min(known, key=lambda row: (abs(row.workers - workers), row.workers))
    return replace(nearest.at(workers), name=name)


@dataclass(frozen=True, slots=True)
class Fit:
    """A network fitted to measured times.

    `r2` is the coefficient of determination, `worst` the largest relative error.
    """

    network: Network
    r2: float
    worst: float


def fit(pairs: Sequence[tuple[int, float]], workers: int = 2, gamma: float = 2.0) -> Fit:
    """Return the fit with the least squares of relative errors, with a and b at least 0, to pairs
    of bytes and seconds.

    Raises CollectiveError for fewer than two different sizes.
    """
    pairs = _in_range(pairs)
    sizes = np.array([float(n) for n, _ in pairs])
    times = np.array([float(s) for _, s in pairs])
    if len(set(sizes.tolist())) < 2:
        raise CollectiveError(f"a fit needs two different sizes, not {sorted(set(sizes.tolist()))}")
    weights = 1 / np.maximum(times, 1e-12)
    b, a = (float(x) for x in np.polyfit(sizes, times, 1, w=weights))
    if b < 0:
        a, b = float(weights.sum() / (weights @ weights)), 0.0
    elif a < 0:
        shares = sizes * weights
        a, b = 0.0, float(shares.sum() / (shares @ shares))
    left = times - (a + b * sizes)
    spread = float(((times - times.mean()) ** 2).sum())
    r2 = 1.0 - float((left**2).sum()) / spread if spread else float(not left.any())
    worst = float(np.max(np.abs(left) / np.maximum(times, 1e-12)))
    return Fit(Network(a, b, gamma, workers, "fitted"), r2, worst)


def _in_range(pairs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The pairs of bytes and seconds. Raises CollectiveError for numbers out of range."""
    found = list(pairs)
    for nbytes, seconds in found:
        number(nbytes, "bytes of a measurement", 0, MAX_BYTES)
        number(seconds, "seconds of a measurement", 0, MAX_NUMBER)
    return found


_EXPONENTS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_FIELDS = (  # of JSON
    "startup_s", "seconds_per_byte", "gamma", "workers", "name", "timings", "overhead_s"
)  # fmt: skip


def network_from(spec: str, workers: int | None = None) -> Network:
    """Return the network that `spec` describes, for so many workers.

    It is a preset's name; "a=2ms,b=1.1ns" with the start-up a and the time per byte b (in s, ms, us
    or ns), and optionally gamma and workers; or a JSON file, either of a Network's own fields or of
    `linkweave bench network`, whose workers are machines. If `spec` says for how many workers its
    times are, `Network.at` scales them to `workers`; otherwise they are taken to be for `workers`
    (2 by default). Raises CollectiveError.
    """
    if spec in PRESETS:
        return network(spec, workers)
    if os.path.isfile(spec):
        fields = _read(Path(spec))
    elif "=" in spec:
        fields = _parse(spec)
    else:
        raise CollectiveError(
            f"network {shown(spec)} is neither a file nor a preset; presets are "
            f"{', '.join(PRESETS)}; or give the start-up and the time per byte, as a=2ms,b=1.1ns; "
            "linkweave predict takes a cluster, such as '4 x dgx-a100 nic=12.5GB/s', instead"
        )
    if workers is None:
        return Network(**fields)
    return Network(**{"workers": workers, **fields}).at(workers)


def _read(path: Path) -> dict[str, Any]:
    where = f"network {shown(str(path))}"
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise CollectiveError(f"{where} is not a text file") from None
    try:
        data = parse_json(text, where, CollectiveError)
    except CollectiveError:
        if text.lstrip()[:1] in ("", "{", "["):
            raise
        raise CollectiveError(
            f"{where} is no JSON, such as linkweave bench network writes; linkweave predict takes "
            "machines instead"
        ) from None
    if isinstance(data, dict) and "network" in data:  # a ClusterMap's
        data = data["network"]
    if not isinstance(data, dict):
        raise CollectiveError(
            f"{where}: needs an object of {', '.join(_FIELDS)}, not {shown(data)}"
        )
    if unknown := [field for field in data if field not in _FIELDS]:
        raise CollectiveError(
            f"{where}: unknown field {shown(unknown[0])}; fields are {', '.join(_FIELDS)}"
        )
    for field in ("startup_s", "seconds_per_byte"):
        if field not in data:
            raise CollectiveError(f"{where} has no {field}")
    timings = timings_of(data.get("timings", []), where)
    return {"name": path.stem, **data, "timings": timings}


def _parse(spec: str) -> dict[str, Any]:
    """Read "a=2ms,b=1.1ns,gamma=1.5,workers=8"."""
    where = f"network {shown(spec)}"
    known: dict[str, tuple[str, Callable[[str], float], str]] = {
        "a": ("startup_s", _seconds, "a time such as 2ms, in s, ms, us or ns"),
        "b": ("seconds_per_byte", _seconds, "a time per byte such as 1.1ns, in s, ms, us or ns"),
        "gamma": ("gamma", float, "a number"),
        "workers": ("workers", int, "an integer"),
    }
    found: dict[str, Any] = {"name": spec}
    for part in spec.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in known:
            raise CollectiveError(f"{where}: unknown {shown(key)}; known are {', '.join(known)}")
        field, read, what = known[key]
        if field in found:
            raise CollectiveError(f"{where}: {key} is given twice")
        try:
            found[field] = read(value)
        except ValueError:
            raise CollectiveError(f"{where}: {key} must be {what}, not {shown(value)}") from None
    for key in ("a", "b"):
        if known[key][0] not in found:
            raise CollectiveError(f"{where} has no {key}; it is like a=2ms,b=1.1ns")
    return found


def _seconds(text: str) -> float:
    number = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([mun]?s)", text, re.ASCII)
    if number is None:
        raise ValueError(text)
    return float(f"{number[1]}e{_EXPONENTS[number[2]]}")


SIZES = tuple(1 << i for i in range(12, 31))
"""Bytes of the all-reduces that are planned: 4 KiB to 1 GiB."""
LARGE = 1 << 26
"""Bytes of the all-reduces from which `contention` is found."""


def _timing(topology: Topology, nbytes: int, algorithm: Named) -> Timing:
    queue = plan_collective(ALLREDUCE, topology, nbytes, 0, algorithm, queued=True)
    line = simulate(queue, topology, nbytes)
    chosen = choose(topology, nbytes) if algorithm == "auto" else algorithm
    return Timing(nbytes, predict(topology, nbytes, chosen)[0], arrivals_of(line))


def arrivals_of(line: Timeline) -> tuple[float, ...]:
    """`Timing.arrivals` of a simulated all-reduce.

    The first bytes up to some chunk are final once that chunk and all before it are: a gradient
    queue hands out layers in the buffer's order.
    """
    upto = np.maximum.accumulate(line.chunk_seconds)
    chunk = line.plan.chunk_bytes(line.nbytes)
    ends = [max(1, -(-line.nbytes * part // SHARES)) for part in range(1, SHARES + 1)]
    return (float(upto[0]), *(float(upto[(end - 1) // chunk]) for end in ends))


def contention(topology: Topology, algorithm: Named = "auto") -> float:
    """Return gamma (`overlap.network`): how many times longer a byte takes while a second
    all-reduce by the same plan is under way.

    Both are simulated as one plan, whose links they share: 1 if they have links enough for both,
    2 or slightly more if one of them alone saturates the links that it needs.
    """
    plan = plan_collective(ALLREDUCE, topology, LARGE, 0, algorithm)
    if not plan.connections:
        return 1.0
    both = simulate(twice(plan), topology, 2 * LARGE).seconds
    return max(1.0, both / simulate(plan, topology, LARGE).seconds)


def twice(plan: Plan) -> Plan:
    """Two all-reduces at once by the same plan, as one plan of twice as many chunks, which deals
    every other group of chunks to the second one's channels. It is to be simulated, not run."""
    channels = 1 + max(track.channel for track in plan.tracks)
    beside = tuple(
        replace(c, src_channel=c.src_channel + channels, dst_channel=c.dst_channel + channels)
        for c in plan.connections
    )
    tracks = tuple(
        replace(
            track, channel=track.channel + channels,
            phases=tuple(tuple(_moved(step, plan) for step in body) for body in track.phases),
        )
        for track in plan.tracks
    )  # fmt: skip
    return replace(
        plan, num_chunks=2 * plan.num_chunks, stride=2 * plan.stride, exclusive=False,
        connections=(*plan.connections, *beside), tracks=(*plan.tracks, *tracks),
    )  # fmt: skip


def _moved(step: Step, plan: Plan) -> Step:
    """A step of the second all-reduce."""
    return replace(
        step, chunk=step.chunk + plan.stride,
        connections=tuple(i + len(plan.connections) for i in step.connections),
        source=None if step.source is None else step.source + len(plan.connections),
    )  # fmt: skip


ENTRY = 8
"""Bytes of an entry: a float32 value and an int32 index."""


def sparse_seconds(network: Network, nbytes: float, entries: float) -> dict[str, float]:
    """The seconds of each way to add gradients of `nbytes`, with so many entries from each rank.

    The start-up and the time per byte of a message are those of which a ring's all-reduce is made
    (equation 5). "gtopk" takes ceil(log2 P) rounds up and as many down (equation 7), "topk" gathers
    all entries (equation 6), "dense" is the all-reduce of all bytes.
    """
    rounds = (network.workers - 1).bit_length()
    alpha, pace = network.message
    message = ENTRY * entries * pace
    return {
        "gtopk": gtopk_seconds(rounds, alpha, message),
        "topk": topk_seconds(network.workers, rounds, alpha, message),
        "dense": network.seconds(nbytes),
    }
