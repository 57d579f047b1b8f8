"""The plan: what each rank does, in order, on each channel. Frozen data; knows nothing of bytes.

A plan is a set of *tracks*, one for each (rank, channel) that has work, and *connections*
between them. A track repeats its steps for every group of `stride` chunks, so the plan's size
does not depend on the number of chunks. A connection is an ordered queue from one track to
another: a ring of `slots` buffers at the receiver, and two counters, data-ready and slot-free.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.fields import LIMITS, MOST_BYTES, MOST_CELLS, check_json, whole
from linkweave.collectives.planning.goals import Root, blocks, check
from linkweave.topology import Vertex

ALIGN = 16  # chunk boundaries, bytes: a GPU moves 16 bytes at once


class Op(IntEnum):
    """The verbs. Their values are the device encoding: append, never renumber."""

    SEND = 0
    """Write the own chunk (or a slot of `source`: forwarding) into the next slot of each
    connection named; all links are used at once, and the data is read once."""
    REDUCE = 1
    """Own chunk = own chunk combined with the next slot of each connection, in that order; the own
    value stands first, or behind `ahead` of them."""
    COPY = 2
    """Own chunk = the next slot of the connection: the final value."""
    SIGNAL = 3
    """Raise a counter of the connection: data-ready at its sender, slot-free at its receiver."""
    WAIT = 4
    """Until the other end has signalled: slot-free at the sender, data-ready at the receiver."""


@dataclass(frozen=True, slots=True)
class Step:
    """One verb. `chunk` counts from the first chunk of the track's current group."""

    op: Op
    connections: tuple[int, ...]
    chunk: int
    source: int | None = None
    """SEND only: the connection whose slot is passed on."""
    last: bool = False
    """REDUCE only: this completes the chunk (an average divides here)."""
    ahead: int = 0
    """REDUCE only: how many of the connections come before the rank's own value."""


@dataclass(frozen=True, slots=True)
class Connection:
    """From one track to another, over the vertices of `path`.

    Between two tracks of one rank it carries no data (`path` is empty), only order.
    """

    src: int
    src_channel: int
    dst: int
    dst_channel: int
    path: tuple[Vertex, ...] = ()

    @property
    def local(self) -> bool:
        return self.src == self.dst

    @property
    def links(self) -> tuple[tuple[Vertex, Vertex], ...]:
        return tuple(zip(self.path, self.path[1:], strict=False))

    def __str__(self) -> str:
        via = "".join(f" over {v}" for v in self.path[1:-1])
        channels = f"ch {self.src_channel}"
        if self.dst_channel != self.src_channel:
            channels += f" -> ch {self.dst_channel}"
        return f"{self.src} -> {self.dst} {channels}{via}"


