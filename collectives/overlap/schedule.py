"""Schedules: the communications of one iteration as frozen data, which a timeline predicts."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Communication,
    Piece,
)
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.timeline import StepTimeline, timeline
from linkweave.collectives.overlap.timing import timings_of
from linkweave.topology.checks import integer, read_format, shown
from linkweave.topology.text import counted, html_table

T = TypeVar("T")
_FORMAT = "linkweave-schedule"


@dataclass(frozen=True)
class Schedule:
    """A policy's communications in the order in which they are issued.

    `chained`: a layer's forward pass waits for its own gradients only; else the next iteration
    waits for all communications, as without a scheduler. Raises CollectiveError unless every byte
    of every gradient is reduced once, in pieces that begin at multiples of ALIGN bytes, and what is
    scattered is gathered afterwards.
    """

    policy: str
    profile: Profile
    network: Network
    communications: tuple[Communication, ...]
    chained: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        sent: list[list[tuple[int, int]]] = [[] for _ in self.profile.layers]
        scattered: dict[tuple[Piece, ...], int] = {}  # and not gathered: by which communication
        for number, sends in enumerate(self.communications):
            sends.check(f"{self.policy}: communication {number}", len(self.profile.layers))
            if any(not 0 <= other < number for other in sends.after):
                raise CollectiveError(
                    f"{self.policy}: communication {number} waits for {sends.after}, which must be "
                    "earlier ones"
                )
            if sends.kind == ALL_GATHER:
                source = scattered.pop(sends.pieces, -1)
                if source not in sends.after and (
                    source < 0 or self.communications[source].lane != sends.lane
                ):
                    raise CollectiveError(
                        f"{self.policy}: communication {number} gathers what no reduce-scatter of "
                        "the same pieces has left, on its lane or in its `after`"
                    )
                continue
            if sends.kind == REDUCE_SCATTER:
                scattered[sends.pieces] = number
            for piece in sends.pieces:
                sent[piece.layer].append((piece.first, piece.first + piece.nbytes))
        if scattered:
            raise CollectiveError(
                f"{self.policy}: what communication {min(scattered.values())} scatters is not "
                "gathered"
            )
        for layer, spans in zip(self.profile.layers, sent, strict=True):
            at = 0
            for first, stop in sorted(spans):
                if first != at or stop <= first:
                    raise CollectiveError(
                        f"{self.policy}: bytes {first} to {stop} of {layer.name} are sent where "
                        f"{at} are next"
                    )
                at = stop
            if at != layer.nbytes:
                raise CollectiveError(
                    f"{self.policy}: {at} of {layer.nbytes} bytes of {layer.name} are sent"
                )

    @cached_property
    def timeline(self) -> StepTimeline:
        return timeline(self.profile, self.network, self.communications, self.chained)

    @property
    def predicted_seconds(self) -> float:
        """From the start of the backward pass to the end of the next forward pass."""
        return self.timeline.seconds

    @cached_property
    def lower_bound_seconds(self) -> float:
        """No schedule of this profile and network is shorter, with up to LANES all-reduces at once
        (`overlap.bounds`)."""
        halves = any(sends.share < 1 for sends in self.communications)
        return lower_bound(self.profile, self.network, max(LANES, self.lanes), halves)

    @property
    def all_reduces(self) -> int:
        """How many; a reduce-scatter and its all-gather count as one."""
        return int(sum(sends.share for sends in self.communications))

    @property
    def lanes(self) -> int:
        return 1 + max(sends.lane for sends in self.communications)

    @property
    def gap(self) -> float:
        """How far above the lower bound, as a share of it."""
        bound = self.lower_bound_seconds
        return max(0.0, self.predicted_seconds / bound - 1) if bound else 0.0

    def explain(self) -> str:
        """What the policy does here, in numbers."""
        line, net = self.timeline, self.network
        compute = self.profile.backward_s + self.profile.forward_s
        exposed = line.seconds - compute
        startups = self.all_reduces * net.startup_s
        sending = sum(c.share * net.seconds(c.nbytes) for c in self.communications)
        words = [
            str(self.profile),
            str(net),
            f"{self.policy}: {line.seconds * 1e3:.2f} ms an iteration, of which "
            f"{exposed * 1e3:.2f} ms are communication that nothing hides; "
            f"{counted(self.all_reduces, 'all-reduce')}, whose start-ups take "
            f"{startups * 1e3:.2f} ms of {sending * 1e3:.2f} ms; "
            f"{self.gap:.1%} above the lower bound ({max(LANES, self.lanes)} all-reduces at once)",
        ]
        return "\n".join([*words, *([self.note] if self.note else [])])

    def __repr__(self) -> str:
        """A line; `print` shows all communications, `explain` what they take."""
        return (
            f"<Schedule: {self.policy} for {self.profile.name}, "
            f"{counted(self.all_reduces, 'all-reduce')}"
            f"{', chained' * self.chained}, {self.predicted_seconds * 1e3:.2f} ms an iteration>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: what the policy does here, in numbers."""
        lines = self.explain().splitlines()
        return html_table(repr(self)[1:-1], {str(i): line for i, line in enumerate(lines, 1)})

    def __str__(self) -> str:
        lines = [
            f"{self.policy} for {self.profile.name}, {counted(self.all_reduces, 'all-reduce')}"
        ]
        names = [layer.name for layer in self.profile.layers]
        for number, (sends, span) in enumerate(
            zip(self.communications, self.timeline.sends, strict=True)
        ):
            first, last = sends.pieces[0], sends.pieces[-1]
            what = names[first.layer]
            if len(sends.pieces) > 1:
                what += f" ... {names[last.layer]} ({len(sends.pieces)} pieces)"
            elif first.nbytes < self.profile.layers[first.layer].nbytes:
                what += f" [{first.first}:{first.first + first.nbytes}]"
            after = f" after {', '.join(map(str, sends.after))}" if sends.after else ""
            lines.append(
                f"{number:5} lane {sends.lane} {span[0] * 1e3:10.3f} to {span[1] * 1e3:10.3f} ms "
                f"{sends.nbytes:11} bytes  {what}{after}{'  streamed' if sends.streamed else ''}"
                + (f"  {sends.kind}" if sends.share < 1 else "")
            )
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """The schedule as JSON has it. Predictions are not part of it."""
        return {
            "format": _FORMAT, "version": 1, "policy": self.policy, "chained": self.chained,
            "note": self.note, "profile": self.profile.to_data(), "network": asdict(self.network),
            "communications": [asdict(sends) for sends in self.communications],
        }  # fmt: skip

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal schedule."""
        return json.dumps(self.to_data())

    @staticmethod
    def from_json(text: str) -> Schedule:
        """What `to_json` wrote. Raises CollectiveError for anything else."""
        data = read_format(text, _FORMAT, "schedule JSON", CollectiveError)
        try:
            return Schedule(
                _typed(data, "policy", str), Profile.from_data(data["profile"]),
                _network(data["network"]),
                tuple(map(_communication, _typed(data, "communications", list))),
                _typed(data, "chained", bool), _typed(data, "note", str),
            )  # fmt: skip
        except KeyError as error:
            raise CollectiveError(f"schedule JSON lacks {error}") from None


def _typed(data: dict[str, Any], name: str, kind: type[T]) -> T:
    if not isinstance(data[name], kind):
        raise CollectiveError(f"{name} must be a {kind.__name__}, not {shown(data[name])}")
    return data[name]  # type: ignore[no-any-return]


def _fields(row: Any, kind: type, what: str) -> dict[str, Any]:
    """The fields of a dataclass, all of them and no others. Raises CollectiveError."""
    names = sorted(field.name for field in fields(kind))
    if not isinstance(row, dict) or sorted(row) != names:
        raise CollectiveError(
            f"schedule JSON: a {what} must be an object of {', '.join(names)}, not {shown(row)}"
        )
    return row


def _network(row: Any) -> Network:
    if isinstance(row, dict):
        row = {"timings": [], "overhead_s": 0.0, **row}  # which older files do not have
    found = _fields(row, Network, "network")
    return Network(**{**found, "timings": timings_of(found["timings"], "schedule JSON")})


def _communication(row: Any) -> Communication:
    if isinstance(row, dict):
        row = {"kind": ALL_REDUCE, **row}  # which older files do not have
    found = _fields(row, Communication, "communication")
    pieces = (Piece(**_fields(p, Piece, "piece")) for p in _typed(found, "pieces", list))
    after = tuple(integer(n, "a number in after", 0) for n in _typed(found, "after", list))
    streamed = _typed(found, "streamed", bool)
    kind = _typed(found, "kind", str)
    return Communication(tuple(pieces), found["lane"], after, streamed, kind)


def preemptive(heads: Sequence[float], times: Sequence[float], tails: Sequence[float]) -> float:
    """Return the largest end + tail of jobs on one machine that may be interrupted; 0 without jobs.

    At each moment the job with the longest tail runs, among those whose head has passed: Jackson's
    preemptive schedule, which is optimal (1 | r, q, pmtn | Cmax).
    """
    coming = sorted(range(len(heads)), key=lambda i: heads[i])
    waiting: list[list[float]] = []  # [-tail, time left]
    now = worst = 0.0
    at = 0
    while at < len(coming) or waiting:
        if not waiting:
            now = max(now, heads[coming[at]])
        while at < len(coming) and heads[coming[at]] <= now:
            heapq.heappush(waiting, [-tails[coming[at]], times[coming[at]]])
            at += 1
        top = waiting[0]
        until = heads[coming[at]] if at < len(coming) else float("inf")
        if now + top[1] <= until:
            now += top[1]
            worst = max(worst, now - top[0])
            heapq.heappop(waiting)
        else:
            top[1] -= until - now
            now = until
    return worst


def jackson(profile: Profile, startup_s: float, seconds_per_byte: float) -> float:
    """Return the end of the forward pass (s) if bytes could be sent one by one.

    A byte may be sent once its gradient is ready and a start-up has passed. The first layer's bytes
    go first among those that may be sent.
    """
    heads = [there + startup_s for there in profile.ready]
    times = [seconds_per_byte * layer.nbytes for layer in profile.layers]
    sent = preemptive(heads, times, profile.tails)
    return max(sent, profile.backward_s + profile.forward_s)


LANES = 4
"""The most all-reduces at once, for the lower bound and for `optimal`."""


def lower_bound(
    profile: Profile, network: Network, lanes: int = LANES, halves: bool = False
) -> float:
    """Return seconds that no iteration beats, with at most `lanes` all-reduces at once.

    Every schedule of `overlap.timeline` transmits a byte after its gradient is ready and the
    start-up of its communication has passed. All lanes together transmit no faster than
    `Network.least` and `Network.sharing` say. A layer's forward pass, and all passes after it,
    start after its last byte. Jackson's schedule with heads r + a and no further start-up is
    therefore no longer than any other. It includes the capacity bound (all bytes after the first
    gradient) and the bound of each layer alone. With `halves` the bound is one for schedules of
    reduce-scatters and all-gathers, too: those transmit after half of a start-up, but a layer
    waits for both.
    """
    startup, pace = network.least
    pace *= network.sharing(lanes)
    if not halves:
        return jackson(profile, startup, pace)
    each = zip(profile.layers, profile.ready, profile.tails, strict=True)
    alone = (there + startup + pace * layer.nbytes + tail for layer, there, tail in each)
    return max(jackson(profile, startup / 2, pace), *alone)
