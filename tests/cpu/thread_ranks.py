"""Ranks that are threads of this process, and a transport between them that counts its bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from queue import Queue
from typing import Any

import torch

from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree
from linkweave.collectives.training.transport import share_of

DEADLINE = 100  # seconds


class Hub:
    """What the ranks have in common: a barrier, a row for each rank, and queues of messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=DEADLINE)
        self.rows: list[Any] = [None] * size
        # All at once: two threads that miss one key of a defaultdict may each get a queue.
        self.queues: dict[tuple[int, int], Queue[torch.Tensor]] = {
            pair: Queue() for pair in product(range(size), repeat=2)
        }
        self.messages: list[tuple[str, int]] = []
        """(call, bytes) of each message that a rank gets from another."""

    def exchange(self, rank: int, row: Any) -> list[Any]:
        """The rows of all ranks."""
        self.rows[rank] = row
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


class ThreadTransport:
    """`training.transport.Transport`; sums are in the order of the ranks."""

    device = ""

    def __init__(self, hubs: list[Hub], rank: int) -> None:
        self.rank, self.size, self._hubs = rank, hubs[0].size, hubs

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def open(self, lanes: int) -> None:
        assert lanes < len(self._hubs)  # the last one is for what is not on a lane

    def average(self, lane: int, x: torch.Tensor) -> None:
        rows = self._hubs[lane].exchange(self.rank, x.clone())
        total = rows[0].float()
        for row in rows[1:]:
            total = total + row.float()
        x.copy_(total / self.size)

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        _, mine, rest = share_of(x, self.rank, self.size)
        whole = x.clone()
        self.average(lane, whole)
        x.fill_(float("nan"))
        for part in (mine, rest):
            at = part.storage_offset() - x.storage_offset()
            part.copy_(whole[at : at + part.numel()])

    def gather(self, lane: int, x: torch.Tensor) -> None:
        whole, mine, _ = share_of(x, self.rank, self.size)
        whole.copy_(torch.cat(self._hubs[lane].exchange(self.rank, mine.clone())))

    def streams(self, device: torch.device) -> bool:
        return False

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Any:
        raise NotImplementedError

    def tree(self, x: torch.Tensor) -> Tree:
        return binomial_tree(self.size)

    def pairwise(self, lane: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        hub = self._hubs[lane]
        if (to := dict(pairs).get(self.rank)) is not None:
            hub.messages.append(("send", x.nbytes))
            hub.queues[self.rank, to].put(x.clone())
        if (source := targets(pairs).get(self.rank)) is None:
            return None
        return hub.queues[source, self.rank].get(timeout=DEADLINE)

    def allgather(self, lane: int, x: torch.Tensor) -> torch.Tensor:
        self._hubs[lane].messages += [("gather", x.nbytes)] * (self.size - 1)
        return torch.stack(self._hubs[lane].exchange(self.rank, x.clone()))

    def alltoall(self, lane: int, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        hub = self._hubs[lane]
        mine = torch.split(x.clone(), list(counts[self.rank])), [[*row] for row in counts]
        rows, told = zip(*hub.exchange(self.rank, mine), strict=True)
        assert all(other == told[0] for other in told)
        parts = [row[self.rank] for row in rows]
        hub.messages += [
            ("alltoall", part.nbytes) for source, part in enumerate(parts) if source != self.rank
        ]
        return torch.cat(parts)

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        hub = self._hubs[-1 if lane is None else lane]
        x.copy_(hub.exchange(self.rank, x.clone())[source])
        if self.rank != source and lane is not None:
            hub.messages.append(("broadcast", x.nbytes))

    def total(self, x: torch.Tensor) -> None:
        rows = self._hubs[-1].exchange(self.rank, x.clone())
        x.copy_(torch.stack(rows).sum(0))

    def share(self, payload: bytes) -> list[bytes]:
        return self._hubs[-1].exchange(self.rank, payload)

    def before_close(self, method: Any) -> None:
        pass

    def abort(self) -> None:
        for hub in self._hubs:
            hub.barrier.abort()

    def close(self) -> None:
        pass


def on_threads(
    size: int, body: Callable[..., Any], transports: int = 1
) -> tuple[list[Any], list[Hub]]:
    """What `body` returns for the transports of each rank, and their hubs: for each transport, two
    lanes and another.

    An exception of one rank ends the others, and is raised.
    """
    hubs = [[Hub(size) for _ in range(3)] for _ in range(transports)]
    errors = []

    def rank_of(rank: int) -> Any:
        mine = [ThreadTransport(some, rank) for some in hubs]
        try:
            return body(*mine)
        except BaseException as error:
            errors.append(error)
            for transport in mine:
                transport.abort()

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rank_of, range(size)))
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return found, [hub for some in hubs for hub in some]
