"""The plan: what each rank does, in order, on each channel. Frozen data that knows no bytes.

A plan is a set of *tracks*, one for each (rank, channel) that has work, and of *connections*
between tracks. A track repeats its steps for every group of `stride` chunks, so the size of a plan
does not depend on the number of chunks. A connection is an ordered queue from one track to
another: a ring of `slots` buffers at the receiver, and two counters, data-ready and slot-free.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import COLLECTIVES, Collective, Root, check
from linkweave.collectives.planning.layout import block_table, chunk_bytes
from linkweave.topology import Vertex
from linkweave.topology.checks import integer, read_format, shown
from linkweave.topology.text import html_table

_PLAIN = ("algorithm", "collective", "size", "num_chunks", "stride", "slots", "exclusive")
"""The fields of a plan that JSON holds as they are."""


class Op(IntEnum):
    """The kinds of steps. Their values are the device encoding: append, never renumber."""

    SEND = 0
    """Write the own chunk, or the slot of `source` (forwarding), into the next slot of each
    connection. The data is read once and sent over all links at the same time."""
    REDUCE = 1
    """Combine the own chunk with the next slot of each connection, in that order. The own value is
    the first operand, or comes after the first `ahead` connections."""
    COPY = 2
    """Overwrite the own chunk with the next slot of the connection: the final value."""
    SIGNAL = 3
    """Raise a counter of the connection: data-ready at its sender, slot-free at its receiver."""
    WAIT = 4
    """Wait for the other end's signal: slot-free at the sender, data-ready at the receiver."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. `chunk` counts from the first chunk of the track's current group."""

    op: Op
    connections: tuple[int, ...]
    chunk: int
    source: int | None = None
    """SEND only: the connection whose slot is forwarded."""
    last: bool = False
    """REDUCE only: whether this completes the chunk (an average divides here)."""
    ahead: int = 0
    """REDUCE only: how many of the connections come before the rank's own value."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A queue from one track to another, over the vertices of `path`.

    Between two tracks of one rank it carries no data (`path` is empty), only order.
    """

    src: int
    src_channel: int
    dst: int
    dst_channel: int
    path: tuple[Vertex, ...] = ()

    @property
    def local(self) -> bool:
        """Whether both tracks belong to one rank."""
        return self.src == self.dst

    @property
    def links(self) -> tuple[tuple[Vertex, Vertex], ...]:
        """The ends of each link on the path."""
        return tuple(pairwise(self.path))

    def __str__(self) -> str:
        via = "".join(f" over {v}" for v in self.path[1:-1])
        channels = f"ch {self.src_channel}"
        if self.dst_channel != self.src_channel:
            channels += f" -> ch {self.dst_channel}"
        return f"{self.src} -> {self.dst} {channels}{via}"


@dataclass(frozen=True, slots=True)
class Track:
    """The steps of one rank on one channel: a tuple for each phase, repeated for every group."""

    rank: int
    channel: int
    phases: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A collective, ready to be verified, simulated or run.

    `num_chunks` is the total over all trees. Groups of `stride` chunks repeat the same steps; a
    step whose chunk would be `num_chunks` or more does nothing. `exclusive` claims that no directed
    link carries more connections than it has physical links. `root` is the root's rank in a
    broadcast or a reduce, and the pairs of a sendrecv. Raises PlanError for numbers outside
    `LIMITS`, and for chunks that do not divide into the collective's blocks.
    """

    algorithm: str
    collective: str
    size: int
    num_chunks: int
    stride: int
    slots: int
    connections: tuple[Connection, ...]
    tracks: tuple[Track, ...]
    trees: tuple[Tree, ...] = ()
    detours: tuple[tuple[int, ...], ...] = ()
    """(rank, forwarding ranks, rank), listed once for both directions."""
    exclusive: bool = True
    root: Root = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = integer(getattr(self, name), name, 1, most, PlanError)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "root", check(self.collective, self.size, self.root))
        if self.definition.cells(self.size, self.stride) > MOST_CELLS:
            raise PlanError(
                f"a group of {self.stride} chunks on {self.size} ranks is too large: all ranks "
                f"together may have at most {MOST_CELLS} of its chunks"
            )
        unit = self.definition.layout.blocks(self.size)
        if self.stride % unit or (unit > 1 and self.num_chunks % self.stride):
            raise PlanError(
                f"{self.collective} needs whole groups of a multiple of {unit} chunks, not "
                f"{self.num_chunks} in groups of {self.stride}"
            )

    def __repr__(self) -> str:
        """A line; `print` shows all steps."""
        return f"<Plan: {self._first_line}>"

    def _repr_html_(self) -> str:
        """For notebooks: what the plan is made of, without its steps."""
        return html_table(f"Plan: {self._first_line}", {
            **{f"tree {i}": f"root {tree.root}, depth {tree.depth}"
               for i, tree in enumerate(self.trees, 1)},
            **{f"detour {i}": f"{a} - {b} over {', '.join(map(str, via))}"
               for i, (a, *via, b) in enumerate(self.detours, 1)},
            "tracks": str(len(self.tracks)), "connections": str(len(self.connections)),
            **{f"note {i}": note for i, note in enumerate(self.notes, 1)},
        })  # fmt: skip

    @property
    def _first_line(self) -> str:
        return (
            f"{self.collective} by {self.algorithm}: {self.size} ranks, {self.num_chunks} chunks "
            f"in groups of {self.stride}, {self.slots} slots a connection, "
            + ("exclusive links" if self.exclusive else "shared links")
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.algorithm, self.size, self.tracks))

    def __hash__(self) -> int:
        return self._hash

    @property
    def definition(self) -> Collective:
        """What the plan's collective promises."""
        return COLLECTIVES[self.collective]

    @property
    def groups(self) -> int:
        """How often each phase repeats."""
        return -(-self.num_chunks // self.stride)

    @property
    def link_use(self) -> dict[tuple[Vertex, Vertex], int]:
        """The number of connections over each directed link."""
        return dict(Counter(link for c in self.connections for link in c.links))

    def with_chunks(self, num_chunks: int) -> Plan:
        """Return the same plan over another number of chunks."""
        made = replace(self, num_chunks=num_chunks)
        made.__dict__["_hash"] = self._hash  # the same for any number, and slow to compute
        return made

    def steps(self, track: Track) -> Iterator[tuple[int, int, Step]]:
        """Yield (position in the track's code, chunk, step) for every step of an execution."""
        base = 0
        for body in track.phases:
            for first in range(0, self.num_chunks, self.stride):
                for at, step in enumerate(body, base):
                    if first + step.chunk < self.num_chunks:
                        yield at, first + step.chunk, step
            base += len(body)

    # ---- bytes -------------------------------------------------------------------------------
    def chunk_bounds(self, nbytes: int, rank: int = 0) -> list[tuple[int, int]]:
        """Return [start, stop) of each chunk in the rank's buffer; late chunks may be empty.

        `nbytes` is the rank's message; `layout.block_table` tells where its blocks lie. Chunks that
        the rank only passes on are (0, 0).
        """
        table = block_table(self.collective, self.size, rank, nbytes)
        block, start, stop = self._cut(table)
        has = self.definition.has_chunk
        mine = np.array([has(self.size, rank, b) for b in range(len(table))])[block]
        first = table[block, 0]
        return list(zip(*(((first + x) * mine).tolist() for x in (start, stop)), strict=True))

    def chunk_sizes(self, nbytes: int) -> NDArray[np.int64]:
        """Return the bytes of each chunk. Raises PlanError for more than `MOST_BYTES`."""
        nbytes = integer(nbytes, "nbytes", 0, MOST_BYTES, PlanError)
        _, start, stop = self._cut(block_table(self.collective, self.size, 0, nbytes))
        return stop - start

    def _cut(self, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return each chunk's block, and [start, stop) of its bytes in that block."""
        group, index = np.divmod(np.arange(self.num_chunks), self.stride)
        part, block = np.divmod(index, len(table))
        part += group * (self.stride // len(table))
        most, per = table[block, 1], chunk_bytes(table, self.num_chunks)
        return block, np.minimum(part * per, most), np.minimum((part + 1) * per, most)

    def chunk_bytes(self, nbytes: int) -> int:
        """Return the bytes of a full chunk, a multiple of `ALIGN`."""
        return chunk_bytes(block_table(self.collective, self.size, 0, nbytes), self.num_chunks)

    def volume(self, nbytes: int) -> int:
        """Return the bytes of all chunks together, for a message of `nbytes` on each rank."""
        return self.definition.volume(self.size, nbytes)

    def sends_on(self, track: Track, connection: int) -> bool:
        """Return whether the track is the connection's sender, rather than its receiver."""
        c = self.connections[connection]
        return (c.src, c.src_channel) == (track.rank, track.channel)

    # ---- forms -------------------------------------------------------------------------------
    def describe(self, track: Track, step: Step) -> str:
        """Return one line that names peers instead of connection numbers."""

        def peer(index: int) -> int:
            c = self.connections[index]
            return c.dst if self.sends_on(track, index) else c.src

        peers = ",".join(str(peer(i)) for i in step.connections)
        word = step.op.name.lower() + (" last" if step.last else "")
        word += f" own after {step.ahead}" if step.ahead else ""
        slot = "" if step.source is None else f" from slot of {peer(step.source)}"
        return f"{word:<11} peer {peers:<9} chunk +{step.chunk}{slot}"

    def __str__(self) -> str:
        lines = [self._first_line]
        for i, tree in enumerate(self.trees, 1):
            lines.append(f"tree {i}: root {tree.root}, depth {tree.depth}, parents {tree.parent}")
        lines += [
            f"detour {a} - {b} over {', '.join(map(str, via))}" for a, *via, b in self.detours
        ]
        lines += [f"note: {note}" for note in self.notes]
        for track in self.tracks:
            lines.append(f"rank {track.rank} channel {track.channel}")
            for i, body in enumerate(track.phases):
                if not body:
                    continue
                if len(track.phases) > 1:
                    lines.append(f"  phase {i}")
                lines += [f"    {self.describe(track, step)}" for step in body]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return JSON text that is equal for equal plans, and that `from_json` reads."""
        data: dict[str, Any] = {
            "format": "linkweave-plan",
            "version": 1,
            **{name: getattr(self, name) for name in (*_PLAIN, "root", "notes")},
            "trees": [tree.parent for tree in self.trees],
            "detours": self.detours,
            "connections": [
                [c.src, c.src_channel, c.dst, c.dst_channel, c.path] for c in self.connections
            ],
            "tracks": [
                [s.rank, s.channel, [[_step_out(step) for step in body] for body in s.phases]]
                for s in self.tracks
            ],
        }
        return json.dumps(data)

    @staticmethod
    def from_json(source: str) -> Plan:
        """Return the plan of a `to_json` text, with types and ranges checked but not verified.

        Raises PlanError.
        """
        data = read_json(source, Op.__members__)
        root = data["root"]
        return Plan(
            **{name: data[name] for name in _PLAIN},
            connections=tuple(
                Connection(a, x, b, y, tuple(path)) for a, x, b, y, path in data["connections"]
            ),
            tracks=tuple(
                Track(rank, channel, tuple(tuple(map(_step_in, body)) for body in phases))
                for rank, channel, phases in data["tracks"]
            ),
            trees=tuple(Tree(tuple(parent)) for parent in data["trees"]),
            detours=tuple(map(tuple, data["detours"])),
            root=tuple(map(tuple, root)) if isinstance(root, list) else root,
            notes=tuple(data["notes"]),
        )

    @cached_property
    def _tracks_of(self) -> Mapping[int, list[Track]]:
        found: dict[int, list[Track]] = {}
        for track in self.tracks:
            found.setdefault(track.rank, []).append(track)
        return found

    def encode(self, rank: int | None = None) -> NDArray[np.int32]:
        """Return the tracks of one rank, or of all, as the int32 array that interpreters read.

        The array is `[num_tracks, num_phases]`; a row of `num_phases + 1` offsets for each track
        (phase p is `array[offset[p]:offset[p + 1]]`); and for each step `op, chunk, flag, source
        or -1, n` and its n connections. The flag of a REDUCE is `last + 2 * ahead`; that of a
        SIGNAL or a WAIT is 1 at the connection's sender, else 0.
        """
        mine = self.tracks if rank is None else self._tracks_of.get(rank, [])
        phases = max((len(s.phases) for s in mine), default=1)
        table: list[int] = []
        code: list[int] = []
        base = 2 + len(mine) * (phases + 1)
        for track in mine:
            for body in track.phases:
                table.append(base + len(code))
                for s in body:
                    source = -1 if s.source is None else s.source
                    flag = s.last + 2 * s.ahead
                    if s.op in (Op.SIGNAL, Op.WAIT):
                        flag = self.sends_on(track, s.connections[0])
                    code += [s.op, s.chunk, flag, source, len(s.connections), *s.connections]
            table += [base + len(code)] * (phases + 1 - len(track.phases))
        return np.array([len(mine), phases, *table, *code], dtype=np.int32)


def _step_out(step: Step) -> list[Any]:
    return [step.op.name, list(step.connections), step.chunk, step.source, step.last, step.ahead]


def _step_in(row: list[Any]) -> Step:
    name, connections, chunk, source, last, ahead = row
    return Step(Op[name], tuple(connections), chunk, source, last, ahead)


LIMITS = {"size": 1 << 16, "num_chunks": 1 << 20, "stride": 1 << 16, "slots": 64}
"""The largest values of these fields; the smallest value is 1."""
MOST_CELLS = 1 << 20
"""The most chunks of one group, counted on all ranks that have them."""
MOST_CHANNELS = 1 << 20
MOST_BYTES = 1 << 50
"""The largest message."""


class _Row(tuple[Any, ...]):
    """The kinds of the items of a list of this length."""


def read_json(source: str, ops: Collection[str]) -> dict[str, Any]:
    """Return the object that `Plan.to_json` wrote, after checking the type and range of each field.

    Every rank, channel, chunk and connection number names one that the plan has. Raises PlanError.
    """
    data = read_format(source, "linkweave-plan", "plan JSON", PlanError)
    try:
        for name, most in LIMITS.items():
            integer(data[name], name, 1, most, PlanError)
        _check(data["collective"], str, "collective")
        found, ranks, channels = data["connections"], range(data["size"]), range(MOST_CHANNELS)
        of = range(len(found) if isinstance(found, list) else 0)
        step = _Row(
            ((*ops,), [of, 1], range(data["stride"]), {of}, (True, False), range(len(of) + 1))
        )
        kind = COLLECTIVES.get(data["collective"])
        for name, wanted in {
            "algorithm": str, "exclusive": (True, False), "notes": [str, 0],
            "root": [_Row((ranks, ranks)), 0] if kind and kind.root == "pairs" else ranks,
            "trees": [[ranks, 0], 0], "detours": [[ranks, 3], 0],
            "connections": [_Row((ranks, channels, ranks, channels, [int | str, 0])), 0],
            "tracks": [_Row((ranks, channels, [[step, 0], 0])), 0],
        }.items():  # fmt: skip
            _check(data[name], wanted, name)
    except KeyError as error:
        raise PlanError(f"plan JSON lacks {error}") from None
    except PlanError as error:
        raise PlanError(f"plan JSON: {error}") from None
    return data


def _check(value: Any, wanted: Any, name: str) -> None:
    """Raise PlanError unless a value of JSON is what is wanted: a range or a type; one of a tuple;
    a list of [kind, least length]; a row; or {kind} or None."""
    if isinstance(wanted, range):
        integer(value, name, 0, len(wanted) - 1, PlanError)
    elif isinstance(wanted, set):
        if value is not None:
            _check(value, next(iter(wanted)), name)
    elif isinstance(wanted, list | _Row):
        if not isinstance(value, list):
            raise PlanError(f"{name} must be a list, not {shown(value)}")
        row = isinstance(wanted, _Row)
        if len(value) != len(wanted) if row else len(value) < wanted[1]:
            words = len(wanted) if row else f"at least {wanted[1]}"
            raise PlanError(f"{name} must have {words} items, not {len(value)}")
        for i, item in enumerate(value):
            _check(item, wanted[i if row else 0], f"{name}[{i}]")
    elif isinstance(wanted, tuple):
        if not any(value is x or (isinstance(x, str) and value == x) for x in wanted):
            raise PlanError(
                f"{name} must be one of {', '.join(map(str, wanted))}, not {shown(value)}"
            )
    elif isinstance(value, bool) or not isinstance(value, wanted):
        words = "a string" if wanted is str else "a GPU or the name of a switch"
        raise PlanError(f"{name} must be {words}, not {shown(value)}")
