"""The first ranks of all machines tell each other what their machine asks for, and who failed."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from linkweave.collectives.cluster.cluster_map import LONG
from linkweave.collectives.cluster.gloo import Across, timed_out
from linkweave.collectives.cluster.kinds import Bytes, ClusterCall

NOTICE = 1024
"""Bytes of a notice, padded with blanks."""
GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""
MOST_OPEN = 64
"""Calls in a row that go one way; then all machines compare one."""
_TELLING = 0.2  # seconds for which a notice may wait until it is received
_CLOSING = 1.0  # and the last one, of a machine that closes
_AHEAD = 8  # messages under way for which nobody waits, for each other machine; of long ones fewer
_TEXTS = 3  # earlier calls that a notice names
_PRIME = 1_000_003
_HEAD = 16  # bytes of a frame before the values or the notice: a call's word, and what the frame is
_COMPARES, _NOTES, _WAITS = 1, 2, 3
_UNKNOWN = "the machines' calls differ"


@dataclass(frozen=True)
class Notice:
    """What a machine tells the others: its call, or why there is none.

    asked: the call that its ranks make.
    earlier: the last calls before it, if not all machines have compared them; the last first.
    before: the word of all these.
    refused: why its ranks do not make the call; the communicator stays usable.
    failed: what ended it.
    witnessed: whether the failure was seen among its own ranks, who know more than the others.
    late: whether a deadline has passed.
    """

    asked: str = ""
    earlier: str = ""
    before: int = 0
    refused: str = ""
    failed: str = ""
    witnessed: bool = False
    late: bool = False

    def pack(self) -> bytes:
        """The notice as JSON of at most `NOTICE` bytes; long texts are cut."""
        data, most = b"", 2 * NOTICE
        texts = "asked", "earlier", "refused", "failed"
        while not data or len(data) > NOTICE:
            most //= 2
            cut = {name: getattr(self, name)[:most] for name in texts}
            data = json.dumps(asdict(self) | cut).encode()
        return data

    @staticmethod
    def unpack(data: bytes) -> Notice:
        return Notice(**json.loads(data))


@dataclass(frozen=True)
class Lost:
    """Why there is no notice of a machine; `late` as in `Notice`."""

    why: str
    late: bool


def outcome(
    names: Sequence[str], found: Mapping[int, Notice], lost: Mapping[int, Lost], mine: Notice
) -> Notice:
    """`mine` with the cause of a failure: what its own machine saw, or else who does not answer; or
    with why the call is refused. If the machines differed before this call, that is a failure."""
    notices = dict(sorted(found.items()))
    refusals = [n.refused for n in notices.values() if n.refused]
    failed = {m: n for m, n in notices.items() if n.failed}
    seen: Mapping[int, Any] = {m: n for m, n in failed.items() if n.witnessed} or lost or failed
    if seen:
        words = [x.why if seen is lost else f"on {names[m]}: {x.failed}" for m, x in seen.items()]
        failure = "; ".join([*refusals[:1], *words])
        return replace(mine, failed=failure, late=any(x.late for x in seen.values()))
    differed = len({n.before for n in notices.values()}) > 1
    each = [
        f"{names[m]}: {n.asked}" + f" after {n.earlier}" * bool(differed and n.earlier)
        for m, n in notices.items()
    ]
    why = refusals[0] if refusals else f"{_UNKNOWN}: {'; '.join(each)}"
    return replace(mine, failed=why) if differed else replace(mine, refused=why)


class RollCall:
    """Compares calls of machines by their words; where these differ, exchanges notices. Each step
    goes directly between two machines, so that it is known who does not answer. Used by the first
    rank of each machine. `names` describe the machines; `room` is the most bytes that go along.

    In a call with a source or a target, only who hears from another machine compares. Each carries
    the word of such calls on, and compares it in the next call in which it hears from another one.
    """

    def __init__(
        self, store: Any, machine: int, names: Sequence[str], room: int, timeout: float
    ) -> None:
        self._machine, self._names, self._timeout = machine, names, timeout
        self._others = [m for m in range(len(names)) if m != machine]
        self._across = Across(store, machine, len(names), timeout)
        # A frame is received while the one before it is in use.
        frames = torch.zeros((2, len(names), _HEAD + room), dtype=torch.uint8)
        self._frames = [half.unbind() for half in frames]
        self._bytes = frames.numpy()[:, :, _HEAD:]
        self._heads = frames.numpy()[:, :, :_HEAD].view(np.int64)  # (word, what) of each
        self._turn = [0] * len(names)  # which of a machine's frames has come last
        # Begun before a machine sends, a receive takes one message: gloo asks the receiver first.
        self._begun = {m: self._begin(m) for m in self._others}
        self._notices: dict[int, Notice] = {}  # that have come instead of a call
        self._lost: dict[int, Lost] = {}
        self._open: deque[str] = deque(maxlen=_TEXTS)  # the last calls that not all have compared
        self._words = [0]  # of these, each with those before it
        self._under_way: deque[tuple[int, Any]] = deque()  # messages for which nobody has waited
        self._reminders: list[Any] = []  # which nobody need receive before all compare
        self._since = 0.0  # when this machine began to wait
        self._silent: Sequence[int] = ()  # for which this machine waits without having sent a word
        self._reminds = threading.Lock()

    def compare(
        self, call: ClusterCall, parts: Sequence[Bytes] = (), lengths: Sequence[int] = ()
    ) -> list[Bytes] | None:
        """What the machines that this one hears from have sent along, of these lengths in bytes;
        `parts` go to the machines. None if one of them does not make this call, or did not make
        an earlier one: then `explain` must follow. None also if one has been lost."""
        me = self._machine
        word = (self._words[-1] * _PRIME + call.word) % (1 << 62)
        to = [m for m in self._others if call.target in (None, m) and call.source in (None, me)]
        of = [m for m in self._others if call.source in (None, m) and call.target in (None, me)]
        frames: dict[object, Any] = {}  # by part, of which many machines may get the same
        sent = []
        for m in to:
            part = parts[m] if parts else None
            where = None if part is None else (part.ctypes.data, part.nbytes)
            if where not in frames:
                frames[where] = _frame(word, _COMPARES, part)
            sent.append((m, frames[where]))
        deadline = self._deadline(self._timeout)
        self._words.append(word)
        self._send(sent)
        self._silent = [m for m in of if m not in to]
        self._receive(of, deadline)
        with self._reminds:
            self._silent = ()
        if not self._failed:
            self._settle(deadline, self._ahead(parts) if call.one_way else 0)
        if self._lost or self._notices or any(self._head(m)[0] != word for m in of):
            self._words.pop()
            return None
        if call.one_way:
            self._open.appendleft(call.asked)
        else:
            self._all_compared()
        came = [self._bytes[self._turn[m], m, :n] for m, n in enumerate(lengths)]
        if parts:
            came[me] = parts[me]
        return came

    def _ahead(self, parts: Sequence[Bytes]) -> int:
        """How many messages like these may be under way for which nobody waits."""
        longest = max((part.nbytes for part in parts), default=1)
        return min(_AHEAD * len(self._others), LONG[1] // max(1, longest))

    def remind(self) -> None:
        """Tell machines for which this one waits what it waits for, in case they wait for it."""
        with self._reminds:
            silent, self._silent = self._silent, ()
            for m in silent:
                with suppress(RuntimeError):  # who waits will learn of it
                    frame = _frame(self._words[-1], _WAITS, None)
                    self._reminders.append(self._across.send(frame, m))

    def _all_compared(self) -> None:
        self._open.clear()
        self._words = [0]
        self._reminders.clear()

    @property
    def _failed(self) -> bool:
        """Whether a machine is lost, or has told of a failure."""
        return bool(self._lost) or any(notice.failed for notice in self._notices.values())

    @property
    def trouble(self) -> str:
        """Why machines are lost; empty if none is."""
        return "; ".join(lost.why for lost in self._lost.values())

    def explain(self, mine: Notice) -> Notice:
        """`mine` with why not all machines make its call."""
        mine = replace(mine, earlier=", ".join(self._open), before=self._words[-1])
        if not self._failed:
            outcome = self._exchange(mine, self._timeout)
            self._all_compared()
            return outcome
        outcome = self._outcome(mine)  # others may wait to hear of this machine
        self._tell(outcome, _TELLING * len(self._others))
        return outcome

    def fail(self, mine: Notice) -> Notice:
        """`mine` with the cause of a failure, of which the other machines learn."""
        return self._exchange(mine, GRACE)

    def leave(self, why: str) -> None:
        """Tell the other machines why this one makes no more calls; from any thread."""
        frame, deadline = _note(Notice(failed=why, witnessed=True)), time.monotonic() + _TELLING
        under_way = []
        for m in self._others:
            with suppress(RuntimeError):  # its connection is closed
                under_way.append(self._across.send(frame, m))
        for work in under_way:
            with suppress(RuntimeError):
                _end(work, deadline)

    def finish(self, fails: bool) -> None:
        """Wait until the other machines have received what this one has sent them; for `GRACE`
        seconds if this rank `fails`. Raises TimeoutError or ConnectionError if they do not."""
        self._settle(self._deadline(min(GRACE, self._timeout) if fails else self._timeout))
        if self._lost:
            late = any(lost.late for lost in self._lost.values())
            raise (TimeoutError if late else ConnectionError)(
                f"{self.trouble}, before it had received all that it was sent"
            )
        if self._open and not fails:  # so that who finds a difference can name these calls
            earlier = ", ".join(self._open)
            self._tell(Notice("close", earlier=earlier, before=self._words[-1]), _CLOSING)

    def _outcome(self, mine: Notice) -> Notice:
        notices = self._notices | {self._machine: mine}
        lost = {m: why for m, why in self._lost.items() if m not in notices}
        self._notices, self._lost = {}, {}
        return outcome(self._names, notices, lost, mine)

    def _tell(self, mine: Notice, seconds: float) -> None:
        """Send a notice to the machines that can be reached, whose own does not matter any more."""
        self._send([(m, _note(mine)) for m in self._others])
        self._settle(self._deadline(seconds))

    def _exchange(self, mine: Notice, timeout: float) -> Notice:
        """The outcome of all machines' notices, each of which comes after the calls that its
        machine has made."""
        deadline, note = self._deadline(timeout), _note(mine)
        reached = [m for m in self._others if m not in self._lost]
        self._send([(m, note) for m in reached])
        for m in reached:  # one that has left since may have sent its notice before
            self._lost.pop(m, None)
        while left := [m for m in self._others if m not in self._notices | self._lost]:
            self._receive(left, deadline)
            if time.monotonic() > deadline:  # they send, but no notice
                if not self._lost:
                    self._lost = {m: Lost(f"{self._names[m]} goes on", True) for m in left}
                break
        self._settle(deadline)
        return self._outcome(mine)

    def _send(self, frames: Sequence[tuple[int, Any]]) -> None:
        """Begin to send machines their frames."""
        for m, frame in frames:
            try:
                self._under_way.append((m, self._across.send(frame, m)))
            except RuntimeError as error:
                self._lose(m, error)

    def _begin(self, m: int) -> Any:
        """Begin to receive a machine's next frame. Raises RuntimeError."""
        return self._across.recv(self._frames[1 - self._turn[m]][m], m)

    def _head(self, m: int) -> Any:
        """The word of a machine's last frame, and what the frame is."""
        return self._heads[self._turn[m], m]

    def _receive(self, sources: Sequence[int], deadline: float) -> None:
        """Receive a frame from each of the machines, but no reminder of a call that this one has
        made."""
        left = deque(sources)
        while left:
            m = left.popleft()
            try:
                _end(self._begun.pop(m, None) or self._begin(m), deadline)
            except RuntimeError as error:
                self._lose(m, error)
                continue
            self._turn[m] = 1 - self._turn[m]
            with suppress(RuntimeError):  # if it has left, the next call will learn of it
                self._begun[m] = self._begin(m)
            word, what = self._head(m).tolist()
            if what == _WAITS and word in self._words:
                left.append(m)
            elif what == _NOTES:
                self._notices[m] = Notice.unpack(self._bytes[self._turn[m], m, :NOTICE].tobytes())

    def _settle(self, deadline: float, most: int = 0) -> None:
        """Wait until at most so many messages are under way."""
        while len(self._under_way) > most:
            m, work = self._under_way.popleft()
            try:
                _end(work, deadline)
            except RuntimeError as error:
                self._lose(m, error)

    def _deadline(self, seconds: float) -> float:
        self._since = time.monotonic()
        return self._since + seconds

    def _lose(self, m: int, error: Exception) -> None:
        late = timed_out(error)
        why = (
            f"has not answered for {time.monotonic() - self._since:.1f} s" if late
            else "has closed its connection: its first rank died or left"
        )  # fmt: skip
        self._lost.setdefault(m, Lost(f"{self._names[m]} {why}", late))

    def close(self) -> None:
        self._under_way.clear()
        self._reminders.clear()
        self._begun.clear()
        self._across.close()


def _end(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


def _frame(word: int, what: int, part: Bytes | None) -> Any:
    head = np.array((word, what)).view(np.uint8)
    return torch.from_numpy(head if part is None else np.concatenate((head, part)))


def _note(mine: Notice) -> Any:
    return _frame(0, _NOTES, np.frombuffer(mine.pack().ljust(NOTICE), np.uint8))
