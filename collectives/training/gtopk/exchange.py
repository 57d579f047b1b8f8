"""gTop-k in training: the residuals of a model, and the sparse all-reduces of a program's ops."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Network
from linkweave.collectives.overlap.network import sparse_seconds
from linkweave.collectives.planning.sparse_tree import rounds
from linkweave.collectives.training.exchange import Arrived, Packing
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.gtopk.options import GTopK
from linkweave.collectives.training.program import Op
from linkweave.collectives.training.transport import Transport
from linkweave.collectives.training.update import LossScale
from linkweave.kernels import gtopk

log = logging.getLogger("linkweave")


class SparseExchange:
    """The gradients of a rank that are not sent yet, and what ops send of them.

    An `Exchange` for programs whose ops have whole units. Residuals lie as gradients do in the
    buffers. An op takes the gradients of its units out of them and leaves the averages there.

    A gradient that is not finite is sent before all others, so all ranks learn that the step is to
    be skipped. The finite sums then go to the residual of rank 0; of a dense average, elements that
    are not finite are dropped. On a GPU the host waits once a step, in `settle`, to learn that.

    Gradients that have a `scale` are averaged, and kept, without it.
    """

    whole = True
    dtype: torch.dtype | None = None

    def __init__(
        self, spec: GTopK, gradients: GradientBuffers, transport: Transport,
        scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        for unit in gradients.units:
            if unit.device.type not in ("cpu", "cuda") or unit.dtype == torch.float64:
                raise CollectiveError(
                    "GTopK takes float32, float16 and bfloat16 parameters on CPUs and GPUs; those "
                    f"of {unit.name} are {unit.dtype} on {unit.device}"
                )
        for x in gradients.buffers:
            if x.numel() >= gtopk.PAD:
                raise CollectiveError(
                    f"GTopK takes fewer than {gtopk.PAD} elements of one dtype, not {x.numel()} of "
                    f"{x.dtype}"
                )
        self.spec, self._gradients, self._transport = spec, gradients, transport
        self.average_of = SparseAverage(transport, spec, scale)
        self._residuals = [
            torch.zeros(x.numel(), dtype=torch.float32, device=x.device) for x in gradients.buffers
        ]
        self.steps = 0
        """Steps made, without those that were skipped."""
        self.bad: tuple[str, ...] = ()
        """The parameters because of which the last step is to be skipped."""
        self._sent: dict[Op, Sent] = {}
        self._rehearsed: dict[tuple[int, int], torch.Tensor] = {}

    # ---- a step ------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a step."""
        if self.average_of.scale:
            try:
                self.average_of.scale.check()
            except CollectiveError:  # of this rank alone, maybe
                self._transport.abort()
                raise
        self._sent, self.bad = {}, ()

    def part(self, op: Op) -> Op:
        return op

    def carry_out(self, op: Op, packing: Packing, arrived: Arrived) -> None:
        """Carry out an op; on CPUs it blocks. A lane has one at a time."""
        x, residual = self._memory(op)
        counts = op.sizes(x.element_size()) if self.spec.per == "unit" else [x.numel()]
        self._sent[op] = self.average_of(op.lane, x, residual, counts, self.steps)
        arrived(op.spans)

    def settle(self) -> None:
        """After all ops of a step: tell which parameters have gradients. If the step is to be
        skipped, give back what was sent."""
        used = self._gradients.used()
        self._transport.total(used)
        fine = torch.stack([sent.fine for sent in self._sent.values()]).to(used)
        told = torch.cat([used, fine]).tolist()
        self._gradients.tell(told[: len(used)])
        if all(told[len(used) :]):
            self.steps += 1
            return
        here, every = torch.zeros_like(used), torch.zeros_like(used)
        for op, sent in self._sent.items():
            x, residual = self._memory(op)
            here[self._numbers(op, sent.bad_here(residual))] = 1
            every[self._numbers(op, sent.bad())] = 1
            residual.nan_to_num_(0, 0, 0)
            if self._transport.rank == 0:
                sent.give_back(residual, self._transport.size)
            x.zero_()
        every += here
        self._transport.total(every)
        self.bad = self._names(every)
        # with a scaler, skipped steps are how it finds its scale
        level = logging.INFO if self.average_of.scale else logging.WARNING
        if mine := ", ".join(self._names(here)):
            log.log(level, "rank %d: the gradient is not finite: %s", self._transport.rank, mine)
        log.log(level, "a step is skipped: gradients are not finite: %s", ", ".join(self.bad))
        for number, unit in enumerate(self._gradients.units):
            for name, (_, view) in zip(unit.names, self._gradients.of(number), strict=True):
                if name in self.bad and view is not None:
                    view.fill_(float("nan"))  # which clip_grad_norm_ looks at

    # ---- the state of a rank ---------------------------------------------------------------------
    def state_dict(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """What this rank must keep to go on to the bit; for parameters that are not trained now,
        what was kept `before`."""
        known = before["residual"] if before else {}
        mine = {name: view.clone() for name, view in self._named()}
        return {
            "rank": self._transport.rank, "size": self._transport.size, "steps": self.steps,
            "residual": {**known, **mine},
        }  # fmt: skip

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a `state_dict`, or from nothing; what it lacks begins at zero."""
        state = state or {"residual": {}, "steps": 0}
        for name, view in self._named():
            known = state["residual"].get(name)
            view.copy_(known if known is not None and known.shape == view.shape else view * 0)
        self.steps = int(state["steps"])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The residual of each parameter, by name."""
        every = self._gradients.views_of(self._residuals)
        for unit, views in zip(self._gradients.units, every, strict=True):
            yield from zip(unit.names, views, strict=True)

    def network_of(self, measure: Callable[[torch.Tensor, Any], Any]) -> Any:
        """The network of sparse exchanges; "auto" chooses its modes by that of dense ones."""
        largest = max(self._gradients.buffers, key=lambda buffer: buffer.nbytes)
        if self.spec.mode == "auto":
            self.average_of.network = measure(largest, self._transport.average)
        found = measure(largest, self._rehearse)
        self._rehearsed = {}
        return found

    def _rehearse(self, lane: int, x: torch.Tensor) -> None:
        """Do with other gradients what an op of as many elements does, to measure its time."""
        key = lane, x.numel()
        if key not in self._rehearsed:
            generator = torch.Generator().manual_seed(lane)
            self._rehearsed[key] = torch.randn(x.numel(), generator=generator).to(x.device)
        settled = len(self.spec.warmup) * self.spec.epoch_steps  # its density is the last one
        self.average_of(lane, x, self._rehearsed[key], [x.numel()], settled)

    @property
    def skips(self) -> bool:
        return bool(self.bad)

    def _memory(self, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        """The op's gradients, and their residuals."""
        (first, stop), *others = op.runs
        assert not others
        x = self._gradients.raw(op.buffer, first, stop)
        at = first // x.element_size()
        return x, self._residuals[op.buffer][at : at + x.numel()]

    def _numbers(self, op: Op, where: torch.Tensor) -> list[int]:
        """The parameters, by number, that have these elements of the op."""
        item, units = self._gradients.buffers[op.buffer].element_size(), self._gradients.units
        starts = []  # elements of the op, and the parameters that begin there
        for unit in op.needs:
            first = (self._gradients.slots[unit].first - op.runs[0][0]) // item
            before = sum(len(one.names) for one in units[:unit])
            offsets = islice(units[unit].offsets(), len(units[unit].names))
            starts += [(first + at, before + i) for i, at in enumerate(offsets)]
        starts.sort()
        elements = [at for at, _ in starts]
        return sorted({starts[bisect_right(elements, at) - 1][1] for at in where.tolist()})

    def _names(self, numbers: torch.Tensor) -> tuple[str, ...]:
        every = [name for unit in self._gradients.units for name in unit.names]
        return tuple(name for name, has in zip(every, numbers.tolist(), strict=True) if has)


@dataclass(frozen=True)
class Sent:
    """What an op has sent. The tensors are on the device of the gradients.

    found: the sums of all ranks; None if all gradients have been averaged, which are in `x`.
    own: the entries of this rank, unless it sends all.
    fine: whether all sums are finite, a scalar.
    scale: what x has been multiplied by.
    """

    x: torch.Tensor
    found: torch.Tensor | None
    own: torch.Tensor | None
    fine: torch.Tensor
    scale: torch.Tensor | float = 1.0

    def bad(self) -> torch.Tensor:
        """The elements whose sums are not finite. The host waits."""
        return _bad(self.x, self.found)

    def bad_here(self, residual: torch.Tensor) -> torch.Tensor:
        """The elements at which this rank had no finite gradient. The host waits."""
        left = _bad(residual, None)
        return left if self.own is None else torch.cat([left, _bad(residual, self.own)])

    def give_back(self, residual: torch.Tensor, ranks: int) -> None:
        """Add the finite sums to a residual."""
        if self.found is None:
            residual += torch.where(self.x.isfinite(), self.x.float() / self.scale * ranks, 0)
        else:
            gtopk.keep(self.found, self.found, residual, arrived=True)


def _bad(x: torch.Tensor, vector: torch.Tensor | None) -> torch.Tensor:
    if vector is None:
        return (~x.isfinite()).nonzero().flatten()
    return vector[1][~gtopk.values_of(vector).isfinite()]


class SparseAverage:
    """Averages flat tensors over the ranks of a transport, on any device.

    Mode "auto" chooses by the times of `network`, a dense all-reduce's; all ranks must have the
    same. A residual is float32, with as many elements as the gradients, and has no `scale`.
    The number of entries follows from the number of elements, so that on a GPU the host never waits
    for a length.
    """

    def __init__(self, transport: Transport, spec: GTopK, scale: LossScale | None = None) -> None:
        self._transport, self._spec, self.scale = transport, spec, scale
        self.network = Network(0.0, 1e-9, workers=transport.size)  # until it is known: bytes count

    def choose(self, nbytes: int, entries: int, numel: int) -> str:
        """The mode for `numel` gradients of `nbytes`, of which each rank sends so many entries."""
        if entries == numel:
            return "dense"
        if self._spec.mode != "auto":
            return self._spec.mode
        seconds = sparse_seconds(self.network, nbytes, entries)
        return min(seconds, key=lambda name: seconds[name])

    def __call__(
        self, lane: int, x: torch.Tensor, residual: torch.Tensor, counts: Sequence[int], step: int
    ) -> Sent:
        """Replace the gradients in x by the averages of what is sent, and zeros.

        `x` is float32, float16 or bfloat16. Of each of its parts, of so many elements, as many
        entries are sent as the density of this step says. Sums are in float32, along a tree of
        ranks or in their order; an average is a sum divided once, and rounded to the dtype of x.
        What is not finite counts as largest, so that it reaches all ranks; unless the result is
        `fine`, the residual may keep some of it.
        """
        if self.scale is None:
            return self._average(lane, x, residual, counts, step)
        if x.dtype == torch.float16:
            raise CollectiveError(
                "GTopK takes float32 and bfloat16 gradients with a GradScaler: float16 cannot hold "
                "them without the scale"
            )
        scale = self.scale.on(x.device)
        x.div_(scale)
        sent = self._average(lane, x, residual, counts, step)
        x.mul_(scale)
        return replace(sent, scale=scale)

    def _average(
        self, lane: int, x: torch.Tensor, residual: torch.Tensor, counts: Sequence[int], step: int
    ) -> Sent:
        density = self._spec.density_at(step)
        shares = [max(1, round(density * n)) for n in counts]
        mode = self.choose(x.nbytes, sum(shares), x.numel())
        if mode == "dense":
            return self._dense(lane, x, residual)
        own = self._selected(x, residual, counts, shares, step)
        cuts: list[torch.Tensor] = []
        found = self._merged(lane, own, cuts) if mode == "gtopk" else self._gathered(lane, own)
        gtopk.keep(own, found, residual)
        for cut in cuts if self._spec.conserve else ():
            gtopk.keep(cut, found, residual, arrived=True)
        gtopk.scatter(found, x, self._transport.size)
        return Sent(x, found, own, gtopk.values_of(found).isfinite().all())

    def _merged(self, lane: int, own: torch.Tensor, cuts: list[torch.Tensor]) -> torch.Tensor:
        """As many entries of the sum as a rank has. Ranks merge their vectors along a tree, and
        append what each merge cuts to `cuts`; its root sends the result to all.

        Source: Shi et al., algorithm 3, for any number of ranks.
        """
        tree, vector = self._transport.tree(own), own
        for pairs in rounds(tree):
            if (got := self._transport.pairwise(lane, vector, pairs)) is not None:
                vector, cut = gtopk.merge(vector, got, own.shape[1])
                cuts.append(cut)
        if self._transport.rank != tree.root:
            vector = torch.empty_like(own)
        self._transport.broadcast(vector, tree.root, lane)
        return vector

    def _gathered(self, lane: int, own: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' entries, added in the order of the ranks."""
        every = self._transport.allgather(lane, own)
        total = every[0]
        for other in every[1:]:
            total, _ = gtopk.merge(total, other, total.shape[1] + other.shape[1])
        return total

    def _dense(self, lane: int, x: torch.Tensor, residual: torch.Tensor) -> Sent:
        """Send all."""
        gtopk.select(x, residual, 0)
        x.copy_(gtopk.narrowed(residual, x.dtype, self._transport.size))  # whose sum is finite
        residual.sub_(x)  # what x rounds away, and NaN where it is not finite
        self._transport.average(lane, x)
        least, most = x.aminmax()
        return Sent(x, None, None, least.isfinite() & most.isfinite())

    def _selected(
        self, x: torch.Tensor, residual: torch.Tensor, counts: Sequence[int],
        shares: Sequence[int], step: int,
    ) -> torch.Tensor:  # fmt: skip
        """Add x to the residual, and take entries of each part out of that: a vector."""
        found, first = [], 0
        for count, k in zip(counts, shares, strict=True):
            own = x[first : first + count], residual[first : first + count], k
            if select := self._spec.select:
                values, at = _picked(*own, step, select)
                found.append((values, at.where(at == gtopk.PAD, at + first)))
            else:
                values, at = gtopk.select(*own)
                found.append((values, at + first))
            first += count
        values, at = (
            torch.cat(each) if len(each) > 1 else each[0] for each in zip(*found, strict=True)
        )
        if self._spec.select:  # a vector ends with what is no entry
            at, order = at.sort()
            values = values[order]
        vector: torch.Tensor = gtopk.vector_of(values, at.int())
        return vector


_INTEGERS = torch.int32, torch.int64


def _picked(
    x: torch.Tensor, residual: torch.Tensor, k: int, step: int, select: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gtopk.select`, of the entries that a user's function selects; those that it gives twice
    become `PAD`. On a GPU the host waits for nothing."""
    residual += x
    x.zero_()
    at = select(residual, k, step)
    fits = torch.is_tensor(at) and at.dtype in _INTEGERS and at.shape == (k,)
    if not fits or at.device != x.device:
        what = f"{at.dtype} {[*at.shape]} on {at.device}" if torch.is_tensor(at) else repr(at)
        raise CollectiveError(
            f"GTopK's select must return {k} positions, integers [{k}] on {x.device}, not {what}"
        )
    bad = ~residual.isfinite()
    first = torch.where(bad.any(), bad.int().argmax(), at[0])
    at = torch.cat([first[None], at[1:].long()]).sort()[0]
    if x.is_cuda:
        torch._assert_async((at[0] >= 0) & (at[-1] < x.numel()))
    elif at[0] < 0 or at[-1] >= x.numel():
        wrong = int(at[0] if at[0] < 0 else at[-1])
        raise CollectiveError(f"GTopK's select returned position {wrong} of {x.numel()} entries")
    twice = torch.cat([at.new_zeros(1, dtype=torch.bool), at[1:] == at[:-1]])
    values = residual[at].masked_fill(twice, -0.0)
    residual[at] = 0
    return values, at.masked_fill(twice, gtopk.PAD)
