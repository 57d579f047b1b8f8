"""What is sent when: frozen data that a timeline predicts and any runtime can follow."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.bounds import LANES, lower_bound
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import MAX_BYTES, Profile, check_count, shown
from linkweave.collectives.overlap.timeline import StepTimeline, timeline

ALIGN = 16
"""Bytes: where gradients may be cut, so that no element is, of whatever dtype."""
MAX_LANES = 64
"""All-reduces at once that a policy may be asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [first, first + nbytes) of a layer's gradient."""

    layer: int
    first: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Communication:
    """One all-reduce of the pieces, on a lane. It starts once its gradients are there, the one
    before it on its lane is over, and those in `after` (numbers of communications) are.

    `streamed`: pieces are final one after another, in their order, as a gradient queue delivers
    them; else all are at the end.
    """

    pieces: tuple[Piece, ...]
    lane: int = 0
    after: tuple[int, ...] = ()
    streamed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Schedule:
    """A policy's communications in the order in which they are issued.

    `chained`: a layer's forward pass waits for its own gradients only; else the next iteration
    waits for all communications, as without a scheduler. Raises CollectiveError unless every byte
    of every gradient is sent once, in pieces that begin at multiples of ALIGN bytes.
    """

    policy: str
    profile: Profile
    network: Network
    communications: tuple[Communication, ...]
    chained: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        sent: list[list[tuple[int, int]]] = [[] for _ in self.profile.layers]
        for number, sends in enumerate(self.communications):
            _check(self.policy, number, sends, len(self.profile.layers))
            if any(not 0 <= other < number for other in sends.after):
                raise CollectiveError(
                    f"{self.policy}: communication {number} waits for {sends.after}, which must be "
                    "earlier ones"
                )
            for piece in sends.pieces:
                sent[piece.layer].append((piece.first, piece.first + piece.nbytes))
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
        return lower_bound(self.profile, self.network, max(LANES, self.lanes))

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
        startups = len(self.communications) * net.startup_s
        words = [
            str(self.profile),
            str(net),
            f"{self.policy}: {line.seconds * 1e3:.2f} ms an iteration, of which "
            f"{exposed * 1e3:.2f} ms are communication that nothing hides; "
            f"{len(self.communications)} all-reduces, whose start-ups take {startups * 1e3:.2f} ms "
            f"of {sum(map(net.seconds, (c.nbytes for c in self.communications))) * 1e3:.2f} ms; "
            f"{self.gap:.1%} above what no schedule with {max(LANES, self.lanes)} at once can beat",
        ]
        return "\n".join([*words, *([self.note] if self.note else [])])

    def __str__(self) -> str:
        lines = [f"{self.policy} for {self.profile.name}, {len(self.communications)} all-reduces"]
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
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The communications, and what was predicted."""
        return json.dumps({
            "policy": self.policy, "profile": self.profile.name, "chained": self.chained,
            "synthetic": self.profile.synthetic, "network": asdict(self.network),
            "predicted_seconds": self.predicted_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "communications": [asdict(sends) for sends in self.communications],
        })  # fmt: skip


def _check(policy: str, number: int, sends: Communication, layers: int) -> None:
    """Raise CollectiveError for what no runtime could carry out."""
    where = f"{policy}: communication {number}"
    if not sends.pieces:
        raise CollectiveError(f"{where} has no pieces")
    numbers = [("lane", sends.lane)]
    for piece in sends.pieces:
        numbers += [("layer", piece.layer), ("first", piece.first), ("nbytes", piece.nbytes)]
    for name, value in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CollectiveError(f"{where}: {name} must be an integer >= 0, not {shown(value)}")
        if value > MAX_BYTES:
            raise CollectiveError(f"{where}: {name} must be at most {MAX_BYTES}")
    for piece in sends.pieces:
        if piece.layer >= layers:
            raise CollectiveError(f"{where}: there are {layers} layers, and no {piece.layer}")
        if piece.first % ALIGN:
            raise CollectiveError(
                f"{where}: a piece begins at byte {piece.first}, which is no multiple of {ALIGN}"
            )


def partition_of(value: object) -> int:
    """A size of blocks, in bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % ALIGN:
        raise CollectiveError(
            f"partition must be a positive multiple of {ALIGN} bytes, not {shown(value)}"
        )
    return check_count("partition", value, MAX_BYTES)


def whole(profile: Profile, layers: tuple[int, ...], **extra: object) -> Communication:
    """One communication of all of these layers' gradients."""
    pieces = tuple(Piece(i, 0, profile.layers[i].nbytes) for i in layers)
    return Communication(pieces, **extra)  # type: ignore[arg-type]
