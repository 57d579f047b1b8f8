"""The first ranks of all machines tell each other what their machine asks for, and who failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch._C._distributed_c10d as c10d
from numpy.typing import NDArray

from linkweave.collectives.distributed.cluster_map import SMALL
from linkweave.collectives.distributed.gloo import gloo_group, timed_out

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""
GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""
_ALL_TO_ALL = c10d.AllToAllOptions()
_HEAD = 16  # bytes of a frame before the values: a call's word, and 1 if its machine agrees on it


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

    @property
    def agreed(self) -> bool:
        """Whether the call may be carried out."""
        return not self.refused and not self.failed

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


@dataclass(frozen=True)
class Answers:
    """What an exchange has brought, by machine: notices, or why there is none.

    `names` describe the machines.
    """

    names: Sequence[str]
    found: dict[int, Notice]
    lost: dict[int, Lost]

    def outcome(self, mine: Notice) -> Notice:
        """`mine` with the cause of a failure, or else with why the call is refused, if it is."""
        if not (failed := self._cause()):
            return replace(mine, refused=self._refusal())
        late = any(x.late for x in self.lost.values()) or any(n.late for n in self.found.values())
        return replace(mine, failed=failed, late=late)

    def _cause(self) -> str:
        """The cause of a failure: what its own machine saw, or else who does not answer."""
        failed = {m: n for m, n in sorted(self.found.items()) if n.failed}
        said = {m: f"on {self.names[m]}: {n.failed}" for m, n in failed.items()}
        seen = [said[m] for m, n in failed.items() if n.witnessed]
        return "; ".join(seen or [x.why for x in self.lost.values()] or said.values())

    def _refusal(self) -> str:
        """Why the machines' calls are refused; empty if they are not."""
        notices = sorted(self.found.items())
        if refused := next((n.refused for _, n in notices if n.refused), ""):
            return refused
        if len({n.asked for _, n in notices}) == 1:
            return ""
        each = (f"{self.names[m]}: {n.asked}" for m, n in notices)
        return f"the machines' calls differ: {'; '.join(each)}"


class RollCall:
    """Compares calls of machines by their words, in one step; and where these differ, exchanges
    notices, directly between any two machines, so that it is known who does not answer. Used by the
    first rank of each machine. `names` describe the machines."""

    def __init__(self, store: Any, machine: int, names: Sequence[str], timeout: float) -> None:
        self._machine, self._names, self._timeout = machine, names, timeout
        count = len(names)
        words, notices = (c10d.PrefixStore(f"{name}/", store) for name in ("words", "notices"))
        self._words: Any = gloo_group(words, machine, count, timeout)
        self._gloo: Any = gloo_group(notices, machine, count, timeout)
        self._sent = torch.zeros((count, _HEAD + SMALL), dtype=torch.uint8)
        self._got = torch.zeros_like(self._sent)
        self.lost: Lost | None = None  # why a comparison had no end

    def compare(self, word: int, values: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """[machines, bytes]: the values of all machines, if all make the call of this word; else
        None, as also if this machine makes none (0) or one does not answer."""
        sent, got = self._sent.numpy(), self._got.numpy()
        sent[:, :_HEAD].view(np.int64)[:] = word, word != 0
        stop = _HEAD + values.nbytes
        sent[:, _HEAD:stop] = values
        try:
            self._words.alltoall_base(self._got, self._sent, [], [], _ALL_TO_ALL).wait()
        except RuntimeError as error:
            self.lost = Lost(
                f"the machines could not compare their calls: {error}", timed_out(error)
            )
            return None
        heads = got[:, :_HEAD].view(np.int64)
        agreed = heads[:, 1].all() and (heads[:, 0] == word).all()
        return got[:, _HEAD:stop] if agreed else None

    def end_comparisons(self) -> None:
        """Let no machine wait for this one to compare."""
        self._words = None

    def exchange(self, mine: Notice, timeout: float | None = None) -> Answers:
        """Tell all machines, and hear from them, for `timeout` seconds at most: not long, if one
        has not answered before."""
        others = [m for m in range(len(self._names)) if m != self._machine]
        frame = mine.pack().ljust(NOTICE)
        sent = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        incoming = {m: torch.zeros(len(frame), dtype=torch.uint8) for m in others}
        found: dict[int, Notice] = {self._machine: mine}
        lost: dict[int, Lost] = {}
        works: dict[int, list[Any]] = {}
        for m in others:
            try:
                works[m] = [
                    self._gloo.recv([incoming[m]], m, 0), self._gloo.send([sent], m, 0)
                ]  # fmt: skip
            except RuntimeError as error:
                lost[m] = self._reason(m, error, 0)
        limit = timeout or (GRACE if self.lost else self._timeout)
        deadline = time.monotonic() + limit
        for m in works:
            try:
                for work in works[m]:
                    left = max(0.001, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left))
                found[m] = Notice.unpack(bytes(incoming[m][:NOTICE].numpy()))
            except RuntimeError as error:
                lost[m] = self._reason(m, error, limit)
        return Answers(self._names, found, lost)

    def _reason(self, m: int, error: Exception, seconds: float) -> Lost:
        if timed_out(error):
            return Lost(f"{self._names[m]} has not answered for {seconds:g} s", True)
        return Lost(
            f"{self._names[m]} has closed its connection: its first rank died or left", False
        )

    def close(self) -> None:
        self._gloo = self._words = None
