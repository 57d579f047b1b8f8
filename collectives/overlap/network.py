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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import timing
from linkweave.collectives.overlap.planned import planned
from linkweave.collectives.overlap.profile import MAX_BYTES, MAX_NUMBER
from linkweave.collectives.overlap.timing import Timing
from linkweave.topology import Topology
from linkweave.topology.checks import integer, number, shown


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
    def from_topology(topology: Topology, algorithm: str = "auto") -> Network:
        """Return the network of a machine or cluster, one worker for each GPU.

        Its timings and gamma are of plans for 4 KiB to 1 GiB, simulated (`overlap.planned`). Takes
        some seconds on a machine, and minutes on a cluster of 32 nodes. Raises PlanError for an
        algorithm that it cannot run.
        """
        found, workers = planned(topology, algorithm), len(topology.gpus)
        name = topology.name if algorithm == "auto" else f"{topology.name}, {algorithm}"
        pairs = [(one.nbytes, one.seconds) for one in found.timings]
        return replace(fit(pairs, workers, found.gamma).network, name=name, timings=found.timings)

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

    def __str__(self) -> str:
        more = f", overhead {self.overhead_s * 1e3:.3f} ms" if self.overhead_s else ""
        return (
            f"{self.name}: {self.workers} workers, start-up {self.startup_s * 1e3:.3f} ms, "
            f"{self.seconds_per_byte * 1e9:.3f} ns a byte, gamma {self.gamma:g}{more}"
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
    "10GbE": (
        Network(0.0014, 1.7e-9, 1.5, 8),
    ),
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
        Network(0.0044, 5.8e-9, 2.0, 2), Network(0.0056, 7.4e-9, 2.0, 4),
        Network(0.00768, 8.2e-9, 2.0, 8),
    ),
    "1GbE-gtopk": (Network(2 * 0.000436, 9e-9, 2.0, 2),),
    "10GbE-gtopk": (Network(2 * 4.525e-05, 9.934107462565104e-10, 2.0, 2),),
}  # fmt: skip
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
