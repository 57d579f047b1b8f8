"""What an all-reduce takes on a network: a start-up, a time per byte, and contention.

An all-reduce of m bytes alone takes a + b m (ASC-WFBP, equation 3; US-Byte, equation 1). While
two of them transmit at once, a byte of each takes gamma b (ASC-WFBP, section III). The paper leaves
more than two open; here two fill the link as far as it goes, and n share what two reach: gamma b
n / 2 each. Start-ups do not slow each other down. gamma = 2 means that one fills the link already:
two at once transmit as fast as one after the other; below that they use it better. Where b and
gamma come from different fits, as the paper's do, gamma b / 2 may be faster than the wire itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.profile import MAX_NUMBER, check_count, check_number, shown


@dataclass(frozen=True, slots=True)
class Network:
    """`startup_s` a, `seconds_per_byte` b of an all-reduce over all `workers`; `gamma` above 1."""

    startup_s: float
    seconds_per_byte: float
    gamma: float = 2.0
    workers: int = 2
    name: str = "network"

    def __post_init__(self) -> None:
        check_number("startup_s", self.startup_s)
        check_number("seconds_per_byte", self.seconds_per_byte)
        check_number("gamma", self.gamma, 1.0)
        check_count("workers", self.workers, int(MAX_NUMBER))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.workers} workers, start-up {self.startup_s * 1e3:.3f} ms, "
            f"{self.seconds_per_byte * 1e9:.3f} ns a byte, gamma {self.gamma:g}"
        )

    def seconds(self, nbytes: float) -> float:
        """Of one all-reduce that has the network to itself."""
        return self.startup_s + self.seconds_per_byte * nbytes

    def crowding(self, transmitting: int) -> float:
        """By how much a byte takes longer while so many transmit."""
        return 1.0 if transmitting == 1 else self.gamma * transmitting / 2

    def fastest(self, lanes: int) -> float:
        """Seconds per byte of all together, at best, with at most so many at once."""
        return self.seconds_per_byte * (min(1.0, self.gamma / 2) if lanes > 1 else 1.0)

    def at(self, workers: int) -> Network:
        """The same links between another number of workers, in a ring (US-Byte, equation 14:
        a = 2 (N - 1) alpha, b = 2 (N - 1) / N beta, the sum's own time within beta)."""
        made = replace(self, workers=workers)
        if workers == self.workers:
            return made
        if workers == 1:
            return replace(made, startup_s=0.0, seconds_per_byte=0.0)
        if self.workers == 1:
            raise CollectiveError("one worker tells nothing about a network of more")
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
"""Fitted figures that others have published, for the workers that they measured: 10GbE: ASC-WFBP,
section VI-B, 8 nodes; -mgwfbp, 56GbIB, 1GbE (large messages): the MG-WFBP repository (without its
smallest rows of 10GbE, which are of one node); -dear: the DeAR repository, which multiplies
start-ups by hand; -gtopk: the gTop-k repository, between two nodes. All in seconds and bytes;
US-Byte's own table is left out, as it is in seconds per parameter of one machine's links."""


def network(name: str, workers: int | None = None) -> Network:
    """A preset; for other numbers of workers than those measured the nearest by equation 14.

    Raises CollectiveError.
    """
    if name not in PRESETS:
        raise CollectiveError(f"unknown network {shown(name)}; choose from {', '.join(PRESETS)}")
    known = PRESETS[name]
    if workers is None:
        workers = known[-1].workers
    check_number("workers", workers, 1)
    nearest = min(known, key=lambda row: (abs(row.workers - workers), row.workers))
    return replace(nearest.at(workers), name=name)


@dataclass(frozen=True, slots=True)
class Fit:
    """A network fitted to measured times; `r2` (1: all explained) and the largest relative error
    tell how well, `smallest` and `largest` (bytes) where it holds."""

    network: Network
    r2: float
    worst: float
    smallest: int
    largest: int


def fit(
    pairs: Sequence[tuple[int, float]], workers: int = 2, gamma: float = 2.0, name: str = "fitted"
) -> Fit:
    """Least squares of seconds over bytes, at least two different sizes; a and b are not negative.

    Raises CollectiveError.
    """
    for nbytes, seconds in pairs:
        check_number("bytes of a measurement", nbytes)
        check_number("seconds of a measurement", seconds)
    sizes = np.array([float(n) for n, _ in pairs])
    times = np.array([float(s) for _, s in pairs])
    if len(set(sizes.tolist())) < 2:
        raise CollectiveError(f"a fit needs two different sizes, not {sorted(set(sizes.tolist()))}")
    b, a = (float(x) for x in np.polyfit(sizes, times, 1))
    if b < 0:
        a, b = float(times.mean()), 0.0
    elif a < 0:
        a, b = 0.0, float(sizes @ times / (sizes @ sizes))
    left = times - (a + b * sizes)
    spread = float(((times - times.mean()) ** 2).sum())
    r2 = 1.0 - float((left**2).sum()) / spread if spread else float(not left.any())
    worst = float(np.max(np.abs(left) / np.maximum(times, 1e-12)))
    made = Network(a, b, gamma, workers, name)
    return Fit(made, r2, worst, int(sizes.min()), int(sizes.max()))
