"""The CUDA kernels run on the host: builds of `shim/driver.cpp`, and the files that it reads."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.gpu import launch_tables as tables
from linkweave.kernels.dtypes import DTYPES, REDUCTIONS, step_of
from linkweave.kernels.gpu.source import PLAN_THREADS

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"
GOLDEN = Path(__file__).parents[1] / "golden"
ELEMENTS = list(dict.fromkeys(dtype.element for dtype in DTYPES.values()))
FUNCTORS = ["sum", "min_", "max_", "prod", "and_", "or_", "xor_"]
COMPILER = os.environ.get("CXX") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++, or CXX)")
BROKEN = 99  # what a sanitizer exits with


def kernel_number(dtype: str, op: str) -> tuple[int, int]:
    """Where `shim/table.h` has the plan interpreter for that."""
    context = ELEMENTS.index(DTYPES[dtype].element)
    return context, FUNCTORS.index(REDUCTIONS[step_of(op, dtype)])


@cache
def compiled_registers() -> dict[str, int]:
    """Registers per thread of each kernel; `test_kernel_compile` compares them with NVRTC's."""
    found: dict[str, int] = json.loads((GOLDEN / "plan.cu.registers.json").read_text())
    return found


def sanitizing(sanitizer: str) -> list[str]:
    """The compiler's options; with a sanitizer that are those which are compiled soonest."""
    if not sanitizer:
        return ["-O1"]
    return ["-O0", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]


@cache
def build_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="linkweave-shim-")


@cache
def build(
    sanitizer: str = "", everything: bool = False, changes: tuple[tuple[str, str, str], ...] = (),
    what: str = "driver",
) -> Path:  # fmt: skip
    """The driver or the library, with `changes`: (file, what stands there once, what replaces it).

    All dtypes and ops with `everything`, else float32 sums.
    """
    folder = Path(tempfile.mkdtemp(dir=build_folder().name))
    sources = folder / "kernels"
    shutil.copytree(ROOT / "kernels", sources, ignore=shutil.ignore_patterns("*.py*", "__*"))
    for name, old, new in changes:
        text = (sources / name).read_text()
        assert text.count(old) == 1, f"{name} holds {text.count(old)} times: {old}"
        (sources / name).write_text(text.replace(old, new))
    options = sanitizing(sanitizer)
    options += ["-DALL"] if everything else []
    options += ["-shared", "-fPIC"] if what == "library" else []
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++17", "-pthread", "-Wall", "-Wno-unknown-pragmas", "-Werror",
         "-include", str(SHIM / "cuda_shim.h"), f"-I{sources}", "-DELEMENT=float",
         "-DOP=sum", *options, str(SHIM / f"{what}.cpp"), "-o", str(folder / what)],
        check=True, timeout=300,
    )  # fmt: skip
    return folder / what


CURRENT = threading.local()  # `index` of this thread's GPU


