"""One rank's calls on several machines, as `calls.operations` make them: ranks compare a call with
those that they hear from before its result can be read."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.host import FifoCache
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.calls.trace import CALLS, Trace, label
from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.cluster.gloo import GLOO_DTYPES, timed_out
from linkweave.collectives.cluster.kinds import NOTHING, Along, Bytes, ClusterCall, call_of
from linkweave.collectives.cluster.pieces import flat_over
from linkweave.collectives.cluster.roll_call import GRACE, MOST_OPEN, Notice, RollCall
from linkweave.collectives.cluster.sparse import SparseCluster
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.collectives.runtime.buffer import Buffer, check_op
from linkweave.collectives.runtime.diagnose import INTERRUPTED, REASONS
from linkweave.collectives.runtime.tensors import as_buffer

LONGER = 1.0
"""Seconds by which a rank waits longer for those of its machine than for data of other machines,
and the first ranks for each other's notices once more: who knows more speaks first."""

_VERBS = {"allreduce_list": "allreduce", "queued": "allreduce_queue", "alltoallv": "alltoall"}
_MAY_GO_UNCOMPARED = {*COLLECTIVES, "allreduce_queue"}
_AGREED = np.ones(1, np.uint8)


class ClusterCalls:
    """The calls of one communicator on one rank; one runs at a time. The first rank of a machine
    compares them with the other machines by the `roll_call`; others have None."""

    assumes = False  # no call takes the sizes of an earlier one for granted

    def __init__(self, links: Connections, roll_call: RollCall | None, timeout: float) -> None:
        self.rank, self.size, self.links = links.rank, links.size, links
        self.machine, self.machines = links.machine, links.machines
        self.compares = True
        self.ended, self._closed = "", False  # why no call can be made
        self._roll_call, self._asked, self._compares = roll_call, "", True
        self._one_way = 0  # calls in a row
        self._known = FifoCache[tuple[object, ...], tuple[ClusterCall, list[object]]]()
        self._trace = Trace(self.rank)
        # for this machine's first rank, which may compare a call twice
        self._patience = 2 * (timeout + 2 * LONGER) + GRACE + LONGER
        self.machine.calls.control.allowance = self._patience

    # ---- what operations ask for ---------------------------------------------------------------
    def carry_out(self, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body(self, *args)`, which makes calls."""
        of_kind = body in (operations.into, operations.divided)
        self._begin(args[0] if of_kind else _VERBS.get(body.__name__, body.__name__))
        return body(self, *args)

    def _begin(self, asked: str) -> None:
        self.check()
        self._asked = asked
        self._compares = self.compares or asked not in _MAY_GO_UNCOMPARED

    def repeat(
        self, kind: str, address: int, nbytes: int, dtype: str, op: str, root: int,
        how: How = "auto", result: int | None = None, *uneven: Any, owners: Sequence[Any] = (),
    ) -> bool:  # fmt: skip
        """Make a call once more, as `HostCalls.repeat`. Returns False unless its input and result,
        the memory of `owners`, are where those of an earlier one were."""
        known = None
        if how == "auto" and isinstance(op, str) and not uneven:
            known = self._known.get((kind, address, nbytes, dtype, op, root, result))
        if known is None or "LINKWEAVE_ALGORITHM" in os.environ:
            return False
        self._begin(kind)
        call, held = known
        self._make_traced(call, kind, nbytes, held, owners)
        return True

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Tell the other ranks of an error inside, so that none waits for this rank's call."""
        try:
            yield
        except Exception as error:
            self.make_call(ClusterCall(self._asked, None), error)

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        return as_buffer(x, written)

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Any = 0, algorithm: How = "auto",
        parts: int = 0,
    ) -> Request:  # fmt: skip
        check_op(op, buffer.dtype)
        if COLLECTIVES[kind].combines and buffer.dtype not in GLOO_DTYPES:
            raise CollectiveError(f"{buffer.dtype} is combined on one machine only: gloo lacks it")
        forced = os.environ.get("LINKWEAVE_ALGORITHM") if COLLECTIVES[kind].tunable else None
        if forced or algorithm != "auto":
            asked = f"LINKWEAVE_ALGORITHM={forced}" if forced else f"algorithm={algorithm!r}"
            raise CollectiveError(f'{asked} on several machines, where only "auto" is allowed')
        return Request(kind, buffer, op, root, parts=parts)

    def scratch(self, request: Request, nbytes: int) -> Buffer:
        like = request.buffer
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return Buffer(memory.data_ptr(), like.nbytes, like.dtype, like.itemsize, memory)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.machine.calls.copy(dst, src, nbytes)

    def known_sizes(self, key: object) -> None:
        return None

    def remember_sizes(self, key: object, sizes: object) -> None:
        pass

    def gather(self, what: str, payload: bytes) -> list[bytes]:
        """All ranks' payloads, padded with blanks, by rank; `what` is compared."""
        width = 64 + 24 * self.size  # a number of each rank, and a few words
        with self.sharing_errors():
            if len(payload) > width:
                raise CollectiveError(f"{what}: {payload[:40]!r}... is longer than {width} bytes")
        mine = torch.frombuffer(bytearray(payload.ljust(width)), dtype=torch.uint8)
        every = torch.empty(self.size * width, dtype=torch.uint8)
        request = Request("allgather", as_buffer(every)[0])
        self.make_call(replace(call_of(self.links, request, mine, every), asked=what))
        return [row.numpy().tobytes() for row in every.view(self.size, width)]

    def make(self, request: Request) -> None:
        """Make a call in place."""
        self._make(request, request.buffer, request.buffer, None)

    def stage(self, request: Request, given: Buffer, result: Buffer | None) -> None:
        """Make a call from an input to a result; without one, this rank gets none."""
        self._make(request, given, result, 0 if result is None else result.address)

    def _make(self, request: Request, given: Buffer, result: Buffer | None, to: int | None) -> None:
        """Make a call, and remember it for `repeat`."""
        held: list[object] = []  # while the call is made, the tensors that `x` and `out` view
        with self.sharing_errors():
            x = flat_over(replace(given, owner=held))
            out = x if result is given else result and flat_over(replace(result, owner=held))
            call = call_of(self.links, request, x, out)
        kind, whole, root = request.kind, request.buffer, request.root
        self._make_traced(call, kind, whole.nbytes, held, (given, result))
        plain = request.layers is None and not (request.sizes or request.parts)
        key = (kind, given.address, whole.nbytes, whole.dtype, request.op, root, to)
        if plain and key not in self._known:
            self._known.add(key, (call, held))

    def _make_traced(
        self, call: ClusterCall, kind: str, nbytes: int, held: list[object], owners: Sequence[Any]
    ) -> None:
        """Make a call of `owners`' memory. After an error connections may go on using it, through
        views that keep `held`."""
        held += owners
        along = self._goes_along(call)
        with self._trace.call(label(kind, "along" if along else "network", nbytes)):
            start = time.monotonic()
            try:
                self.make_call(call)
            except BaseException as error:
                if isinstance(error, CollectiveError) and not (self.ended or self._closed):
                    held.clear()  # a call that is refused has not begun
                else:  # a tensor may get other memory
                    held[:] = [x.detach() if isinstance(x, torch.Tensor) else x for x in owners]
                raise
            held.clear()
            if self._trace.level >= CALLS:
                took = (time.monotonic() - start) * 1e6
                way = ", along with the comparison" if along else ""
                self._trace.say(CALLS, f"{call.asked}, {took:.0f} us{way}")

    def _goes_along(self, call: ClusterCall) -> bool:
        """Whether the message goes along with the comparison."""
        return call.along is not None and (self._compares or call.along.quick)

    # ---- how a call is made --------------------------------------------------------------------
    def make_call(self, call: ClusterCall, mine: Exception | None = None) -> Any:
        """Make a call as all ranks do; or tell them of `mine`, for which this rank does not, and
        raise it."""
        outer = sys.exception()  # which the caller is handling
        try:
            if not (self._compares or self._goes_along(call)):
                if mine:
                    raise RuntimeError(str(mine)) from mine  # no other rank knows of it
                return call.body()
            came = self._compared(call, mine)
            if came is not None:
                return call.along.end(came) if call.along else call.body()
            refused = f"rank {self.rank}: {mine}" if mine else ""
            outcome = self._asked_around(self._machines_notice(Notice(call.asked, refused=refused)))
            self._one_way = 0  # ranks that refused this call have not counted it
        except Exception as error:
            self._let_go(error, outer)
            if self._closed:  # by another thread
                raise CollectiveError("this communicator is closed") from None
            raise self._end(self._told(call.asked, error, mine is not None)) from error
        except BaseException as error:  # an interrupt: no rank must wait for this one
            self._let_go(error, outer)
            self.abort(INTERRUPTED, f"{call.asked} was interrupted")
            raise
        if outcome.failed:
            raise self._end(outcome) from mine
        raise mine or CollectiveError(outcome.refused)

    def _compared(self, call: ClusterCall, mine: Exception | None) -> Sequence[Bytes] | None:
        """What has come along; None if a machine that this one hears from, or a rank of this one,
        asks for something else."""
        machine, along, index = self.machine.calls, call.along, self.links.index
        if mine:
            machine.refuse(mine)
            return None
        if not call.one_way:
            self._one_way = 0
        elif self._one_way < MOST_OPEN:
            self._one_way += 1
        else:
            call, self._one_way = replace(call, source=None, target=None), 0
        hears, alone = call.target in (None, index), self.machine.size == 1
        given = along.given if along and call.source in (None, index) else NOTHING
        rows, merged = given[np.newaxis], None
        try:
            if not alone and along and along.of_first:
                machine.meet("gather", NOTHING, call.word)
            elif not alone:
                rows = np.empty((self.machine.size * bool(self._roll_call), given.size), np.uint8)
                machine.meet("gather", given, call.word, rows if len(rows) else None)
            if self._roll_call is not None:
                with machine.control.alive(self._roll_call.remind):
                    merged = self._compared_by_machines(self._roll_call, call, rows)
                if merged is None and not hears:  # nobody else here waits to hear of it
                    raise RuntimeError(self._roll_call.trouble)
            if not hears:
                return ()
            return merged if alone else self._on_all(merged, along)
        except CollectiveError:
            if machine.health.broken:
                raise
            return None

    def _on_all(
        self, merged: Sequence[Bytes] | None, along: Along | None
    ) -> Sequence[Bytes] | None:
        """What each rank of this machine gets of what is `merged` on the first one."""
        machine, told = self.machine.calls, np.zeros((along.nbytes if along else 0) + 1, np.uint8)
        for_first = along is not None and along.for_first
        if merged is not None:
            np.concatenate([*(() if for_first else merged), _AGREED], out=told)
        machine.meet("broadcast", told)
        if not told[-1]:
            return None
        if for_first and merged is not None:
            return merged
        return along.split(told[:-1]) if along else ()

    def _compared_by_machines(
        self, roll: RollCall, call: ClusterCall, rows: NDArray[np.uint8]
    ) -> Sequence[Bytes] | None:
        """What the ranks of this machine get, unless another machine makes another call: then
        None."""
        along = call.along
        parts = along.parts(rows) if along and call.source in (None, self.links.index) else ()
        came = roll.compare(call, parts, along.lengths if along else ())
        if along is None or came is None or call.target not in (None, self.links.index):
            return None if came is None else ()
        merged = along.merged(came, self.size)
        if not along.shares:
            return merged
        last = replace(call, target=along.to)
        shares = roll.compare(last, [*merged] * len(along.shares), along.shares)
        return None if shares is None else (np.concatenate(shares),)

    def _machines_notice(self, mine: Notice) -> Notice:
        """What this machine tells the others: of its ranks' failures the first, or else why they
        make no call."""
        every = self.machine.calls.gather("calls", mine.pack())
        rows = [Notice.unpack(row) for row in every]
        failed = next((row.failed for row in rows if row.failed), mine.failed)
        late = mine.late or any(row.late for row in rows if row.failed)
        refused = next((row.refused for row in rows if row.refused), "")
        if not (refused or failed) and len({row.asked for row in rows}) > 1:
            each = zip(self.machines.ranks[self.links.index], rows, strict=True)
            words = "; ".join(f"rank {rank}: {row.asked}" for rank, row in each)
            refused = f"the ranks' calls differ: {words}"
        seen = mine.witnessed or any(row.witnessed for row in rows)
        return replace(mine, refused=refused, failed=failed, witnessed=seen, late=late)

    def _told(self, asked: str, error: Exception, own: bool) -> Notice:
        """Tell all ranks that this one has failed, by its `own` fault or because of others. Returns
        what is then known of the cause."""
        machine = self.machine.calls
        late = isinstance(error, CollectiveTimeout) or timed_out(error)
        mine = Notice(asked, failed=str(error) or repr(error), witnessed=own, late=late)
        self.links.disconnect()  # so that nobody on other machines waits for this rank
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
        ranks = self.machines.ranks[self.links.index]

        def all_of(found: re.Match[str]) -> str:
            numbers = re.sub(r"\d+", lambda number: str(ranks[int(number[0])]), found[2])
            return f"{found[1]}{numbers}"

        try:
            return re.sub(r"\b(ranks? \[?)(\d+(?:, \d+)*)", all_of, words)
        except IndexError:  # another communicator's numbers
            return words

    def _end(self, notice: Notice) -> CollectiveError:
        """End the communicator. Returns the error to raise."""
        self.ended = notice.failed
        self.links.disconnect()
        kind = CollectiveTimeout if notice.late else CollectiveAborted
        return kind(f"rank {self.rank}, {notice.asked}: {notice.failed}", rank=self.rank)

    def check(self) -> None:
        if self.ended:
            raise CollectiveError(f"this communicator failed before ({self.ended}); make a new one")
        self.machine.calls.health.check()

    def finish(self) -> None:
        """Wait until other machines have received what this one sent, or a few seconds while an
        exception is handled. Raises CollectiveTimeout or CollectiveAborted."""
        control, fails = self.machine.calls.control, sys.exception() is not None
        if not self._roll_call or self.ended or control.health.broken or control.aborted():
            return
        try:
            with control.alive():
                self._roll_call.finish(fails)
        except OSError as error:
            kind = CollectiveTimeout if isinstance(error, TimeoutError) else CollectiveAborted
            if not fails:
                raise kind(f"rank {self.rank}: {error}", rank=self.rank) from error

    def abort(self, why: int, ended: str = "it was aborted") -> None:
        """Make this machine's calls raise CollectiveAborted, and let the other machines know. `why`
        is one of the reasons in `diagnose`; `ended` is what later calls are told."""
        first, self.ended = not self.ended, self.ended or ended
        try:
            if first and self._roll_call:
                self._roll_call.leave(f"rank {self.rank} {REASONS[why]}")
        finally:
            self.machine.abort(why)
            self.links.disconnect()

    def close(self) -> None:
        self._closed = True
        self.links.close()
        if self._roll_call:
            self._roll_call.close()


def sparse_allreduce(calls: ClusterCalls, *args: Any) -> Any:
    """As `Communicator.sparse_allreduce`."""
    with calls.sharing_errors():
        call = SparseCluster(calls.links, *args)
    return calls.make_call(ClusterCall(call.asked, call.carry_out))
