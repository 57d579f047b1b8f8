"""gTop-k as a communication hook of DistributedDataParallel."""

# DDP compares the annotations of a hook with its own classes, so they must not be strings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.admission import compare_exchanges
from linkweave.collectives.training.gtopk.exchange import SparseAverage
from linkweave.collectives.training.gtopk.options import GTopK, check_state
from linkweave.collectives.training.transport import transport_of
from linkweave.collectives.training.update import loss_scale_of
from linkweave.kernels import gtopk

Future = torch.futures.Future[torch.Tensor]


class GTopKState:
    """What `gtopk_hook` keeps between steps: the gradients of this rank that are not sent yet.

    group: as in `DataParallel`. All ranks must make the state.
    density, warmup, epoch_steps: as in `GTopK`. Learning rates are the optimizer's own.
    mode, conserve, select: as in `GTopK`; "auto" counts the bytes on the critical path, as no
        network is measured.
    scaler: the GradScaler of the training, without which residuals would have the scale of their
        time.

    Residuals belong to parameters, so DDP may divide them into other buckets, as it does after the
    first step. After an error of any bucket, those that follow raise it as well. Raises
    CollectiveError as `GTopK` and `DataParallel` do, and if ranks differ in these arguments.
    """

    def __init__(
        self, group: Any = None, *, density: float = 0.001, warmup: tuple[float, ...] = (),
        epoch_steps: int = 100, mode: str = "auto", conserve: bool = False,
        select: Any = None, scaler: torch.amp.GradScaler | None = None,
    ) -> None:  # fmt: skip
        self._scale = loss_scale_of(scaler)
        self.spec = GTopK(density, warmup, epoch_steps, mode=mode, conserve=conserve, select=select)
        self.steps = 0
        """Steps so far."""
        self._group, self._transport = group, transport_of(group)
        if self._transport:
            options = self._scale and self._scale.options
            compare_exchanges(self._transport, self.spec, scaler=options)
            self._run_on("cpu")
        self._threads = ThreadPoolExecutor(1, "linkweave-gtopk")  # a lane beside backward
        self._stream: Any = None  # the lane on a GPU
        self._error: CollectiveError | None = None
        self._residuals: dict[tuple[int, ...], torch.Tensor] = {}  # by a bucket's parameters
        self._parts: dict[int, tuple[Any, torch.Tensor]] = {}  # of each parameter

    def _run_on(self, device: str) -> None:
        """Make the lane for gradients on a kind of device, which the first bucket tells."""
        if device != "cpu" and self._transport:
            self._transport.close()
            self._transport = transport_of(self._group, device)
        if self._transport:
            self._transport.open(1)
            self._average = SparseAverage(self._transport, self.spec, self._scale)

    def start(self, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
        """Begin to average a bucket. Returns a future of its tensor."""
        x = bucket.buffer()
        if self._transport is None:
            return _done(x)
        if x.dtype not in gtopk.GRADIENTS:
            raise CollectiveError(
                f"gtopk_hook takes float32, float16 and bfloat16 gradients, not {x.dtype}"
            )
        arguments = bucket.index(), x, self._residual_of(bucket), self.steps
        self.steps += bucket.is_last()
        if x.is_cuda:
            return self._enqueue(*arguments)
        done: Any = torch.futures.Future()
        self._threads.submit(self._run, done, *arguments)
        return cast(Future, done.then(_tensor))

    def _enqueue(self, index: int, x: torch.Tensor, residual: torch.Tensor, step: int) -> Future:
        """On a GPU, the lane is a stream beside that of the backward pass; the host waits for
        nothing."""
        if self._stream is None:
            self._stream = cast(Any, torch.cuda.Stream)(x.device, priority=-1)
            self._run_on("cuda")
        self._stream.wait_event(torch.cuda.current_stream(x.device).record_event())
        with torch.cuda.stream(self._stream):
            self._carry_out(index, x, residual, step)
            if self._error:
                raise self._error
            return _done(x)

    def _run(self, done: Any, *arguments: Any) -> None:
        """What the thread does for a bucket. The future's value is its tensor, or an error: DDP
        would take an error of the future for a tensor."""
        self._carry_out(*arguments)
        done.set_result(self._error or arguments[1])

    def _carry_out(self, index: int, x: torch.Tensor, residual: torch.Tensor, step: int) -> None:
        try:
            if self._error is None:
                sent = self._average(0, x, residual, [x.numel()], step)
                gtopk.drop_nonfinite(sent.fine, residual)
        except BaseException as error:  # the other ranks must not take later buckets for this one
            assert self._transport is not None
            kind = type(error) if isinstance(error, CollectiveError) else CollectiveAborted
            self._error = kind(f"rank {self._transport.rank}, gtopk_hook, bucket {index}: {error}")
            self._transport.abort()

    def _residual_of(self, bucket: dist.GradBucket) -> torch.Tensor:  # type: ignore[name-defined]
        """What is kept of a bucket's gradients, from wherever its parameters were before."""
        parameters, x = bucket.parameters(), bucket.buffer()
        key = tuple(map(id, parameters))
        if key not in self._residuals:
            residual = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                first = gradient.storage_offset() - x.storage_offset()
                part = residual[first : first + gradient.numel()]
                if known := self._parts.get(id(parameter)):
                    part.copy_(known[1])
                self._parts[id(parameter)] = parameter, part
            in_use = {_memory(part) for _, part in self._parts.values()}
            self._residuals = {k: x for k, x in self._residuals.items() if _memory(x) in in_use}
            self._residuals[key] = residual
        return self._residuals[key]

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """What this rank must keep to go on, by the names of the module's parameters."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        if missing := [tuple(p.shape) for key, (p, _) in self._parts.items() if key not in names]:
            raise CollectiveError(
                f"the module lacks a parameter of shape {missing[0]}: pass the one that DDP trains"
            )
        found: dict[str, Any] = {"steps": self.steps, "residual": {}}
        found["rank"], found["size"] = self._ranks()
        for key, (_, part) in self._parts.items():
            found["residual"][names[key]] = part.clone()
        return found

    def _ranks(self) -> tuple[int, int]:
        return (self._transport.rank, self._transport.size) if self._transport else (0, 1)

    def close(self) -> None:
        """Free the thread and the lane, once nothing uses the hook. All ranks must call it."""
        self._threads.shutdown()
        if self._transport:
            self._transport.close()

    def load_state_dict(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`. Raises CollectiveError if it is not of this rank or
        of the module, which is the one that DDP trains."""
        parameters = dict(module.named_parameters())
        sizes = {name: (parameter.numel(),) for name, parameter in parameters.items()}
        check_state(state, *self._ranks(), sizes)
        self.steps, self._residuals = int(state["steps"]), {}
        self._parts = {
            id(parameters[name]): (parameters[name], residual.clone())
            for name, residual in state["residual"].items()
        }


def _done(x: torch.Tensor) -> Future:
    """A future of a tensor, which on a GPU becomes what it is to be in the current stream."""
    made: Any = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
    made.set_result(x)
    return cast(Future, made)


def _memory(residual: torch.Tensor) -> int:
    """The address of the memory of which it is a part."""
    return residual.untyped_storage().data_ptr()


def _tensor(done: Any) -> torch.Tensor:
    found = done.value()
    if isinstance(found, CollectiveError):
        raise found
    result: torch.Tensor = found
    return result


def gtopk_hook(state: GTopKState, bucket: dist.GradBucket) -> Future:  # type: ignore[name-defined]
    """Average the largest gradients of a bucket; `state` keeps the others for later steps.

    `ddp.register_comm_hook(GTopKState(density=0.001), gtopk_hook)`. Buckets are exchanged one after
    another beside the backward pass. A gradient that is not finite on some rank is so on all.
    Source: Shi et al., algorithm 4.
    """
    return state.start(bucket)
