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
from numpy.typing import NDArray

from linkweave.collectives.distributed.cluster_map import SMALL
from linkweave.collectives.distributed.gloo import gloo_group, timed_out

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""
GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""
_HEAD = 16  # bytes of a frame before the values or the notice: a call's word, and what follows
_COMPARES, _NOTES = 1, 2


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
    """Compares calls of machines by their words; where these differ, exchanges notices. Each step
    goes directly between any two machines, so that it is known who does not answer. Used by the
    first rank of each machine. `names` describe the machines."""

    def __init__(self, store: Any, machine: int, names: Sequence[str], timeout: float) -> None:
        self._machine, self._names, self._timeout = machine, names, timeout
        self._gloo: Any = gloo_group(store, machine, len(names), timeout)
        self._frames = np.zeros((len(names), _HEAD + SMALL), np.uint8)
        self._tensors = list(torch.from_numpy(self._frames))
        self._answers: Answers | None = None  # to the last comparison, if it told of a failure

    def compare(self, word: int, values: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """[machines, bytes]: the values of all machines, if all make the call of this word (0:
        none); else None: then `explain` must follow."""
        stop = _HEAD + values.nbytes
        mine = self._frames[self._machine]
        mine[:_HEAD].view(np.int64)[:] = word, _COMPARES
        mine[_HEAD:stop] = values
        self._answers = self._swap(self._timeout)
        if self._answers.found or self._answers.lost:
            return None
        self._answers = None
        words = self._frames[:, :8].view(np.int64)
        return self._frames[:, _HEAD:stop] if word and (words == word).all() else None

    def explain(self, mine: Notice, compared: bool) -> Notice:
        """`mine` with why not all machines make its call. If they have not `compared` it, they do
        so first."""
        if not compared:
            self.compare(0, np.zeros(0, np.uint8))
        return (self._answers or self._exchange(mine, self._timeout)).outcome(mine)

    def fail(self, mine: Notice) -> Notice:
        """`mine` with the cause of a failure, of which the other machines learn."""
        return self._exchange(mine, GRACE).outcome(mine)

    def _exchange(self, mine: Notice, timeout: float) -> Answers:
        frame = self._frames[self._machine]
        frame[:_HEAD].view(np.int64)[:] = 0, _NOTES
        frame[_HEAD : _HEAD + NOTICE] = np.frombuffer(mine.pack().ljust(NOTICE), np.uint8)
        answers = self._swap(timeout)
        answers.found[self._machine] = mine
        return answers

    def _swap(self, timeout: float) -> Answers:
        """Send this machine's frame to all others and receive theirs, for `timeout` seconds at
        most."""
        others = [m for m in range(len(self._names)) if m != self._machine]
        sent = self._tensors[self._machine]
        lost: dict[int, Lost] = {}
        works: dict[int, list[Any]] = {}
        for m in others:
            try:
                works[m] = [
                    self._gloo.recv([self._tensors[m]], m, 0), self._gloo.send([sent], m, 0)
                ]  # fmt: skip
            except RuntimeError as error:
                lost[m] = self._reason(m, error, 0)
        deadline = time.monotonic() + timeout
        for m in works:
            try:
                for work in works[m]:
                    left = max(0.001, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                lost[m] = self._reason(m, error, timeout)
        notes = [m for m in others if m not in lost and self._kind(m) == _NOTES]
        bodies = {m: bytes(self._frames[m, _HEAD : _HEAD + NOTICE]) for m in notes}
        return Answers(self._names, {m: Notice.unpack(body) for m, body in bodies.items()}, lost)

    def _kind(self, m: int) -> int:
        return int(self._frames[m, 8:_HEAD].view(np.int64)[0])

    def _reason(self, m: int, error: Exception, seconds: float) -> Lost:
        if timed_out(error):
            return Lost(f"{self._names[m]} has not answered for {seconds:g} s", True)
        return Lost(
            f"{self._names[m]} has closed its connection: its first rank died or left", False
        )

    def close(self) -> None:
        self._gloo = None
