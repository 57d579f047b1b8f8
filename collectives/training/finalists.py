"""The schedules among which "auto" chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

from linkweave.collectives.overlap import Communication, Network, Profile, Schedule, plan
from linkweave.collectives.overlap.choose import AUTO_LIMIT_S
from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.policies import NAMED

SPARSE = ("ddp", "wfbp", "mg-wfbp", "asc-wfbp")
"""The policies that send layers whole, with their neighbours."""
FINALISTS = 5
"""How many schedules are tried at most."""
COST = 0.01
"""The least share of a step's computation that an all-reduce is taken to cost, for the schedules
with few."""
START_SHARE = 0.05
"""The share of a communication cut from a streamed one that its start-up and overhead may take."""


def finalists(
    profile: Profile, network: Network, cost: float = 0.0, *, chains: bool = True,
    sparse: bool = False,
) -> Iterator[Schedule]:  # fmt: skip
    """Yield up to FINALISTS schedules: the best with few all-reduces, the best with any number, the
    best with few that is not chained, DDP's, and one all-reduce after the backward pass.

    What an all-reduce takes from the computation is not known. Those with few are the best if it
    takes `cost` seconds, or the share COST if that is more, which is their network's overhead; the
    best with any number if it takes nothing. Without `chains` the first two are not chained, and
    the third is left out. `sparse`, which goes without `chains`: only policies that send layers
    whole. Takes up to about AUTO_LIMIT_S seconds.
    """
    cost = max(cost, COST * (profile.backward_s + profile.forward_s))
    costly = replace(network, overhead_s=cost)

    def few(schedule: Schedule) -> Schedule:
        note = f"planned as if each all-reduce took {cost * 1e3:.3g} ms of the computation"
        return replace(schedule, note=note)

    names = SPARSE if sparse else tuple(NAMED)
    if chains:
        yield few(plan(profile, costly, "auto", limit_s=AUTO_LIMIT_S / 2))
        yield plan(profile, network, "auto", limit_s=AUTO_LIMIT_S / 2)
    yield few(_best_unchained(profile, costly, names))
    if not chains:
        yield _best_unchained(profile, network, names)
    yield plan(profile, network, "ddp")
    yield at_once(profile, network)


def _best_unchained(profile: Profile, network: Network, names: Sequence[str]) -> Schedule:
    made = [unchained(plan(profile, network, name)) for name in names]
    return min(made, key=lambda schedule: schedule.predicted_seconds)


def at_once(profile: Profile, network: Network) -> Schedule:
    """All gradients in one all-reduce after the backward pass."""
    every = whole(profile, tuple(range(len(profile.layers))))
    return Schedule("at once", profile, network, (every,))


def unchained(schedule: Schedule) -> Schedule:
    """The schedule with a next forward pass that waits for all, so that nothing is streamed."""
    sends = tuple(replace(c, streamed=False) for c in schedule.communications)
    return replace(schedule, communications=sends, chained=False)


def unstreamed(schedule: Schedule) -> Schedule:
    """The schedule with each streamed communication cut at its pieces into several.

    A part is as small as leaves its start-up a share of `START_SHARE`, and at least a piece.
    """
    network = schedule.network
    once = network.startup_s + network.overhead_s
    least = once / (START_SHARE * (network.seconds_per_byte or 1e-12))
    made: list[Communication] = []
    numbers: list[tuple[int, ...]] = []
    for c in schedule.communications:
        after = tuple(n for other in c.after for n in numbers[other])
        parts: list[list[Any]] = [[]]
        for piece in c.pieces:
            if c.streamed and parts[-1] and sum(p.nbytes for p in parts[-1]) >= least:
                parts.append([])
            parts[-1].append(piece)
        numbers.append(tuple(range(len(made), len(made) + len(parts))))
        made += [
            replace(c, pieces=tuple(part), after=after, streamed=False) for part in parts
        ]  # fmt: skip
    return replace(schedule, communications=tuple(made))


def sent(schedule: Schedule) -> Any:
    """Equal for schedules that are carried out alike."""
    sends = [
        (replace(c, pieces=()), c.pieces if c.streamed else sorted(map(astuple, c.pieces)))
        for c in schedule.communications
    ]
    return schedule.chained, sends
