"""The first ranks of all machines tell each other what their machine asks for, and who failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from linkweave.collectives.distributed.cluster_map import SMALL
from linkweave.collectives.distributed.gloo import gloo_group, timed_out

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""


@dataclass(frozen=True)
class Notice:
    """What a machine tells the others: its call, or why there is none.

    asked: the call that its ranks make.
    refused: why they do not; the communicator stays usable.
    failed: what ended it.
    witnessed: whether the failure was seen among its own ranks, who know more than the others.
    late: whether a deadline has passed.
    """

    asked: str = ""
    refused: str = ""
    failed: str = ""
    witnessed: bool = False
    late: bool = False

    def pack(self) -> bytes:
        """The notice as JSON of at most `NOTICE` bytes; long texts are cut."""
        data, most = b"", 2 * NOTICE
        while not data or len(data) > NOTICE:
            most //= 2
            texts = {name: getattr(self, name)[:most] for name in ("asked", "refused", "failed")}
            data = json.dumps(asdict(self) | texts).encode()
        return data

    @staticmethod
    def unpack(data: bytes) -> Notice:
        return Notice(**json.loads(data))


@dataclass(frozen=True)
class Lost:
    """Why there is no notice of a machine; `late` as in `Notice`."""

    why: str
    late: bool


class RollCall:
    """Exchanges notices between machines, directly between any two, so that it is known who does
    not answer. Used by the first rank of each machine. `names` describe the machines."""

    def __init__(self, store: Any, machine: int, names: Sequence[str], timeout: float) -> None:
        self._machine, self._names, self._timeout = machine, names, timeout
        self._gloo: Any = gloo_group(store, machine, len(names), timeout)

    def exchange(
        self, mine: Notice, timeout: float | None = None, values: bytes = b""
    ) -> tuple[dict[int, Notice], dict[int, Lost], list[bytes]]:
        """(notices by machine, why there is none by machine, every machine's values).

        Ends after `timeout` seconds at most. All machines pass as many bytes of values, if they
        make the same call.
        """
        others = [m for m in range(len(self._names)) if m != self._machine]
        frame = (mine.pack().ljust(NOTICE) + values).ljust(NOTICE + SMALL)
        sent = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        incoming = {m: torch.zeros(len(frame), dtype=torch.uint8) for m in others}
        found, lost = {self._machine: mine}, {}
        works: dict[int, list[Any]] = {}
        for m in others:
            try:
                works[m] = [
                    self._gloo.recv([incoming[m]], m, 0), self._gloo.send([sent], m, 0)
                ]  # fmt: skip
            except RuntimeError as error:
                lost[m] = self._reason(m, error, 0)
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        for m in works:
            try:
                for work in works[m]:
                    left = max(0.001, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left))
                found[m] = Notice.unpack(bytes(incoming[m][:NOTICE].numpy()))
            except RuntimeError as error:
                lost[m] = self._reason(m, error, limit)
        frames = [incoming.get(m, sent)[NOTICE:] for m in range(len(self._names))]
        return found, lost, [bytes(frame[: len(values)].numpy()) for frame in frames]

    def _reason(self, m: int, error: Exception, seconds: float) -> Lost:
        if timed_out(error):
            return Lost(f"{self._names[m]} has not answered for {seconds:g} s", True)
        return Lost(
            f"{self._names[m]} has closed its connection: its first rank died or left", False
        )

    def close(self) -> None:
        self._gloo = None
