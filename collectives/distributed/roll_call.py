"""The first ranks of all machines tell each other what their machine asks for, and who failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from linkweave.collectives.distributed.cluster_map import ALONG
from linkweave.collectives.distributed.gloo import gloo_group, timed_out

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""
GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""
_AT_ONCE = 0.2  # seconds for which a notice may wait for room in a connection
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
        self._others = [m for m in range(len(names)) if m != machine]
        self._gloo: Any = gloo_group(store, machine, len(names), timeout)
        self._frames = torch.zeros((len(names), _HEAD + ALONG), dtype=torch.uint8)  # received
        self._answers: Answers | None = None  # to the last comparison, if it told of a failure

    def compare(
        self, word: int, parts: Sequence[Any] = (), lengths: Sequence[int] = ()
    ) -> list[Any] | None:
        """What all machines have sent along, of these lengths in bytes, if all make the call of
        this word (0: none); else None: then `explain` must follow. `parts` go to the machines."""
        sent = {m: self._frame(word, _COMPARES, parts[m] if parts else None) for m in self._others}
        self._answers = self._swap(sent, self._timeout)
        if self._answers.found or self._answers.lost:
            return None
        self._answers = None
        if not word or any(self._head(m)[0] != word for m in self._others):
            return None
        came = [self._frames[m, _HEAD : _HEAD + n] for m, n in enumerate(lengths)]
        if parts:
            came[self._machine] = parts[self._machine]
        return came

    @staticmethod
    def _frame(word: int, kind: int, part: Any) -> Any:
        head = torch.tensor([word, kind]).view(torch.uint8)
        return head if part is None else torch.cat([head, part])

    def explain(self, mine: Notice, compared: bool) -> Notice:
        """`mine` with why not all machines make its call. If they have not `compared` it, they do
        so first."""
        if not compared:
            self.compare(0)
        if self._answers is None:
            return self._exchange(mine, self._timeout).outcome(mine)
        outcome = self._answers.outcome(mine)
        if self._answers.lost:  # others may have had the answer of a machine that has now closed
            self._tell(outcome)
        return outcome

    def fail(self, mine: Notice) -> Notice:
        """`mine` with the cause of a failure, of which the other machines learn."""
        return self._exchange(mine, GRACE).outcome(mine)

    def _note(self, mine: Notice) -> Any:
        data = torch.frombuffer(bytearray(mine.pack().ljust(NOTICE)), dtype=torch.uint8)
        return self._frame(0, _NOTES, data)

    def _tell(self, mine: Notice) -> None:
        """Send a notice to the machines that can be reached, whose own does not matter any more."""
        for m in self._others:
            with suppress(RuntimeError):
                self._gloo.send([self._note(mine)], m, 0).wait(timedelta(seconds=_AT_ONCE))

    def _exchange(self, mine: Notice, timeout: float) -> Answers:
        answers = self._swap(dict.fromkeys(self._others, self._note(mine)), timeout)
        answers.found[self._machine] = mine
        return answers

    def _swap(self, frames: dict[int, Any], timeout: float) -> Answers:
        """Send the other machines their frames and receive theirs, for `timeout` seconds at
        most."""
        lost: dict[int, Lost] = {}
        works: dict[int, list[Any]] = {}
        for m, frame in frames.items():
            try:
                works[m] = [
                    self._gloo.recv([self._frames[m]], m, 0), self._gloo.send([frame], m, 0)
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
        notes = [m for m in frames if m not in lost and self._head(m)[1] == _NOTES]
        bodies = {m: self._frames[m, _HEAD : _HEAD + NOTICE].numpy().tobytes() for m in notes}
        return Answers(self._names, {m: Notice.unpack(body) for m, body in bodies.items()}, lost)

    def _head(self, m: int) -> list[int]:
        """(word, kind) of the frame that machine `m` has sent."""
        head: list[int] = self._frames[m, :_HEAD].view(torch.int64).tolist()
        return head

    def _reason(self, m: int, error: Exception, seconds: float) -> Lost:
        if timed_out(error):
            return Lost(f"{self._names[m]} has not answered for {seconds:g} s", True)
        return Lost(
            f"{self._names[m]} has closed its connection: its first rank died or left", False
        )

    def close(self) -> None:
        self._gloo = None