@dataclass(frozen=True, slots=True)
class Track:
    """The work of one rank on one channel: for each phase, the steps repeated for every group."""

    rank: int
    channel: int
    phases: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A collective, ready to be verified, simulated or run.

    `num_chunks` is the total over all trees; groups of `stride` chunks repeat the same steps, and
    a step whose chunk would be `num_chunks` or more does nothing. `exclusive` claims that no
    directed link carries more connections than it has physical links. `root` matters to a
    broadcast and a reduce, and is the pairs of a sendrecv.
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
    """(rank, ranks that forward, rank), once for both directions."""
    exclusive: bool = True
    root: Root = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            whole(getattr(self, name), name, 1, most)
        if self.size * self.stride > MOST_CELLS:
            raise PlanError(
                f"a group of {self.stride} chunks on {self.size} ranks is too large: stride times "
                f"size must be at most {MOST_CELLS}"
            )
        check(self.collective, self.size, self.root)
        unit = blocks(self.collective, self.size)
        if self.stride % unit or (unit > 1 and self.num_chunks % self.stride):
            raise PlanError(
                f"{self.collective} needs whole groups of a multiple of {unit} chunks, not "
                f"{self.num_chunks} in groups of {self.stride}"
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.algorithm, self.size, self.tracks))

    def __hash__(self) -> int:
        return self._hash

    @property
    def groups(self) -> int:
        """How often each phase repeats."""
        return -(-self.num_chunks // self.stride)

    @property
    def link_use(self) -> dict[tuple[Vertex, Vertex], int]:
        """Physical links taken on each directed link: one for each connection that crosses it."""
        return dict(Counter(link for c in self.connections for link in c.links))

    def with_chunks(self, num_chunks: int) -> Plan:
        """The same plan over another number of chunks."""
        made = replace(self, num_chunks=num_chunks)
        made.__dict__["_hash"] = self._hash  # which holds for any number, and takes a walk
        return made

    def steps(self, track: Track) -> Iterator[tuple[int, int, Step]]:
        """(position in the track's code, chunk, step) for every step that is carried out."""
        base = 0
        for body in track.phases:
            for first in range(0, self.num_chunks, self.stride):
                for at, step in enumerate(body, base):
                    if first + step.chunk < self.num_chunks:
                        yield at, first + step.chunk, step
            base += len(body)

    def chunk_bounds(self, nbytes: int, rank: int = 0) -> list[tuple[int, int]]:
        """[start, stop) of each chunk in the buffer of a rank; late chunks may be empty.

        The buffer has `nbytes`: for an all-gather or a reduce-scatter P equal blocks in the order
        of the ranks. For an all-to-all these are the blocks to be sent, and as many bytes follow,
        for those received; the block to itself lies there from the start, and chunks between
        others are (0, 0).
        """
        unit, per = blocks(self.collective, self.size), self.chunk_bytes(nbytes)
        block = nbytes // (1 if unit == 1 else self.size)
        found = []
        for chunk in range(self.num_chunks):
            group, index = divmod(chunk, self.stride)
            part = group * (self.stride // unit) + index // unit
            base = index % unit * block
            if self.collective == "alltoall":
                source, target = divmod(index % unit, self.size)
                if rank not in (source, target):
                    found.append((0, 0))
                    continue
                base = nbytes + source * block if rank == target else target * block
            found.append((base + min(part * per, block), base + min((part + 1) * per, block)))
        return found

    def chunk_bytes(self, nbytes: int) -> int:
        """Bytes of a full chunk: the least multiple of 16 that lets all chunks cover the data."""
        unit = blocks(self.collective, self.size)
        parts = self.num_chunks // unit
        return -(-(nbytes // (1 if unit == 1 else self.size)) // (parts * ALIGN)) * ALIGN

    def volume(self, nbytes: int) -> int:
        """Bytes of all chunks together: of an all-to-all, of all ranks' messages."""
        return nbytes * (self.size if self.collective == "alltoall" else 1)

    def chunk_sizes(self, nbytes: int) -> NDArray[np.int64]:
        """Bytes of each chunk. Raises PlanError for more than `MOST_BYTES`."""
        whole(nbytes, "nbytes", 0, MOST_BYTES)
        unit, per = blocks(self.collective, self.size), self.chunk_bytes(nbytes)
        block = nbytes // (1 if unit == 1 else self.size)
        chunk = np.arange(self.num_chunks)
        part = chunk // self.stride * (self.stride // unit) + chunk % self.stride // unit
        sizes: NDArray[np.int64] = np.clip(block - part * per, 0, per)
        return sizes

    def sends_on(self, track: Track, connection: int) -> bool:
        """Whether the track is the connection's sender (else its receiver)."""
        c = self.connections[connection]
        return (c.src, c.src_channel) == (track.rank, track.channel)

    # ---- forms -----------------------------------------------------------------------------
    def describe(self, track: Track, step: Step) -> str:
        """One line that names peers, not connection numbers."""

        def peer(index: int) -> int:
            c = self.connections[index]
            return c.dst if self.sends_on(track, index) else c.src

        peers = ",".join(str(peer(i)) for i in step.connections)
        word = step.op.name.lower() + (" last" if step.last else "")
        word += f" own after {step.ahead}" if step.ahead else ""
        slot = "" if step.source is None else f" from slot of {peer(step.source)}"
        return f"{word:<11} peer {peers:<9} chunk +{step.chunk}{slot}"

    def __str__(self) -> str:
        lines = [
            f"{self.collective} by {self.algorithm}: {self.size} ranks, {self.num_chunks} chunks "
            f"in groups of {self.stride}, {self.slots} slots a connection, "
            + ("exclusive links" if self.exclusive else "shared links")
        ]
        for i, tree in enumerate(self.trees):
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
        """Stable JSON: equal plans give equal text, and `from_json` gives back an equal plan."""
        data: dict[str, Any] = {
            "format": "linkweave-plan",
            "version": 1,
            "algorithm": self.algorithm,
            "collective": self.collective,
            "size": self.size,
            "num_chunks": self.num_chunks,
            "stride": self.stride,
            "slots": self.slots,
            "exclusive": self.exclusive,
            "root": self.root,
            "notes": self.notes,
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
        """Read `to_json`'s form: a plan of right types and ranges that is not yet verified.

        Raises PlanError.
        """
        try:
            data: dict[str, Any] = json.loads(source)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"plan JSON: line {error.lineno} column {error.colno}: {error.msg}"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise PlanError(f"plan JSON: {error}") from None
        check_json(data, Op.__members__)
        root = data["root"]  # a rank, or pairs
        return Plan(
            algorithm=data["algorithm"],
            collective=data["collective"],
            size=data["size"],
            num_chunks=data["num_chunks"],
            stride=data["stride"],
            slots=data["slots"],
            connections=tuple(
                Connection(a, x, b, y, tuple(path)) for a, x, b, y, path in data["connections"]
            ),
            tracks=tuple(
                Track(rank, channel, tuple(tuple(map(_step_in, body)) for body in phases))
                for rank, channel, phases in data["tracks"]
            ),
            trees=tuple(Tree(tuple(parent)) for parent in data["trees"]),
            detours=tuple(map(tuple, data["detours"])),
            exclusive=data["exclusive"],
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
        """One rank's part (or all of it) as the int32 array that interpreter kernels read.

        `[num_streams, num_phases]`, then a row of `num_phases + 1` code offsets for each track
        (phase p is `code[offset[p]:offset[p + 1]]`, counted from the start of the array), then
        the code: for each step `op, chunk, flag, source or -1, n, connection * n`. The flag is
        `last + 2 * ahead` for a REDUCE; for SIGNAL and WAIT it is 1 at the connection's sender,
        else 0.
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
    return [step.op.name, list(step.connections), step.chunk, step.source, step.last,
            step.ahead]  # fmt: skip


def _step_in(row: list[Any]) -> Step:
    name, connections, chunk, source, last, ahead = row
    return Step(Op[name], tuple(connections), chunk, source, last, ahead)
