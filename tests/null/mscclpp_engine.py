"""MSCCL++'s executor with integers in place of bytes: it reads a file as the loader does, and takes
a step of one thread at a time, at random.

A chunk has some elements of 8 bytes; a thread handles two at once, or one of packets. Threads of a
thread block meet at nops and barriers only. A proxy carries out what port channels are asked for.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

THREADS = 3
SUMS = {"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"}


class Wrong(Exception):
    """An execution that does not end, or whose result is wrong."""


class Engine:
    """Runs a plan on all ranks several times.

    elements: of a chunk; unit: elements in place of each unit_size bytes of pipelines.
    """

    def __init__(self, data: Any, elements: int, unit: Callable[[int], int], seed: int) -> None:
        self.data, self.elements, self.unit = data, elements, unit
        self.gpus = data["gpus"]
        self.size = len(self.gpus)
        self.pick = random.Random(seed)
        self.memory: dict[tuple[int, str], Any] = {}
        self.flags: dict[tuple[int, int], tuple[int, int]] = {}
        self.counts: dict[tuple[int, str, int], list[int]] = {}  # signals and waits of a channel
        self.pairs: dict[tuple[int, str, int], tuple[int, str, int]] = {}
        ends: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        self.peers: list[dict[str, list[int]]] = []
        self.groups: list[list[tuple[str, list[int]]]] = []
        for rank, gpu in enumerate(self.gpus):
            peers: dict[str, list[int]] = {"memory": [], "port": []}
            groups: list[tuple[str, list[int]]] = []
            for channel in gpu["channels"]:
                kind = channel["channel_type"]
                if kind == "switch":
                    groups += [(channel["buffer_type"], g["ranks"]) for g in channel["rank_groups"]]
                else:
                    peers[kind] += channel["connected_to"]
            for kind, every in peers.items():
                for number, peer in enumerate(every):
                    ends[rank, peer, kind].append(number)
                    self.counts[rank, kind, number] = [0, 0]
            self.peers.append(peers)
            self.groups.append(groups)
        for (rank, peer, kind), numbers in ends.items():
            for mine, its in zip(numbers, ends[peer, rank, kind], strict=False):
                self.pairs[rank, kind, mine] = peer, kind, its
        self.semaphores = [[s["init_value"] for s in gpu["semaphores"]] for gpu in self.gpus]
        self.barriers: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self.proxies: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        for rank, gpu in enumerate(self.gpus):
            room = 4 * gpu["scratch_chunks"] * elements
            self.memory[rank, "s"] = np.full(max(room, 1), -(10**9), np.int64)

    # ---- buffers -----------------------------------------------------------------------------
    def _input(self, rank: int, execution: int) -> Any:
        count = self.gpus[rank]["input_chunks"] * self.elements
        return np.arange(count) + 1000 * (rank + 1) + 100_000 * (execution + 1)

    def _fill(self, rank: int) -> None:
        """A new input; the output has other data."""
        kind, mine = self.data["collective"], self._input(rank, self.execution[rank])
        count = len(mine)
        out = np.full(self.gpus[rank]["output_chunks"] * self.elements, -7, np.int64)
        if (rank, "i") not in self.memory:
            if not self.data["inplace"]:
                self.memory[rank, "i"], self.memory[rank, "o"] = mine.copy(), out.copy()
            elif kind == "allgather":
                self.memory[rank, "o"] = out.copy()
                self.memory[rank, "i"] = self.memory[rank, "o"][rank * count : (rank + 1) * count]
            else:
                self.memory[rank, "i"] = self.memory[rank, "o"] = mine.copy()
                if kind == "reducescatter":
                    own = slice(rank * len(out), (rank + 1) * len(out))
                    self.memory[rank, "o"] = self.memory[rank, "i"][own]
        self.memory[rank, "o"][:] = out
        self.memory[rank, "i"][:] = mine

    def _wanted(self, rank: int) -> Any:
        kind, n = self.data["collective"], len(self.memory[rank, "o"])
        inputs = [self._input(r, self.execution[rank]) for r in range(self.size)]
        if kind == "allgather":
            return np.concatenate(inputs)
        if kind == "alltoall":
            each = n // self.size
            return np.concatenate([x[rank * each : (rank + 1) * each] for x in inputs])
        total = sum(inputs)
        return total[rank * n : (rank + 1) * n] if kind == "reducescatter" else total

    # ---- running -----------------------------------------------------------------------------
    def run(self, executions: int = 3) -> None:
        """Raises Wrong. A rank begins its next execution as soon as its own last one is over."""
        self.execution = [-1] * self.size
        self.left = [0] * self.size
        self.threads: list[tuple[int, Iterator[bool]]] = []
        self.weights: list[float] = []
        for rank in range(self.size):
            self._begin(rank)
        idle = 0
        while self.threads:
            at = self.pick.choices(range(len(self.threads)), self.weights)[0]
            rank, steps = self.threads[at]
            moved = next(steps, None)
            if self.proxies and self.pick.random() < 0.3:
                self._proxy()
            if moved is None:
                del self.threads[at], self.weights[at]
                self.left[rank] -= 1
                if not self.left[rank]:
                    if not np.array_equal(self.memory[rank, "o"], self._wanted(rank)):
                        raise Wrong(f"rank {rank}: another result, run {self.execution[rank]}")
                    if self.execution[rank] < executions - 1:
                        self._begin(rank)
            idle = 0 if moved or moved is None else idle + 1
            if idle == 200:
                self.weights = [1.0] * len(self.threads)
            if idle > 200 + 60 * len(self.threads):
                raise Wrong("nothing goes on")

    def _begin(self, rank: int) -> None:
        self.execution[rank] += 1
        self._fill(rank)
        for block in self.gpus[rank]["threadblocks"]:
            met = [0, 0]
            for t in range(THREADS):
                self.threads.append((rank, self._thread(rank, block, t, met)))
                self.weights.append(self.pick.choice((1.0, 1.0, 0.02)))
                self.left[rank] += 1

    def _proxy(self) -> None:
        waiting = [queue for queue in self.proxies.values() if queue]
        if waiting:
            self.pick.choice(waiting).popleft()()

    def _thread(self, rank: int, block: Any, t: int, met: list[int]) -> Iterator[bool]:
        for op, offset, unit in self._calls(block["ops"]):
            yield from self._op(rank, block, op, offset, unit, t, met)
            yield True

    def _calls(self, ops: Any) -> Iterator[tuple[Any, int, int]]:
        for op in ops:
            if op["name"] != "pipeline":
                yield op, 0, 1 << 40
                continue
            unit = self.unit(op["iter_context"]["unit_size"])
            total = op["iter_context"]["num_chunks"] * self.elements
            for first in range(0, total, unit):
                for inner in op["ops"]:
                    yield inner, first, unit

    def _op(
        self, rank: int, block: Any, op: Any, offset: int, unit: int, t: int, met: list[int]
    ) -> Iterator[bool]:
        name, kind = op["name"], op.get("channel_type", "")
        channels = [
            self._listed(block, kind, n) for n in op.get("channel_ids", ()) if kind != "switch"
        ]
        if name == "nop":
            yield from self._meet(met, THREADS)
        elif name == "barrier":
            yield from self._meet(self.barriers[rank, op["barrier_id"]],
                                  THREADS * op["num_threadblocks"])  # fmt: skip
        elif name in ("signal", "rlxsignal"):
            for number in channels[t::THREADS]:
                self._signal(rank, kind, number)
        elif name in ("wait", "rlxwait"):
            for number in channels[t::THREADS]:
                count = self.counts[rank, kind, number]
                count[1] += 1
                aim = count[1]
                while self.counts[rank, kind, number][0] < aim:
                    yield False
        elif name == "sem_release":
            for number in op["semaphore_ids"][t::THREADS]:
                self.semaphores[rank][number] += 1
        elif name == "sem_acquire":
            for number in op["semaphore_ids"][t::THREADS]:
                while self.semaphores[rank][number] <= 0:
                    yield False
                self.semaphores[rank][number] -= 1
        elif name == "flush":
            pass  # it flushes as many channels as it has targets, which are none
        else:
            yield from self._data(rank, block, op, offset, unit, t, channels)

    def _meet(self, met: list[int], count: int) -> Iterator[bool]:
        met[0] += 1
        aim = -(-met[0] // count)
        if met[0] == aim * count:
            met[1] = aim
        while met[1] < aim:
            yield False

    def _signal(self, rank: int, kind: str, number: int) -> None:
        other = self.pairs.get((rank, kind, number))
        if other is None:
            raise Wrong("a signal to nobody")
        count = self.counts[other]
        if kind == "port":

            def later(count: list[int] = count) -> None:
                count[0] += 1

            self.proxies[rank, number].append(later)
        else:
            count[0] += 1

    def _listed(self, block: Any, kind: str, number: int) -> int:
        ids = [n for c in block["channels"] if c["channel_type"] == kind for n in c["channel_ids"]]
        return int(ids[number])

    # ---- data --------------------------------------------------------------------------------
    def _region(self, rank: int, block: Any, op: Any, x: Any) -> tuple[list[int], str]:
        kind = op.get("channel_type", "")
        if "buffer_id" in x:
            refs = [n for r in block["remote_buffer_refs"] if r["access_channel_type"] == kind
                    for n in r["remote_buffer_ids"]]  # fmt: skip
            remote = self.gpus[rank]["remote_buffers"][refs[x["buffer_id"]]]
            return [remote["rank"]], remote["type"]
        if "switch_channel_id" in x:
            buffer, ranks = self.groups[rank][self._listed(block, "switch", x["switch_channel_id"])]
            return ranks, buffer
        return [rank], x["type"]

    def _data(
        self, rank: int, block: Any, op: Any, offset: int, unit: int, t: int, channels: list[int]
    ) -> Iterator[bool]:
        name = op["name"]
        src, dst = op["src_buff"], op["dst_buff"]
        share = op.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        packets = "pkt" in name
        wide = 1 if packets else 2
        pairs = [([a], [b]) for a, b in zip(src, dst, strict=True)] if name in (
            "put", "pws", "pwsf", "get", "ppkt") else [(src, dst)]  # fmt: skip
        for k, (some, others) in enumerate(pairs):
            total = some[0]["size"] * self.elements // share["tbg_size"]
            count = min(total - offset, unit)
            first = share["tb_id"] * total + offset
            if op.get("channel_type") == "port":
                if t == k % THREADS:
                    self._port(rank, block, op, some[0], others[0], first, count, channels[k])
                continue
            for at in range(t * wide, count, THREADS * wide):
                for e in range(first + at, first + min(at + wide, count)):
                    yield from self._element(rank, block, op, some, others, e)
                yield True

    def _port(
        self, rank: int, block: Any, op: Any, src: Any, dst: Any, first: int, count: int, ch: int
    ) -> None:
        _, a = self._region(rank, block, op, src)
        (peer,), b = self._region(rank, block, op, dst)
        start, there = (x["index"] * self.elements + first for x in (src, dst))

        def put() -> None:
            self.memory[peer, b][there : there + count] = \
                self.memory[rank, a][start : start + count]  # fmt: skip

        self.proxies[rank, ch].append(put)
        if op["name"] in ("pws", "pwsf"):
            self._signal(rank, "port", ch)

    def _scratch(self, rank: int, e: int) -> int:
        """Where a packet lies: in one half or the other, behind what is no packet."""
        half = self.execution[rank] % 2 if self.data.get("use_double_scratch_buffer") else 0
        return 1_000_000 * (1 + half) + e

    def _element(
        self, rank: int, block: Any, op: Any, src: Any, dst: Any, e: int
    ) -> Iterator[bool]:
        name, n = op["name"], self.elements
        read: list[int] = []
        for k, x in enumerate(src):
            ranks, buffer = self._region(rank, block, op, x)
            packed = name in ("upkt", "rppkt", "gstorepkt") or (
                name in SUMS and "pkt" in name and k
            )
            for r in ranks:
                at = x["index"] * n + e
                if packed:
                    packet, now = (r, self._scratch(rank, at)), self.execution[rank]
                    while self.flags.get(packet, (-1, 0))[0] != now:
                        yield False
                    read.append(self.flags[packet][1])
                else:
                    read.append(int(self.memory[r, buffer][at]))
                yield True
        value = sum(read)
        for k, x in enumerate(dst):
            ranks, buffer = self._region(rank, block, op, x)
            packed = name in ("ppkt", "rppkt", "cpkt", "gstorepkt") or (
                name in SUMS and "pkt" in name and k > 0
            )
            for r in ranks:
                at = x["index"] * n + e
                if packed:
                    self.flags[r, self._scratch(rank, at)] = self.execution[rank], value
                else:
                    self.memory[r, buffer][at] = value
                yield True
