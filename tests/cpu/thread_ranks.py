"""Ranks that are threads of this process, and a transport between them that counts its bytes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linkweave.collectives.sparse.linked import linked_allreduce
from linkweave.collectives.training.transport import share_of

DEADLINE = 100  # seconds


class Hub:
    """What the ranks have in common: a barrier, a row for each rank, and queues of messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=DEADLINE)
        self.rows: list[Any] = [None] * size
        self.queues: dict[tuple[int, int], Queue[NDArray[Any]]] = defaultdict(Queue)
        self.messages: list[tuple[str, int]] = []
        """(call, bytes) of each message that a rank gets from another."""

    def exchange(self, rank: int, row: Any) -> list[Any]:
        """The rows of all ranks."""
        self.rows[rank] = row
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


class ThreadLinks:
    """`sparse.linked.Links` of one rank."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub

    def send(self, message: NDArray[np.uint8], to: int) -> None:
        self._hub.messages.append(("send", message.nbytes))
        self._hub.queues[self.rank, to].put(message.copy())

    def receive(self, message: NDArray[np.uint8], source: int) -> None:
        message[:] = self._hub.queues[source, self.rank].get(timeout=DEADLINE)

    def broadcast(self, message: NDArray[np.uint8], root: int) -> None:
        message[:] = self._hub.exchange(self.rank, message.copy())[root]
        if self.rank != root:
            self._hub.messages.append(("broadcast", message.nbytes))

    def gather(self, row: NDArray[Any]) -> NDArray[Any]:
        self._hub.messages += [("gather", row.nbytes)] * (self.size - 1)
        return np.stack(self._hub.exchange(self.rank, row.copy()))

    def add(self, whole: NDArray[np.float32]) -> None:
        whole[:] = np.sum(self._hub.exchange(self.rank, whole.copy()), axis=0)


class ThreadTransport:
    """`training.transport.Transport`; sums are in the order of the ranks."""

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

    def sparse(
        self, lane: int, vector: Any, numel: int, k: int, residual: torch.Tensor, mode: str,
        conserve: bool,
    ) -> Any:  # fmt: skip
        links = ThreadLinks(self._hubs[lane], self.rank)
        return linked_allreduce(links, vector, numel, k, residual, mode, conserve)

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

    def broadcast(self, x: torch.Tensor, source: int = 0) -> None:
        x.copy_(self._hubs[-1].exchange(self.rank, x.clone())[source])

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
