"""A plan as arrays, which one rank computes and all CPU ranks run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.collective import ALLREDUCE
from linkweave.collectives.planning.dataflow import origins, pushed
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.verify import has_one_phase, races, repeats
from linkweave.kernels.plan.interpreter import DIRECT_SLOTS


@dataclass(frozen=True, slots=True)
class Encoded:
    """A plan for one group of chunks, which serves any number of chunks.

    `codes[r]` is rank r's `Plan.encode`; `channels[r]` has the channel of each of its tracks. The
    arrays are indexed by connection: `ends` [n, 2] holds (source, destination), `origin` the rank
    whose data the connection carries, `pushed` the rank whose chunk the sender may write (or -1),
    and `ring` the number of its ring of slots, below `rings`. With `direct`, ranks may access each
    other's chunks in place (proved by `races`).
    """

    algorithm: str
    collective: str
    size: int
    stride: int
    slots: int
    rings: int
    direct: bool
    codes: tuple[NDArray[np.int32], ...]
    channels: tuple[tuple[int, ...], ...]
    ends: NDArray[np.int64]
    origin: NDArray[np.int64]
    pushed: NDArray[np.int64]
    ring: NDArray[np.int64]

    def accesses(self, rank: int) -> tuple[set[int], set[int]]:
        """The chunks of a group into which the rank copies or combines, and those that it sends
        from its buffer; other ranks may push into any in a direct call."""
        code = self.codes[rank].tolist()
        written, sent = set(), set()
        for op, chunk, _, slot in _steps(code, 2 + code[0] * (code[1] + 1), len(code)):
            if op in (Op.COPY, Op.REDUCE):
                written.add(chunk)
            elif op == Op.SEND and slot < 0:
                sent.add(chunk)
        return written, sent

    def finals(self, rank: int, num_chunks: int) -> list[NDArray[np.int64]]:
        """The chunks that each track completes, in order: `planning.dataflow.finals` of the plan
        with this many chunks."""
        code = self.codes[rank].tolist()
        tracks, phases = code[:2]
        groups = self.stride * np.arange(-(-num_chunks // self.stride))[:, None]
        found = []
        for row in range(2, 2 + tracks * (phases + 1), phases + 1):
            parts = [np.zeros(0, np.int64)]
            for pc, stop in zip(code[row : row + phases], code[row + 1 :], strict=False):
                offsets = [
                    chunk for op, chunk, flag, _ in _steps(code, pc, stop)
                    if op == Op.COPY or (op == Op.REDUCE and flag & 1)
                ]  # fmt: skip
                parts.append((groups + np.array(offsets, np.int64)).reshape(-1))
            chunks = np.concatenate(parts)
            found.append(chunks[chunks < num_chunks])
        return found


def _steps(code: list[int], pc: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(op, chunk, flag, slot) of each step in `code` from one offset to another."""
    while pc < stop:
        op, chunk, flag, slot, n = code[pc : pc + 5]
        yield op, chunk, flag, slot
        pc += 5 + n


def encode(plan: Plan) -> Encoded:
    """Encode a verified plan."""
    origin, ring = origins(plan), _rings(plan)
    channels: dict[int, list[int]] = {r: [] for r in range(plan.size)}
    for track in plan.tracks:
        channels[track.rank].append(track.channel)
    n = len(plan.connections)
    return Encoded(
        plan.algorithm, plan.collective, plan.size, plan.stride, plan.slots,
        len(set(ring)), may_be_direct(plan),
        tuple(plan.encode(r) for r in range(plan.size)),
        tuple(tuple(channels[r]) for r in range(plan.size)),
        np.array([(c.src, c.dst) for c in plan.connections], np.int64).reshape(n, 2),
        np.array([origin.get(i, 0) for i in range(n)], np.int64),
        np.array(pushed(plan), np.int64),
        np.array(ring, np.int64),
    )  # fmt: skip


def may_be_direct(plan: Plan) -> bool:
    """Whether ranks may access each other's chunks in place, for any number of chunks.

    Only the steps of one group access a chunk. If a plan has one phase, the order of two steps of
    a group never depends on another group, so the proof for one group holds for all.
    """
    if not plan.definition.same_offsets:
        return False
    free = replace(plan, slots=DIRECT_SLOTS)
    one_group = has_one_phase(plan) and repeats(plan)
    counts = [1] if one_group else range(1, DIRECT_SLOTS + 3)
    return not any(races(free.with_chunks(n * plan.stride), direct=True) for n in counts)


def _rings(plan: Plan) -> list[int]:
    """The slot ring of each connection; connections that are always sent together share one."""
    sends: dict[int, list[int]] = {i: [] for i in range(len(plan.connections))}
    steps = (step for track in plan.tracks for body in track.phases for step in body)
    for number, step in enumerate(steps):
        if step.op is Op.SEND:
            for i in step.connections:
                sends[i].append(number)
    rings: dict[tuple[int, ...], int] = {}
    return [rings.setdefault(tuple(sends[i]) or (-i - 1,), len(rings)) for i in sends]


def nothing(size: int) -> Encoded:
    """The plan of a call that moves no data."""
    none, code = np.zeros(0, np.int64), np.array([0, 1], np.int32)
    return Encoded(
        "none", ALLREDUCE, size, 1, 1, 0, False, (code,) * size, ((),) * size,
        none.reshape(0, 2), none, none, none,
    )  # fmt: skip