class HostDevice:
    """A `Device` whose blocks are threads and whose memory other processes can open.

    A stream is a thread that does one thing after another, as a GPU's streams do; with `one_queue`
    all streams share one, in which CUDA may put them as well. A launch starts when all of its
    blocks fit beside those that run, whatever their distribution over the multiprocessors, of which
    each has the registers of an H100's. After `die` every call raises and nothing more is done,
    though a launch that is running goes on.
    """

    one_queue = False

    def __init__(
        self, multiprocessors: int = 132, threads: int = 2, index: int = 0,
        bus_id: str = "0000:06:00.0",
    ) -> None:  # fmt: skip
        self.multiprocessors, self.threads = multiprocessors, threads
        self.index, self.bus_id = index, bus_id
        self._running: list[tuple[int, int]] = []  # of each launch: its blocks, and `resident`
        self._room = threading.Condition()
        self.error = ""  # after which the context is unusable
        self.memory: dict[int, Any] = {}  # what has been allocated and not freed
        self.opened: dict[int, mmap.mmap] = {}
        self.registered: dict[int, int] = {}
        self.launches: list[tuple[int, int]] = []  # (stream, blocks)
        self.done: list[tuple[str, int, int]] = []  # (what, event, stream)
        self.captured: dict[int, int] = {}  # streams that are said to be captured, and into what
        self._queues: dict[int, ThreadPoolExecutor] = {}  # by stream
        self._lock = threading.Lock()
        self._events: dict[int, threading.Event] = {}
        self._files: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._library = ctypes.CDLL(str(build(everything=True, what="library")))

    def die(self, error: str = "cudaErrorIllegalAddress: an illegal memory access") -> None:
        with self._room:
            self.error = error
            self._room.notify_all()

    def alive(self, capturing: bool = True) -> None:
        """Raise if the context has died, or during a capture unless that is allowed."""
        if self.error:
            raise RuntimeError(self.error)
        if self.captured and not capturing:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def here(self) -> AbstractContextManager[None]:
        self.alive()
        return nullcontext()

    def finish(self) -> None:
        self.alive(capturing=False)
        with self._lock:  # another thread may free its stream
            ends = [queue.submit(lambda: None) for queue in self._queues.values()]
        for end in ends:
            end.result()
        self.alive()

    def use(self) -> None:
        CURRENT.index = self.index

    def blocks_to_fill(self) -> int:
        return 2 * self.multiprocessors

    def allocate(self, nbytes: int) -> int:
        self.alive()
        fd = os.memfd_create("host-gpu")
        os.ftruncate(fd, max(nbytes, 1))
        memory = mmap.mmap(fd, max(nbytes, 1))
        address = _address(memory)
        self.memory[address], self._files[address] = memory, fd
        return address

    def free(self, address: int) -> None:
        self.alive()
        del self.memory[address]
        if address in self._files:
            os.close(self._files.pop(address))

    def array(self, address: int, nbytes: int, owner: object) -> HostTensor:
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return HostTensor(np.frombuffer(memory, np.uint8, nbytes), self.index)

    def upload(self, array: np.ndarray) -> int:
        self.alive()
        raw = np.zeros(array.nbytes + 128, np.uint8)
        address = -(-raw.ctypes.data // 128) * 128
        self.memory[address] = raw
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return address

    def store(self, address: int, array: np.ndarray) -> None:
        self.alive()
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: np.ndarray) -> None:
        self.synchronise(0)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        self._enqueue(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        def replay() -> None:
            enqueue(0)
            self.synchronise(0)

        return replay

    def close(self) -> None:
        """End the streams' threads: a process with threads cannot be forked."""
        for queue in self._queues.values():
            queue.shutdown()
        self._queues.clear()

    def describe(self) -> dict[str, object]:
        return {"gpu": "threads"}

    def pinned(self, words: int) -> np.ndarray:
        return np.zeros(words, np.uint32)

    def resident(self, dtype: str, op: str) -> int:
        self.alive()
        return self._holds(dtype, op)

    def _holds(self, dtype: str, op: str) -> int:
        each = -(-self.registers(dtype, op) * 32 // 256) * 256  # of a warp; given out 256 at once
        warps = 4 * (16384 // each)  # in four partitions
        return min(warps * 32, 2048) // PLAN_THREADS * (self.multiprocessors - 1)

    def registers(self, dtype: str, op: str) -> int:
        element, functor = kernel_number(dtype, op)
        name = next(d for d in DTYPES if DTYPES[d].element == ELEMENTS[element])
        return compiled_registers()[f"sm_90 {name} {FUNCTORS[functor].rstrip('_')}"]

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        size = blocks, self._holds(dtype, op)
        assert blocks <= size[1], "cudaErrorCooperativeLaunchTooLarge"
        self.launches.append((stream, blocks))
        self.done.append(("launch", 0, stream))
        copy = launch.copy()
        arguments = (*kernel_number(dtype, op), ctypes.c_void_p(copy.ctypes.data), blocks)

        def run() -> None:
            with self._room:
                self._room.wait_for(lambda: self.error or self._fits(size))
                if self.error:
                    return
                self._running.append(size)
            self._library.launch(*arguments, self.threads)
            with self._room:
                self._running.remove(size)
                self._room.notify_all()

        self._enqueue(stream, lambda: (copy, run()))

    def _fits(self, size: tuple[int, int]) -> bool:
        blocks, resident = zip(size, *self._running, strict=True)
        return sum(blocks) <= min(resident)

    def load_check(self) -> None:
        pass

    def check(self, argument: np.ndarray, stream: int) -> None:
        self.done.append(("check", 0, stream))
        copy = argument.copy()
        at = ctypes.c_void_p(copy.ctypes.data)
        self._enqueue(stream, lambda: (copy, self._library.check(at, 1, self.threads)))

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self._enqueue(stream, lambda: ctypes.memset(address, 0, nbytes))

    def synchronise(self, stream: int) -> None:
        self._enqueue(stream, lambda: None).result()
        self.alive()

    def _enqueue(self, stream: int, what: Callable[[], Any], always: bool = False) -> Future[Any]:
        """`always`: also if the context dies before its turn comes."""
        self.alive()
        with self._lock:
            queue = self._queues.setdefault(0 if self.one_queue else stream, ThreadPoolExecutor(1))
            return queue.submit(lambda: what() if always or not self.error else None)

    # ---- streams and events ------------------------------------------------------------------
    def make_stream(self) -> int:
        self.alive()
        return 1000 + next(self._numbers)

    def free_stream(self, stream: int) -> None:
        self.alive()
        with self._lock:
            queue = self._queues.pop(stream, None)
        if queue:
            queue.shutdown()

    def capturing(self, stream: int) -> int:
        self.alive()
        return self.captured.get(stream, 0)

    def make_event(self) -> int:
        self.alive()
        event = next(self._numbers)
        self._events[event] = threading.Event()
        self._events[event].set()
        return event

    def free_event(self, event: int) -> None:
        self.alive()
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self.done.append(("record", event, stream))
        self._events[event] = now = threading.Event()
        self._enqueue(stream, now.set, always=True)

    def wait(self, event: int, stream: int) -> None:
        self.done.append(("wait", event, stream))
        self._enqueue(stream, self._events[event].wait)

    def ready(self, event: int) -> bool:
        done = self._events[event].is_set()  # before the error is read, as it may come in between
        self.alive(capturing=False)
        return done

    # ---- peers -------------------------------------------------------------------------------
    def identity(self) -> tuple[str, str]:
        return self.bus_id, f"GPU-{self.bus_id}"

    def enable_peer_access(self, peer: int) -> bool:
        return True

    def ipc_handle(self, address: int) -> bytes:
        self.alive()
        return f"{os.getpid()} {self._files[address]}".encode().ljust(64, b"\0")

    def ipc_open(self, handle: bytes) -> int:
        self.alive()
        pid, number = handle.rstrip(b"\0").split()
        assert int(pid) != os.getpid(), "CUDA opens no handle in the process that made it"
        fd = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR)
        memory = mmap.mmap(fd, 0)
        os.close(fd)
        address = _address(memory)
        self.opened[address] = memory
        return address

    def ipc_close(self, address: int) -> None:
        self.alive()
        del self.opened[address]

    def register(self, address: int, nbytes: int) -> None:
        self.alive()
        assert address % 4096 == 0
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.alive()
        del self.registered[address]


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class HostTensor:
    """What a CuPy array looks like to others, in memory of a `HostDevice`."""

    def __init__(self, array: np.ndarray, device: int = 0, stream: int = 0) -> None:
        self.array, self.stream = array, stream
        self.shape, self.dtype = array.shape, array.dtype
        self.device = SimpleNamespace(id=device)
        self._interface = array.__array_interface__  # which NumPy makes anew each time, in 4 us

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape: Any) -> HostTensor:
        return HostTensor(self.array.reshape(*shape), self.device.id, self.stream)

    def view(self, dtype: str) -> HostTensor:
        return HostTensor(self.array.view(dtype), self.device.id, self.stream)

    def __setitem__(self, where: Any, values: HostTensor) -> None:
        self.array[where] = values.array

    def __getitem__(self, where: Any) -> HostTensor:
        return HostTensor(self.array[where], self.device.id, self.stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._interface["data"][0], not self.array.flags.writeable
        return {**self._interface, "data": data, "version": 3, "stream": self.stream or 1}


class Image:
    """Segments, the places of addresses in them, and launches; see `shim/driver.cpp`."""

    def __init__(self) -> None:
        self.segments: list[np.ndarray] = []
        self.addresses: list[tuple[int, int]] = []
        self.launches: list[tuple[int, ...]] = []
        self.seconds = 0.0  # which the launches of the last `run` took

    def add(self, array: np.ndarray, pointers: Sequence[str] = ()) -> int:
        """A segment with the array's bytes; returns its address. `pointers`: fields of addresses
        of a structured array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        index = len(self.segments)
        self.segments.append(raw)
        for row in range(array.size):
            for name in pointers:
                dtype, offset = array.dtype.fields[name][:2]
                count = int(np.prod(dtype.shape, dtype=int))
                start = row * array.dtype.itemsize + offset
                self.addresses += [(index, start + 8 * i) for i in range(count)]
        return (index + 1) << 40

    def run(self, driver: Path, timeout: float = 280, abort: int | None = None) -> Any:
        """The segments afterwards; or the finished process, where it failed."""
        with tempfile.TemporaryDirectory(dir=build_folder().name) as folder:
            paths = [Path(folder) / "in", Path(folder) / "out"]
            with paths[0].open("wb") as file:

                def put(*numbers: int) -> None:
                    file.write(np.array(numbers, np.uint64).tobytes())

                put(len(self.segments))
                for segment in self.segments:
                    put(segment.size)
                    file.write(segment.tobytes())
                put(len(self.addresses), *(n for pair in self.addresses for n in pair))
                put(len(self.launches), *(n for row in self.launches for n in row))
            extra = [] if abort is None else [str((abort >> 40) - 1)]
            environment = {
                **os.environ, "TSAN_OPTIONS": f"exitcode={BROKEN}:halt_on_error=1",
                "ASAN_OPTIONS": f"exitcode={BROKEN}:detect_leaks=0",
            }  # fmt: skip
            done = subprocess.run(
                [str(driver), *map(str, paths), *extra], capture_output=True, text=True,
                timeout=timeout, env=environment, check=False,
            )  # fmt: skip
            if done.returncode:
                return done
            self.seconds = float(done.stdout)
            raw = np.fromfile(paths[1], np.uint8)
        stops = np.cumsum([s.size for s in self.segments])
        return np.split(raw, stops[:-1])


class HostGpu:
    """One plan's memory on ranks of one image, and calls over it, one after another."""

    def __init__(
        self, plan: Plan, shape: tables.LaunchConfig, threads: int = 2, start: int = 0,
        timeout: float = 20.0,
        fuse: bool = True,
    ) -> None:  # fmt: skip
        plan = tables.fused(plan) if fuse else plan
        self.plan, self.shape, self.threads, self.timeout = plan, shape, threads, timeout
        self.image = Image()
        self.abort, self.stop = (self.image.add(np.zeros(1, np.uint32)) for _ in range(2))
        layout = tables.lay_out(plan, shape)
        memory = [np.zeros(n // 4, np.uint32) for n in layout.nbytes]
        for i, c in enumerate(plan.connections):  # as if each had been used `start` times
            for block in range(shape.width):
                memory[c.dst][(layout.ready[i] + block * tables.LINE) // 4] = start % 2**32
                if not c.local:
                    memory[c.src][(layout.free[i] + block * tables.LINE) // 4] = start % 2**32
            if start and not c.local:  # lines then hold flags of earlier uses
                memory[c.dst][layout.slot[i] // 4 :] = (start - 100) % 2**32
        bases = [self.image.add(m) for m in memory]
        self.memory = [(base >> 40) - 1 for base in bases]  # the segments of the ranks' memory
        self.given: list[tuple[int, np.ndarray]] = []  # segments that must stay, and their bytes
        self.groups: list[tuple[int, dict[str, int]]] = []
        self.programs: list[tables.TrackCode] = []
        for rank in range(plan.size):
            for p in tables.programs(plan, rank):
                cursors = np.zeros((shape.width, len(p.ends)), tables.CURSOR)
                for name in ("waited", "moved", "signalled"):
                    cursors[name] = start % 2**32
                fields = {
                    "code": self.image.add(p.code),
                    "ends": self.image.add(
                        tables.ends(
                            plan, layout, p, lambda owner, _: bases[owner], range(plan.size)
                        ),
                        ("slot", "ready", "free"),
                    ),
                    "cursors": self.image.add(cursors),
                    "report": self.image.add(np.zeros(shape.width * tables.REPORT, np.uint32)),
                    "rank": rank, "num_ends": len(p.ends), "code_words": p.code.size,
                }  # fmt: skip
                self.groups.append((rank, fields))
                self.programs.append(p)

    def call(
        self, inputs: Sequence[np.ndarray], op: str = "sum", dtype: str = "float32",
        nbytes: int | None = None, plan: Plan | None = None, skew: int = 0, ps_per_byte: int = 0,
        only: int | None = None, finals: int = 0, apart: bool = False, direct: bool = False,
    ) -> list[int]:  # fmt: skip
        """Add a launch; returns the segments of the ranks' buffers, each `skew` bytes in.

        `apart`: the inputs lie in segments of their own, which must not change (`given`).
        `direct`: ranks push into each other's buffers.
        `only`: leave out all blocks of every other rank. `finals`: address of a queue's counters.
        """
        plan = plan or self.plan
        nbytes = inputs[0].nbytes if nbytes is None else nbytes
        extents = [tables.chunk_extents(plan, nbytes, r) for r in range(plan.size)]
        buffers = [
            self.image.add(np.concatenate([np.zeros(skew, np.uint8), x.reshape(-1).view(np.uint8)]))
            for x in inputs
        ]
        values = buffers
        if apart:
            self.given += [((b >> 40) - 1, self.image.segments[(b >> 40) - 1][skew:].copy())
                           for b in buffers]  # fmt: skip
            buffers = [self.image.add(~self.image.segments[(b >> 40) - 1]) for b in values]
        chosen = [(r, f) for r, f in self.groups if only in (None, r)]
        table = np.zeros(len(chosen), tables.TRACK)
        where = [self.image.add(p) for p in extents]
        for row, (rank, fields) in zip(table, chosen, strict=True):
            for name, value in fields.items():
                row[name] = value
            row["chunks"] = where[rank]
        groups = self.image.add(table, ("code", "ends", "cursors", "chunks", "report"))
        launch = tables.launch(
            plan, self.shape, groups, self.stop, self.abort,
            [(b + skew, v + skew) for b, v in zip(buffers, values, strict=True)], self.timeout,
            op == "avg", ps_per_byte, finals, [] if direct else None,
        )  # fmt: skip
        at = self.image.add(launch, ("tracks", "stop", "abort", "finals", "buffers", "inputs"))
        blocks = len(chosen) * self.shape.width
        kernel = kernel_number(dtype, op)
        self.image.launches.append(((at >> 40) - 1, blocks, self.threads, *kernel))
        return [(b >> 40) - 1 for b in buffers]

    def reports(self, segments: Sequence[np.ndarray]) -> Mapping[tuple[int, int, int], list[int]]:
        """What each (rank, channel, block) has reported."""
        return {
            (rank, p.track.channel, block): row.tolist()
            for p, (rank, fields) in zip(self.programs, self.groups, strict=True)
            for block, row in enumerate(
                segments[(fields["report"] >> 40) - 1].view(np.uint32).reshape(-1, tables.REPORT)
            )
        }
