"""The communicator of ranks on several machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from traceback import clear_frames
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from linkweave.collectives.calls.work import Worker
from linkweave.collectives.communicator import Communicator
from linkweave.collectives.distributed import calls
from linkweave.collectives.distributed.across import Across
from linkweave.collectives.distributed.call import Call, Unequal
from linkweave.collectives.distributed.connections import Connections
from linkweave.collectives.distributed.gloo import timed_out
from linkweave.collectives.distributed.methods import ClusterCollectives
from linkweave.collectives.distributed.roll_call import GRACE, Notice, RollCall
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.launch.machines import Machines
from linkweave.collectives.runtime.diagnose import INTERRUPTED
from linkweave.collectives.settings import Settings

LONGER = 1.0
"""Seconds by which a rank waits longer for those of its machine than for data of other machines,
and the first ranks for each other's notices once more: who knows more speaks first."""

_NOTHING = torch.zeros(0, dtype=torch.uint8)

Meet = Callable[[int, int, Any], Any]
"""Makes the communicator of a rank, of so many, that meet over a store of torch.distributed."""


class ClusterCommunicator(ClusterCollectives):
    """The ranks of several machines, and the collectives among them, on CPU tensors.

    `machine` is the communicator of this machine's ranks; `across` connects it to the ranks with
    the same local rank on the other machines, over torch.distributed (None for a rank whose local
    rank some machine does not have). The collectives are those of `Communicator`, with the same
    arguments. In each call, all ranks compare what they ask for; if that differs, each raises
    CollectiveError before a result is written. If a rank dies or a machine cannot be reached, each
    raises CollectiveAborted or CollectiveTimeout, and the communicator has ended.
    """

    compares_allreduces = True
    """All ranks may set this to False before their first call, if they make the same all-reduces
    anyway: these then save a round trip, and one that a rank refuses ends the communicator."""

    def __init__(
        self, rank: int, machines: Machines, machine: Communicator, store: Any,
        settings: Settings, meet: Meet,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, machines.size
        self.machine, self.machines, self.settings = machine, machines, settings
        self._store, self._meet = store, meet
        self._links = Connections(rank, machines, machine, store, settings.timeout)
        self._roll_call: RollCall | None = None
        if machine.rank == 0:
            names = [machines.describe(m) for m in range(machines.count)]
            control = c10d.PrefixStore("control/", store)
            limit = settings.timeout + 2 * LONGER
            self._roll_call = RollCall(control, self._links.index, names, limit)
        self._worker = Worker()
        self._parts: list[Any] = []
        self._before_close: list[Callable[[], None]] = []
        self._numbers = count()
        self._ended = ""  # why no call can be made
        # for this machine's first rank, which may compare a call twice
        self._patience = 2 * (settings.timeout + 2 * LONGER) + GRACE + LONGER
        machine.calls.control.allowance = self._patience
        machine.leave_cores()  # gloo's threads need them
        self.barrier()

    # ---- memory and parts --------------------------------------------------------------------
    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """As `Communicator.empty`, in memory that this machine's ranks share."""
        return self.machine.empty(shape, dtype)

    def split(self, color: int = 0) -> Any:
        """As `Communicator.split`. Returns a `Communicator` for ranks of one machine."""
        colors = self._submit(False, calls.split, color)
        ranks = [r for r, c in enumerate(colors) if c == color]
        where = c10d.PrefixStore(f"split/{next(self._numbers)}/{color}/", self._store)
        part = self._meet(ranks.index(self.rank), len(ranks), where)
        self._keep([part])
        return part

    def lanes(self, n: int) -> list[ClusterCommunicator]:
        """`n` communicators of all ranks, for calls that run at once, each from its own thread."""
        n, number = self._submit(False, calls.lanes, n), next(self._numbers)
        made = [
            ClusterCommunicator(
                self.rank, self.machines, lane,
                c10d.PrefixStore(f"lanes/{number}/{i}/", self._store), self.settings, self._meet,
            )
            for i, lane in enumerate([self.machine.split() for _ in range(n)])
        ]  # fmt: skip
        self._keep(made)
        return made

    def _keep(self, parts: Sequence[Any]) -> None:
        self._parts = [p for p in self._parts if not p.closed] + [*parts]

    # ---- how a call is made ------------------------------------------------------------------
    def _call(self, prepare: Callable[..., Call], *args: Any) -> Any:
        self._check()
        outer = sys.exception()  # which the caller is handling
        mine: Exception | None = None
        call = Call(prepare.__name__, None)
        try:
            call = prepare(self._links, *args)
        except Exception as error:
            mine = error
        try:
            if prepare in calls.ALLREDUCES and not self.compares_allreduces:
                if mine:
                    raise RuntimeError(str(mine)) from mine  # no other rank knows of it
                return call.body()
            compared, came = self._compared(call, mine)
            if compared:
                return call.along.end(came) if call.along else call.body()
            refused = f"rank {self.rank}: {mine}" if mine else ""
            outcome = self._asked_around(self._machines_notice(Notice(call.asked, refused)))
        except Unequal as error:
            raise CollectiveError(str(error)) from None
        except Exception as error:
            self._let_go(error, outer)
            raise self._end(self._told(call.asked, error)) from error
        except BaseException as error:  # an interrupt: no rank must wait for this one
            self._ended = f"{call.asked} was interrupted"
            self._let_go(error, outer)
            self.abort(INTERRUPTED)
            raise
        if outcome.failed:
            raise self._end(outcome)
        raise mine or CollectiveError(outcome.refused)

    def _compared(self, call: Call, mine: Exception | None) -> tuple[bool, Any]:
        """Whether no machine that this one hears from, and no rank of this one, asks for something
        else, and the bytes that have come along."""
        machine, along, index = self.machine.calls, call.along, self._links.index
        if mine:
            machine.refuse(mine)
            return False, None
        hears, alone = call.target in (None, index), self.machine.size == 1
        given = along.given.view(torch.uint8) if along else _NOTHING
        rows = given.view(1, -1)
        told = torch.zeros((along.nbytes if along and hears else 0) + 1, dtype=torch.uint8)
        try:
            if call.source in (None, index) and not alone:
                rows = given.new_empty((self.machine.size if self._roll_call else 0, given.numel()))
                result = rows.numpy() if len(rows) else None
                machine.meet("gather", given.numpy(), call.word, result)
            if self._roll_call is not None:
                with machine.control.alive():
                    merged = self._compared_by_machines(self._roll_call, call, rows)
                    if merged is not None:
                        told[:-1], told[-1] = merged, 1
            if not hears:
                return True, _NOTHING
            if not alone:
                machine.meet("broadcast", told.numpy(), call.word)
        except CollectiveError:
            if machine.health.broken:
                raise
            return False, None
        return bool(told[-1]), told[:-1]

    def _compared_by_machines(self, roll: RollCall, call: Call, rows: Any) -> Any:
        """What the ranks of this machine get, unless another machine makes another call: then
        None."""
        along = call.along
        parts, lengths = (along.parts(rows), along.lengths) if along else ((), ())
        came = roll.compare(call, parts, lengths)
        if along is None or came is None or call.target not in (None, self._links.index):
            return None if came is None else _NOTHING
        merged = along.merged(came, self.size)
        if along.shares:
            last = replace(call, target=along.to)
            came = roll.compare(last, [merged] * len(along.shares), along.shares)
            merged = None if came is None else torch.cat(came)
        return merged

    def _machines_notice(self, mine: Notice) -> Notice:
        """What this machine tells the others: of its ranks' failures the first, or else why they
        make no call."""
        every = self.machine.calls.gather("calls", mine.pack())
        rows = [Notice.unpack(row) for row in every]
        failed = next((row.failed for row in rows if row.failed), "")
        late = mine.late or any(row.late for row in rows if row.failed)
        refused = next((row.refused for row in rows if row.refused), "")
        if not refused and len({row.asked for row in rows}) > 1:
            each = zip(self.machines.ranks[self._links.index], rows, strict=True)
            words = "; ".join(f"rank {rank}: {row.asked}" for rank, row in each)
            refused = f"the ranks' calls differ: {words}"
        return replace(mine, refused=refused, failed=failed or mine.failed, late=late)

    def _told(self, asked: str, error: Exception) -> Notice:
        """Tell all ranks that this one has failed. Returns what is then known of the cause."""
        machine = self.machine.calls
        late = isinstance(error, CollectiveTimeout) or timed_out(error)
        mine = Notice(asked, failed=str(error) or repr(error), late=late)
        self._links.disconnect()  # so that nobody on other machines waits for this rank
        known = isinstance(error, CollectiveError)  # by this machine's ranks
        if known:
            mine = replace(mine, failed=self._renamed(mine.failed))
        try:
            if not known:
                machine.refuse(error)
            if machine.health.broken is None:  # a rank of this machine knows of another machine
                cause = self._machines_notice(replace(mine, failed="" if known else mine.failed))
                mine = replace(mine, failed=cause.failed or mine.failed, late=cause.late)
                return self._asked_around(mine)
        except CollectiveError:
            pass  # this machine's ranks have come apart; each raises what it knows
        return self._roll_call.fail(replace(mine, witnessed=True)) if self._roll_call else mine

    @staticmethod
    def _let_go(error: BaseException | None, outer: BaseException | None) -> None:
        """Drop the messages under way that the frames of an error, and of those that led to it in
        this call, hold: they keep connections open. `outer` is from before the call."""
        while error is not None and error is not outer:
            clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def _asked_around(self, mine: Notice) -> Notice:
        """What the machines tell each other of a call that is not made; on all ranks of this
        one."""

        def outcome() -> bytes:
            roll = self._roll_call
            assert roll is not None
            return (roll.fail(mine) if mine.failed else roll.explain(mine)).pack()

        return Notice.unpack(self.machine.calls.share(outcome, self._patience))

    def _renamed(self, words: str) -> str:
        """A message of this machine's communicator with the ranks' numbers among all ranks."""
        ranks = self.machines.ranks[self._links.index]

        def all_of(found: re.Match[str]) -> str:
            numbers = re.sub(r"\d+", lambda number: str(ranks[int(number[0])]), found[2])
            return f"{found[1]}{numbers}"

        try:
            return re.sub(r"\b(ranks? \[?)(\d+(?:, \d+)*)", all_of, words)
        except IndexError:  # another communicator's numbers
            return words

    def _end(self, notice: Notice) -> CollectiveError:
        """End the communicator. Returns the error to raise."""
        self._ended = notice.failed
        self._links.disconnect()
        kind = CollectiveTimeout if notice.late else CollectiveAborted
        return kind(f"rank {self.rank}, {notice.asked}: {notice.failed}", rank=self.rank)

    def _check(self) -> None:
        if self._ended:
            raise CollectiveError(
                f"this communicator failed before ({self._ended}); make a new one"
            )
        self.machine.calls.health.check()

    # ---- the end -----------------------------------------------------------------------------
    @property
    def across(self) -> Across | None:
        """The ranks with this local rank, one of each machine."""
        return self._links.across

    @property
    def timeout(self) -> float:
        """Longest wait for a peer, in seconds."""
        return self.settings.timeout

    @property
    def closed(self) -> bool:
        return self.machine.closed

    def before_close(self, call: Callable[[], None]) -> None:
        """As `Communicator.before_close`."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish asynchronous calls and free all resources; nothing in a forked process.

        After a call in which a machine has not heard from all others, waits until these have come
        as far. Raises CollectiveError if their calls differ.
        """
        if self.closed or self.machine.calls.health.foreign:
            return
        with ExitStack() as last:  # in reverse order; if one step fails, the others still run
            last.callback(self.machine.close)
            last.callback(self._disconnect)
            last.callback(self._finish, unwinding=sys.exception() is not None)
            for part in self._parts:
                last.callback(part.close)
            last.callback(self._worker.close, self.rank)
            while self._before_close:
                last.callback(self._before_close.pop())
        self._parts.clear()

    def _finish(self, unwinding: bool) -> None:
        if self._roll_call and not self._ended and not unwinding:
            with self.machine.calls.control.alive():
                if refused := self._roll_call.finish():
                    raise CollectiveError(f"rank {self.rank}: {refused}")

    def _disconnect(self) -> None:
        self._links.close()
        if self._roll_call:
            self._roll_call.close()

    def abort(self, why: int) -> None:
        """Make this machine's calls raise CollectiveAborted, and let the other machines notice."""
        if not (self.closed or self.machine.calls.health.foreign):
            self.machine.abort(why)
            self._links.disconnect()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Communicator, name):
            raise _OfOneMachine(f"{name} is for the ranks of one machine: see `machine`")
        raise AttributeError(f"'ClusterCommunicator' object has no attribute {name!r}")

    def __enter__(self) -> ClusterCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OfOneMachine(CollectiveError, AttributeError):
    """A method that communicators of one machine have."""
