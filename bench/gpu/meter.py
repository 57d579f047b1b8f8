"""Times work on one GPU, and tells with which settings a plan ran on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.collectives import plan_allreduce
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Prepared, virtual_ranks
from linkweave.collectives.runtime.gpu.launch_tables import SETTINGS, Setting
from linkweave.kernels.gpu import source
from linkweave.topology import Topology, load

MIB = 1 << 20
PERIOD = 16 * MIB  # bytes of random data, which longer messages repeat
GRAPH = 20  # calls captured in one graph


def noise(rank: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(nbytes // 4, np.float32)


@dataclass(frozen=True, slots=True)
class Filled:
    """Buffers and inputs of ranks on the GPU, by address; the inputs repeat `noise`.

    `largest` is the maximum of all inputs, element by element, up to `PERIOD`.
    """

    buffers: list[int]
    inputs: list[int]
    nbytes: int
    largest: np.ndarray


class Meter:
    """Times work on a GPU of this process, which is opened when it is first used.

    `repeats` is the number of batches of which a time is the median. After an error nothing is
    freed: the row's process ends, and a second error would hide the first one.
    """

    def __init__(self, repeats: int = 20, gpu: int = 0) -> None:
        self.repeats, self.gpu = repeats, gpu

    @cached_property
    def device(self) -> Any:
        return cuda.open_device(self.gpu)

    @contextmanager
    def uploaded(self, arrays: Sequence[np.ndarray]) -> Iterator[list[int]]:
        found = [self.device.upload(x) for x in arrays]
        yield found
        for address in found:
            self.device.free(address)

    @contextmanager
    def filled(self, ranks: int, nbytes: int) -> Iterator[Filled]:
        """Zeroed buffers and random inputs of `nbytes` for each rank."""
        try:
            found = [self.device.allocate(nbytes) for _ in range(2 * ranks)]
        except MemoryError:
            need = f"{2 * ranks} times {nbytes / MIB:g} MiB"
            raise LeftOut(f"it needs {need}, which this GPU has not free") from None
        largest = np.full(min(nbytes, PERIOD) // 4, -np.inf, np.float32)
        for rank, address in enumerate(found[ranks:]):
            given = noise(rank, min(nbytes, PERIOD))
            np.maximum(largest, given, out=largest)
            with self.uploaded([given]) as (piece,):
                for at in range(0, nbytes, PERIOD):
                    self.device.copy(address + at, piece, min(PERIOD, nbytes - at))
                self.device.synchronise(0)
        yield Filled(found[:ranks], found[ranks:], nbytes, largest)
        for address in found:
            self.device.free(address)

    @contextmanager
    def ranks(
        self, size: int, timeout: float = 30.0, settings: Sequence[Setting] = SETTINGS
    ) -> Iterator[GpuRanks]:
        """Virtual ranks; the timeout is below a row's limit, as its error says who waits."""
        made = virtual_ranks(self.device, size, timeout, settings=settings)
        yield made
        made.close()

    def replayed(self, call: Callable[[int], object], check: Callable[[], None]) -> float:
        """Median time of `call(stream)` in a replayed graph of many."""

        def calls(stream: int) -> None:
            for _ in range(GRAPH):
                call(stream)

        return self.seconds(self.device.capture(calls), check) / GRAPH

    def seconds(
        self, enqueue: Callable[[], object], check: Callable[[], None], repeats: int | None = None
    ) -> float:
        """Median time of a call, from batches that are long enough for the host's clock."""
        enqueue()
        check()
        start = time.perf_counter()
        enqueue()
        check()
        batch = max(1, min(50, int(0.02 / max(1e-9, time.perf_counter() - start))))
        found = []
        for _ in range(repeats or self.repeats):
            start = time.perf_counter()
            for _ in range(batch):
                enqueue()
            check()
            found.append((time.perf_counter() - start) / batch)
        return statistics.median(found)

    def copy_rate(self, nbytes: int) -> float:
        """Bytes/s read and written by a plain copy."""
        with self.filled(1, nbytes) as memory:
            copy = partial(self.device.copy, memory.buffers[0], memory.inputs[0], nbytes)
            return 2 * nbytes / self.seconds(copy, partial(self.device.synchronise, 0))

    def expect(self, address: int, want: np.ndarray, what: str, nbytes: int | None = None) -> None:
        """Raise Failed unless the GPU has these bytes there, repeated up to `nbytes`."""
        whole, wrong = want.nbytes if nbytes is None else nbytes, 0
        for at in range(0, whole, want.nbytes):
            part = want.view(np.uint8)[: whole - at]
            got = np.empty_like(part)
            self.device.download(address + at, got)
            wrong += int((got != part).sum())
        if wrong:
            raise Failed(f"{what}: {wrong} wrong bytes")


def machine_of(ranks: int) -> Topology:
    return load("dgx1-v100" if ranks == 8 else f"mesh-{ranks}")


def settings_of(ranks: GpuRanks, prepared: Prepared, nbytes: int) -> Result:
    """The settings of a plan on this GPU; a slot's bytes are those of all its thread blocks."""
    plan, config = prepared.plan, prepared.config
    device, _ = next(iter(ranks.shares.values()))
    return {
        "algorithm": plan.algorithm, "chunks": plan.num_chunks,
        "chunk_bytes": plan.chunk_bytes(nbytes), "slots": plan.slots,
        "slot_bytes": config.width * config.stripe,
        "protocol": "lines" if config.low_latency else "counters", "pushes": prepared.direct,
        "width": config.width, "blocks": config.width * len(plan.tracks),
        "resident": device.resident(prepared.dtype, prepared.op),
        "threads": source.PLAN_THREADS,
        "registers": device.registers(prepared.dtype, prepared.op),
    }  # fmt: skip


def call_settings(meter: Meter, ranks: int, nbytes: int) -> Result:
    """The settings of `allreduce` for a float32 max on virtual ranks, without an `algorithm`."""
    with meter.ranks(ranks) as made:
        plan = plan_allreduce(machine_of(ranks), nbytes)
        return settings_of(made, made.prepare(plan, nbytes, "float32", "max"), nbytes)
