"""The communicator of ranks on several machines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import torch._C._distributed_c10d as c10d

from linkweave.collectives.calls.work import Worker
from linkweave.collectives.communicator import Communicator
from linkweave.collectives.distributed import calls
from linkweave.collectives.distributed.across import Across
from linkweave.collectives.distributed.call import Call, Unequal
from linkweave.collectives.distributed.combine import undivided
from linkweave.collectives.distributed.connections import Connections
from linkweave.collectives.distributed.gloo import gloo_group, timed_out
from linkweave.collectives.distributed.methods import ClusterCollectives
from linkweave.collectives.distributed.roll_call import NOTICE, Notice, RollCall
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.launch.machines import Machines
from linkweave.collectives.settings import Settings

LONGER = 1.0
"""Seconds by which a rank waits longer for those of its machine than for data of other machines,
and the first ranks for each other's notices once more: who knows more speaks first."""

GRACE = 5.0
"""Seconds for which a machine that has failed waits for the others to tell what they know."""

Meet = Callable[[int, int, Any], Any]
"""Makes the communicator of a rank, of so many, that meet over a store of torch.distributed."""


class ClusterCommunicator(ClusterCollectives):
    """The ranks of several machines, and the collectives among them, on CPU tensors.

    `machine` is the communicator of this machine's ranks; `across` connects it to the ranks with
    the same local rank on the other machines, over torch.distributed (None for a rank whose local
    rank some machine does not have). The collectives are those of `Communicator`, with the same
    arguments. Before each call, all ranks compare what they ask for; if that differs, each raises
    CollectiveError before data moves. If a rank dies or a machine cannot be reached, each raises
    CollectiveAborted or CollectiveTimeout, and the communicator has ended.
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
        self._patience = settings.timeout + GRACE + 3 * LONGER  # for this machine's first rank
        self.barrier()

    # ---- memory and parts --------------------------------------------------------------------
    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """As `Communicator.empty`, in memory that this machine's ranks share."""
        return self.machine.empty(shape, dtype)

    def leave_cores(self) -> None:
        """As `Communicator.leave_cores`, among the ranks of this machine."""
        self.machine.leave_cores()

    def gloo(self) -> Any:
        """A group of gloo over all ranks, for what this communicator has not. All must call it."""
        store = c10d.PrefixStore(f"gloo/{next(self._numbers)}/", self._store)
        made = gloo_group(store, self.rank, self.size, self.timeout)
        self.barrier()  # no rank may leave while another one connects to it
        return made

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
            outcome, total = self._agree(call, f"rank {self.rank}: {mine}" if mine else "")
            if outcome.agreed:
                return call.finish(call.read(total)) if call.small else call.body()
        except Unequal as error:
            raise CollectiveError(str(error)) from None
        except Exception as error:
            raise self._end(self._told(call.asked, error)) from error
        if outcome.failed:
            raise self._end(outcome)
        raise mine or CollectiveError(outcome.refused)

    def _agree(self, call: Call, refused: str) -> tuple[Notice, bytes]:
        """Compare what all ranks ask for, and combine values that are `small` enough to go along.

        Returns the outcome, the same on all ranks of the machine, and the total's bytes.
        """
        payload = json.dumps([call.asked, refused]).encode()
        rows = [json.loads(row) for row in self.machine.calls.gather("calls", payload)]
        refused = next((why for _, why in rows if why), "")
        if not refused and len({asked for asked, _ in rows}) > 1:
            each = zip(self.machines.ranks[self._links.index], rows, strict=True)
            words = (f"rank {rank}: {asked}" for rank, (asked, _) in each)
            refused = f"the ranks' calls differ: {'; '.join(words)}"
        if call.small and not refused:
            self.machine.reduce(call.values, undivided(call.op))
        mine = Notice(call.asked, refused)
        told = self.machine.calls.share(lambda: self._compared(mine, call), self._patience)
        return Notice.unpack(told[:NOTICE]), told[NOTICE:]

    def _compared(self, mine: Notice, call: Call) -> bytes:
        """On a machine's first rank: compare its call with those of the other machines."""
        assert self._roll_call is not None
        values = call.written() if call.small else b""
        answers = self._roll_call.exchange(mine, values=values)
        outcome = answers.outcome(mine)
        small = call.small and outcome.agreed
        total = call.combined(answers.values, self.size) if small else b""
        return outcome.pack().ljust(NOTICE) + total

    def _told(self, asked: str, error: Exception) -> Notice:
        """Tell all ranks that this one has failed. Returns what is then known of the cause."""
        machine = self.machine.calls
        late = isinstance(error, CollectiveTimeout) or timed_out(error)
        mine = Notice(asked, failed=str(error), late=late)
        self._links.close_across()  # so that nobody on other machines waits for this rank
        known = isinstance(error, CollectiveError)  # by this machine's ranks
        if known:
            mine = replace(mine, failed=self._renamed(mine.failed))
        try:
            if not known:
                machine.refuse(error)
            if machine.health.broken is None:  # a rank of this machine knows of another machine
                rows = machine.gather("calls", json.dumps(["" if known else mine.failed]).encode())
                causes = [cause for row in rows for cause in json.loads(row) if cause]
                mine = replace(mine, failed=(causes or [mine.failed])[0])
                return Notice.unpack(
                    machine.share(lambda: self._asked_around(mine).pack(), self._patience)
                )
        except CollectiveError:
            pass  # this machine's ranks have come apart; each raises what it knows
        return self._asked_around(replace(mine, witnessed=True)) if self._roll_call else mine

    def _asked_around(self, mine: Notice) -> Notice:
        """On a machine's first rank: tell the others of a failure, and hear what they know."""
        assert self._roll_call is not None
        return self._roll_call.exchange(mine, GRACE).outcome(mine)

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
        self._links.close_across()
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
        """Finish asynchronous calls and free all resources; nothing in a forked process."""
        if self.closed or self.machine.calls.health.foreign:
            return
        with ExitStack() as last:  # in reverse order; if one step fails, the others still run
            last.callback(self.machine.close)
            last.callback(self._disconnect)
            for part in self._parts:
                last.callback(part.close)
            last.callback(self._worker.close, self.rank)
            while self._before_close:
                last.callback(self._before_close.pop())
        self._parts.clear()

    def _disconnect(self) -> None:
        self._links.close()
        if self._roll_call:
            self._roll_call.close()

    def abort(self, why: int) -> None:
        """Make this machine's calls raise CollectiveAborted, and let the other machines notice."""
        if not (self.closed or self.machine.calls.health.foreign):
            self.machine.abort(why)
            self._links.close_across()

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
