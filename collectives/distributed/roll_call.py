"""The first ranks of all machines tell each other what their machine asks for, and who failed."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from linkweave.collectives.distributed.call import Call
from linkweave.collectives.distributed.cluster_map import ALONG
from linkweave.collectives.distributed.gloo import gloo_group, timed_out

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""
GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""
_TELLING = 0.2  # seconds for which a notice may wait until it is received
_AHEAD = 8  # messages to each machine for which nobody waits
_TEXTS = 8  # calls that a notice names
_PRIME = 1_000_003
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
    open: whether it has made calls before, which not all machines have compared.
    """

    asked: str = ""
    refused: str = ""
    failed: str = ""
    witnessed: bool = False
    late: bool = False
    open: bool = False

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
            refused = self._refusal()
            unsure = any(notice.open for notice in self.found.values())
            return replace(mine, refused=refused, failed=refused if unsure else "")
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
    goes directly between two machines, so that it is known who does not answer. Used by the first
    rank of each machine. `names` describe the machines.

    In a call with a source or a target, only who hears from another machine compares; all compare
    the rest with the next call in which they hear from each other, or when they close. Until then
    each carries the word of its calls on.
    """

    def __init__(self, store: Any, machine: int, names: Sequence[str], timeout: float) -> None:
        self._machine, self._names, self._timeout = machine, names, timeout
        self._others = [m for m in range(len(names)) if m != machine]
        self._gloo: Any = gloo_group(store, machine, len(names), timeout)
        self._frames = torch.zeros((len(names), _HEAD + ALONG), dtype=torch.uint8)  # received
        self._heads = self._frames.numpy()[:, :_HEAD].view(np.int64)  # (word, kind) of each
        self._notices: dict[int, Notice] = {}  # that have come instead of a call
        self._lost: dict[int, Lost] = {}
        self._open: deque[str] = deque(maxlen=_TEXTS)  # the last calls that not all have compared
        self._word = 0  # of these
        self._under_way: deque[tuple[int, Any]] = deque()  # messages for which nobody has waited

    def compare(
        self, call: Call, parts: Sequence[Any] = (), lengths: Sequence[int] = ()
    ) -> list[Any] | None:
        """What the machines that this one hears from have sent along, of these lengths in bytes;
        `parts` go to the machines. None if one of them does not make this call, or did not make
        an earlier one: then `explain` must follow."""
        me, every = self._machine, call.source is None and call.target is None
        word = (self._word * _PRIME + call.word) % (1 << 62)
        to = [m for m in self._others if call.target in (None, m) and call.source in (None, me)]
        of = [m for m in self._others if call.source in (None, m) and call.target in (None, me)]
        frames: dict[int, Any] = {}  # by part, of which many machines may get the same
        sent = []
        for m in to:
            part = parts[m] if parts else None
            if id(part) not in frames:
                frames[id(part)] = _frame(word, _COMPARES, part)
            sent.append((m, frames[id(part)]))
        deadline = time.monotonic() + self._timeout
        self._send(sent)
        self._receive(of, deadline)
        self._settle(deadline, 0 if every else _AHEAD * len(self._others))
        if not every:
            self._open.append(call.asked)
            self._word = word
        if of and (self._lost or self._notices or any(self._heads[m, 0] != word for m in of)):
            return None
        if every:
            self._open.clear()
            self._word = 0
        came = [self._frames[m, _HEAD : _HEAD + n] for m, n in enumerate(lengths)]
        if parts:
            came[me] = parts[me]
        return came

    def explain(self, mine: Notice) -> Notice:
        """`mine` with why not all machines make its call. If some already know more of earlier
        calls than others, that is a failure."""
        mine = replace(mine, asked=", then ".join([*self._open, mine.asked]), open=bool(self._open))
        told = self._lost or any(notice.failed for notice in self._notices.values())
        outcome = self._outcome(mine) if told else self._exchange(mine, self._timeout)
        if told and self._lost:  # others may have had the answer of a machine that has now closed
            self._tell(outcome)
        return outcome

    def fail(self, mine: Notice) -> Notice:
        """`mine` with the cause of a failure, of which the other machines learn."""
        return self._exchange(mine, GRACE)

    def finish(self) -> str:
        """Wait until the other machines have what this one sent them, and compare what not all
        have compared. Returns why their calls differ; empty if they do not."""
        if not self._open or self.compare(Call("close", None)) is not None:
            return ""
        outcome = self.explain(Notice("close"))
        return outcome.refused

    def _outcome(self, mine: Notice) -> Notice:
        notices, lost = self._notices | {self._machine: mine}, self._lost
        self._notices, self._lost = {}, {}
        return Answers(self._names, notices, lost).outcome(mine)

    def _tell(self, mine: Notice) -> None:
        """Send a notice to the machines that can be reached, whose own does not matter any more."""
        for m in self._others:
            with suppress(RuntimeError):
                self._gloo.send([_note(mine)], m, 0).wait(timedelta(seconds=_TELLING))

    def _exchange(self, mine: Notice, timeout: float) -> Notice:
        """The outcome of all machines' notices, each of which comes after the calls that its
        machine has made."""
        deadline, note = time.monotonic() + timeout, _note(mine)
        self._send([(m, note) for m in self._others if m not in self._lost])
        while left := [m for m in self._others if m not in self._notices | self._lost]:
            self._receive(left, deadline)
        self._settle(deadline)
        return self._outcome(mine)

    def _send(self, frames: Sequence[tuple[int, Any]]) -> None:
        """Begin to send machines their frames."""
        for m, frame in frames:
            try:
                self._under_way.append((m, self._gloo.send([frame], m, 0)))
            except RuntimeError as error:
                self._lose(m, error)

    def _receive(self, sources: Sequence[int], deadline: float) -> None:
        """Receive a frame from each of the machines."""
        works = []
        for m in sources:
            try:
                works.append((m, self._gloo.recv([self._frames[m]], m, 0)))
            except RuntimeError as error:
                self._lose(m, error)
        for m, work in works:
            self._end(m, work, deadline)
            if m not in self._lost and self._heads[m, 1] == _NOTES:
                body = self._frames[m, _HEAD : _HEAD + NOTICE].numpy().tobytes()
                self._notices[m] = Notice.unpack(body)

    def _settle(self, deadline: float, most: int = 0) -> None:
        """Wait until at most so many messages are under way."""
        while len(self._under_way) > most:
            self._end(*self._under_way.popleft(), deadline)

    def _end(self, m: int, work: Any, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            self._lose(m, error)

    def _lose(self, m: int, error: Exception) -> None:
        late = timed_out(error)
        why = (
            f"has not answered for {self._timeout:g} s" if late
            else "has closed its connection: its first rank died or left"
        )  # fmt: skip
        self._lost.setdefault(m, Lost(f"{self._names[m]} {why}", late))

    def close(self) -> None:
        self._under_way.clear()
        self._gloo = None


def _frame(word: int, kind: int, part: Any) -> Any:
    head = torch.tensor([word, kind]).view(torch.uint8)
    return head if part is None else torch.cat([head, part])


def _note(mine: Notice) -> Any:
    data = torch.frombuffer(bytearray(mine.pack().ljust(NOTICE)), dtype=torch.uint8)
    return _frame(0, _NOTES, data)
