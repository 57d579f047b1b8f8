"""The CUDA kernels run on the host: builds of `shim/driver.cpp`, and the files that it reads."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.planning.plan import Plan
from collectives.runtime import program
from collectives.runtime.program import CURSOR, GROUP, LINE, REPORT, Shape
from collectives.runtime.reference import DTYPES
from collectives.runtime.shm import place_of

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"
OPS = {"sum": 0, "avg": 0, "min": 1, "max": 2, "prod": 3}
COMPILER = os.environ.get("CXX") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++, or CXX)")
BROKEN = 99  # what a sanitizer exits with


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="linkweave-shim-")


@cache
def build(
    sanitizer: str = "", everything: bool = False, changes: tuple[tuple[str, str, str], ...] = (),
    what: str = "driver",
) -> Path:  # fmt: skip
    """The driver or the library, with `changes`: (file, what stands there once, what replaces it).

    All dtypes and ops with `everything`, else float32 sums.
    """
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    sources = folder / "kernels"
    shutil.copytree(ROOT / "kernels", sources, ignore=shutil.ignore_patterns("*.py*", "__*"))
    for name, old, new in changes:
        text = (sources / name).read_text()
        assert text.count(old) == 1, f"{name} holds {text.count(old)} times: {old}"
        (sources / name).write_text(text.replace(old, new))
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
    options += ["-DALL"] if everything else []
    options += ["-shared", "-fPIC"] if what == "library" else []
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-g", "-pthread", "-mf16c", "-Wall", "-Wno-unknown-pragmas",
         "-Werror", "-include", str(SHIM / "cuda_shim.h"), f"-I{sources}", "-DELEMENT=float",
         "-DOP=sum", *options, str(SHIM / f"{what}.cpp"), "-o", str(folder / what)],
        check=True, timeout=300,
    )  # fmt: skip
    return folder / what


class HostDevice:
    """A `Device` whose memory is this process's and whose blocks are threads."""

    def __init__(self, capacity: int = 256, threads: int = 2) -> None:
        self.capacity, self.threads = capacity, threads
        self.memory: dict[int, np.ndarray] = {}
        self.launches = 0
        self._library = ctypes.CDLL(str(build(everything=True, what="library")))

    def allocate(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + 128, np.uint8)
        address = -(-raw.ctypes.data // 128) * 128
        self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def upload(self, array: np.ndarray) -> int:
        address = self.allocate(array.nbytes)
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return address

    def download(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memmove(dst, src, nbytes)

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        return lambda: enqueue(0)

    def describe(self) -> dict[str, object]:
        return {"gpu": "threads"}

    def pinned(self, words: int) -> np.ndarray:
        return np.zeros(words, np.uint32)

    def resident(self, dtype: str, op: str) -> int:
        return self.capacity

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        assert blocks <= self.capacity
        self.launches += 1
        self._library.launch(
            DTYPES.index(dtype), OPS[op], ctypes.c_void_p(launch.ctypes.data), blocks, self.threads
        )

    def synchronise(self, stream: int) -> None:
        pass


class Image:
    """Segments, the places of addresses in them, and launches; see `shim/driver.cpp`."""

    def __init__(self) -> None:
        self.segments: list[np.ndarray] = []
        self.addresses: list[tuple[int, int]] = []
        self.launches: list[tuple[int, ...]] = []

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

    def run(self, driver: Path, timeout: float = 60, abort: int | None = None) -> Any:
        """The segments afterwards; or the finished process, where it failed."""
        with tempfile.TemporaryDirectory(dir=_folder().name) as folder:
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
            raw = np.fromfile(paths[1], np.uint8)
        stops = np.cumsum([s.size for s in self.segments])
        return np.split(raw, stops[:-1])


class HostGpu:
    """One plan's memory on ranks of one image, and calls over it, one after another."""

    def __init__(
        self, plan: Plan, shape: Shape, threads: int = 2, start: int = 0, timeout: float = 20.0
    ) -> None:
        self.plan, self.shape, self.threads, self.timeout = plan, shape, threads, timeout
        self.image = Image()
        self.abort = self.image.add(np.zeros(1, np.uint32))
        layout = program.lay_out(plan, shape)
        memory = [np.zeros(n // 4, np.uint32) for n in layout.nbytes]
        for i, c in enumerate(plan.connections):  # as if each had been used `start` times
            for lane in range(shape.lanes):
                memory[c.dst][(layout.ready[i] + lane * LINE) // 4] = start % 2**32
                if not c.local:
                    memory[c.src][(layout.free[i] + lane * LINE) // 4] = start % 2**32
            if start and not c.local:  # lines then hold flags of earlier uses
                memory[c.dst][layout.slot[i] // 4 :] = (start - 100) % 2**32
        bases = [self.image.add(m) for m in memory]
        self.groups: list[tuple[int, dict[str, int]]] = []
        self.programs: list[program.Program] = []
        for rank in range(plan.size):
            for p in program.programs(plan, rank):
                cursors = np.zeros((shape.lanes, len(p.ends)), CURSOR)
                for name in ("waited", "moved", "signalled"):
                    cursors[name] = start % 2**32
                fields = {
                    "code": self.image.add(p.code),
                    "ends": self.image.add(
                        program.ends(plan, layout, p, bases), ("slot", "ready", "free")
                    ),
                    "cursors": self.image.add(cursors),
                    "report": self.image.add(np.zeros(shape.lanes * REPORT, np.uint32)),
                    "rank": rank, "num_ends": len(p.ends), "code_words": p.code.size,
                }  # fmt: skip
                self.groups.append((rank, fields))
                self.programs.append(p)

    def call(
        self, inputs: Sequence[np.ndarray], op: str = "sum", dtype: str = "float32",
        nbytes: int | None = None, plan: Plan | None = None, skew: int = 0, ps_per_byte: int = 0,
        only: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Add a launch; returns the segments of the ranks' buffers, each `skew` bytes in.

        `only`: leave out all blocks of every other rank.
        """
        plan = plan or self.plan
        nbytes = inputs[0].nbytes if nbytes is None else nbytes
        places = [place_of(plan, nbytes, r) for r in range(plan.size)]
        buffers = [
            self.image.add(np.concatenate([np.zeros(skew, np.uint8), x.reshape(-1).view(np.uint8)]))
            for x in inputs
        ]
        chosen = [(r, f) for r, f in self.groups if only in (None, r)]
        table = np.zeros(len(chosen), GROUP)
        where = [self.image.add(p) for p in places]
        for row, (rank, fields) in zip(table, chosen, strict=True):
            for name, value in fields.items():
                row[name] = value
            row["place"] = where[rank]
        groups = self.image.add(table, ("code", "ends", "cursors", "place", "report"))
        launch = program.launch(
            plan, self.shape, groups, self.abort, [b + skew for b in buffers], self.timeout,
            op == "avg", ps_per_byte,
        )  # fmt: skip
        at = self.image.add(launch, ("groups", "abort", "buffers"))
        blocks = len(chosen) * self.shape.lanes
        kernel = (DTYPES.index(dtype), OPS[op])
        self.image.launches.append(((at >> 40) - 1, blocks, self.threads, *kernel))
        return [(b >> 40) - 1 for b in buffers]

    def reports(self, segments: Sequence[np.ndarray]) -> Mapping[tuple[int, int, int], list[int]]:
        """What each (rank, channel, lane) has reported."""
        return {
            (rank, p.stream.channel, lane): row.tolist()
            for p, (rank, fields) in zip(self.programs, self.groups, strict=True)
            for lane, row in enumerate(
                segments[(fields["report"] >> 40) - 1].view(np.uint32).reshape(-1, REPORT)
            )
        }
