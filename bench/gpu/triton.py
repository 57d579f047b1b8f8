"""Rows of `bench.gpu_suite` for the kernels of a training step: Triton's, and gTop-k's selection.

Results are checked against the CPU's kernels, bit for bit, then timed beside torch and beside a
copy of the bytes that any implementation must move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from linkweave import kernels
from linkweave.bench.gpu.meter import Meter
from linkweave.bench.gpu.runner import Failed, LeftOut, Result, Row
from linkweave.kernels.gpu.triton_host import check_triton

ELEMENTS = 1 << 26
DENSITY = 0.001
WIDTH = 1024  # columns of an embedding
TENSORS = 50  # of a layer's table


class TritonRows:
    """Without a meter, results are checked and nothing is timed."""

    def __init__(
        self, meter: Meter | None, device: str = "cuda", elements: int = ELEMENTS
    ) -> None:  # fmt: skip
        self.meter, self.device, self.elements = meter, device, elements
        self.table = elements // 512  # rows of an embedding
        self.looked_up = self.table // 4  # rows of a batch

    def correct(self) -> Result:
        for measure in (self.cast, self.adam, self.sgd, self.select, self.lookup, self.adam_rows):
            self.loaded(measure)
        return {}

    def rows(self) -> Iterator[Row]:
        for name, measure in (("cast", self.cast), ("adam", self.adam), ("sgd", self.sgd),
                              ("select", self.select), ("lookup", self.lookup),
                              ("adam_rows", self.adam_rows)):  # fmt: skip
            yield Row(f"Triton, {name}", "core", 12, partial(self.loaded, measure))

    def loaded(self, measure: Callable[[], Result]) -> Result:
        try:
            import torch
            import triton  # noqa: F401
        except ImportError as error:
            raise LeftOut(str(error)) from None
        if self.device.startswith("cuda"):
            if torch.version.cuda is None:
                raise LeftOut("this torch has no CUDA")
            check_triton()
        torch.manual_seed(5)
        return measure()

    def cast(self) -> Result:
        """float32 to bfloat16, with a factor of 1/3; torch's multiplication and cast make two
        passes."""
        import torch

        x = torch.randn(self.elements)
        ours, out = x.to(self.device, copy=True), torch.empty(self.elements, dtype=torch.bfloat16)
        there = torch.empty_like(out, device=self.device)
        kernels.cast(x, out, 1 / 3)
        kernels.cast(ours, there, 1 / 3)
        self.same([there], [out], "cast")
        return self.timed(6 * self.elements, lambda: kernels.cast(ours, there, 1 / 3),
                          lambda: there.copy_(ours * (1 / 3)))  # fmt: skip

    def adam(self) -> Result:
        return self._update("adam", 3, 28, {"lr": 1e-3, "step": 3})

    def sgd(self) -> Result:
        return self._update("sgd", 2, 20, {"lr": 1e-3, "momentum": 0.9})

    def _update(self, name: str, others: int, nbytes: int, how: dict[str, Any]) -> Result:
        """An update of many tensors beside torch's fused one. `others`: gradients and states;
        `nbytes`: of an element, read and written."""
        import torch

        from linkweave.kernels import optim  # needs torch

        step = getattr(optim, name)
        sizes = [self.elements // TENSORS // 4 * 4] * TENSORS
        columns = [[torch.randn(n).abs_() for n in sizes] for _ in range(1 + others)]
        placed = [[x.to(self.device, copy=True) for x in column] for column in columns]
        table = optim.Table(*placed)
        step(optim.Table(*columns), **how)
        step(table, **how)
        for ours, wanted in zip(placed, columns, strict=True):
            self.same(ours, wanted, name)
        params = [x.clone().requires_grad_() for x in placed[0]]
        for param, grad in zip(params, placed[1], strict=True):
            param.grad = grad
        fused = {"fused": self.device.startswith("cuda")}
        theirs = (torch.optim.Adam(params, lr=1e-3, **fused) if name == "adam"
                  else torch.optim.SGD(params, lr=1e-3, momentum=0.9, **fused))  # fmt: skip
        return self.timed(nbytes * sum(sizes), lambda: step(table, **how), theirs.step)

    def select(self) -> Result:
        """Selection of the k largest of a residual, which the gradient is added to: beside torch's
        addition, selection and clearing."""
        import torch

        from linkweave.kernels import gtopk

        n, k = self.elements, round(self.elements * DENSITY)
        grad, residual = torch.randn(n), torch.randn(n)
        ours = [x.to(self.device, copy=True) for x in (grad, residual)]
        wanted = gtopk.select(grad, residual, k)
        found = gtopk.select(*ours, k)
        self.same([*found, *ours], [*wanted, grad, residual], "select")
        noise = torch.randn(n, device=self.device)

        def select() -> None:
            ours[0].copy_(noise)
            gtopk.select(*ours, k)

        def theirs() -> None:
            ours[0].copy_(noise)
            ours[1].add_(ours[0])
            where = torch.topk(ours[1].abs(), k, sorted=False).indices
            torch.sort(where)
            ours[1][where] = 0
            ours[0].zero_()

        return self.timed((8 + 16 + 8) * n, select, theirs) | {"k": k}

    def lookup(self) -> Result:
        import torch

        from linkweave.kernels import embedding

        table = torch.randn(self.table, WIDTH)
        indices = torch.randint(self.table, (self.looked_up,), dtype=torch.int32)
        out = torch.empty(self.looked_up, WIDTH)
        ours, where, there = (x.to(self.device, copy=True) for x in (table, indices, out))
        embedding.lookup(table, indices, out)
        embedding.lookup(ours, where, there)
        self.same([there], [out], "lookup")
        return self.timed(8 * out.numel(), lambda: embedding.lookup(ours, where, there),
                          lambda: torch.index_select(ours, 0, where, out=there))  # fmt: skip

    def adam_rows(self) -> Result:
        """A step of Adam for some rows beside `torch.optim.SparseAdam`."""
        import torch

        from linkweave.kernels import embedding

        tables = [torch.randn(self.table, WIDTH).abs_() for _ in range(3)]
        indices = torch.randperm(self.table)[: self.looked_up].sort().values
        gradient = torch.randn(self.looked_up, WIDTH)
        ours = [x.to(self.device, copy=True) for x in (*tables, indices, gradient)]
        embedding.adam_rows(*tables, indices, gradient, step=3, lr=1e-3)
        embedding.adam_rows(*ours, step=3, lr=1e-3)
        self.same(ours[:3], tables, "adam_rows")
        param = ours[0].clone().requires_grad_()
        param.grad = torch.sparse_coo_tensor(ours[3][None], ours[4], param.shape,
                                             is_coalesced=True, check_invariants=False)  # fmt: skip
        theirs = torch.optim.SparseAdam([param], lr=1e-3)
        return self.timed(
            28 * gradient.numel(), lambda: embedding.adam_rows(*ours, step=3, lr=1e-3), theirs.step
        )

    def timed(self, nbytes: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> Result:
        """Seconds of both; a floor of `nbytes` at the rate of a copy."""
        if self.meter is None:
            return {}
        finish = self.meter.device.finish
        seconds, others = self.meter.seconds(ours, finish), self.meter.seconds(theirs, finish)
        floor = nbytes / self.meter.copy_rate(nbytes // 2)
        return {"bytes": nbytes, "seconds": seconds, "of_floor": seconds / floor,
                "torch": {"seconds": others, "times_ours": others / seconds}}  # fmt: skip

    def same(self, got: Any, want: Any, what: str) -> None:
        import torch

        for mine, theirs in zip(got, want, strict=True):
            if not torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8)):
                raise Failed(f"{what} is not what the CPU finds")
