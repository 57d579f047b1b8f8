"""The CUDA kernels of rows and sparse vectors, on threads of the host, against the CPU's kernels:
the same bits, whatever the number of threads and blocks."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_gpu import BROKEN, COMPILER, needs_compiler
from host_kernels import HostKernels, source_of_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import Nvrtc

from linkweave import kernels
from linkweave.collectives.calls.sparse.backend import Wire
from linkweave.kernels.gpu import arrays as gpu
from linkweave.kernels.gpu.api import GpuKernels
from linkweave.kernels.gpu.source import PLAIN, source
from linkweave.kernels.merge import entries as gpu_entries
from linkweave.kernels.merge import gpu as gpu_merge
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.rows import gpu as gpu_rows
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk import gpu as gpu_select
from tests.cpu.helpers import KINDS, row

pytestmark = needs_compiler
GRIDS = [(1, 1), (4, 3), (7, 2), (32, 2), (64, 2)]  # (threads, blocks)
ONCE = ["gather", "upper", "middle", "lower", "take"]


def same(found: Any, want: Any) -> None:
    for a, b in zip(found, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 31, 97, 5000])
def test_topk_is_that_of_the_cpu(kind: str, n: int) -> None:
    x = row(kind, n)
    for k in sorted({0, 1, n // 3, n - 1, n}):
        same(GpuKernels(HostKernels()).topk_abs(x, k), kernels.topk_abs(x, k))


@pytest.mark.parametrize("kind", ["random", "special", "huge steps", "zeros", "constant"])
@pytest.mark.parametrize(("threads", "blocks"), GRIDS[::2])
def test_topk_of_a_sampled_row(kind: str, threads: int, blocks: int) -> None:
    x = row(kind, 40_345)
    for k in (1, 70, 2000, 20_000):
        same(GpuKernels(HostKernels(threads, blocks)).topk_abs(x, k), kernels.topk_abs(x, k))


def test_indices_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_select, "index_type", lambda n: "int64")
    x = row("halves", 5000)
    values, indices = gpu_select.select(HostKernels(), x, "float32", x.size, 700)
    want = kernels.topk_abs(x, 700)
    assert indices.dtype == np.int64 and indices.tolist() == want[1].tolist()
    assert values.tobytes() == want[0].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["random", "special", "denormal", "zeros", "constant"])
def test_topk_of_short_floats(dtype: str, kind: str) -> None:
    wide = row(kind, 3001)
    x = wide.astype(np.float16).view(np.uint16) if dtype == "float16" else (
        (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    )  # fmt: skip
    for k in (1, 100, 2999):
        calls = HostKernels()
        found = gpu_select.select(calls, x, dtype, x.size, k)
        want = topk.select(x, dtype, k)
        assert np.array_equal(found[1], want)
        assert np.array_equal(np.asarray(found[0]).view(np.uint16), x[want])
        assert calls.launches == ["gather", "middle", "lower", "take"]  # two digits are enough


class Forgetful(HostKernels):
    """Overwrites what `gather` has listed: all of the row but the parts of warps whose lists are
    too short. Sees how many elements reached the threshold in each part."""

    room: int | None = None  # another length of the lists, not above the usual one

    def select(self, x: np.ndarray, dtype: str, k: int, residual: Any = None) -> Any:
        self.row = x
        return gpu_select.select(self, x, dtype, x.size, k, residual)

    def launch(self, file: str, names: Any, words: Any, argument: Any, blocks: int) -> None:
        self.argument = argument.view(gpu_select.SELECT)[0]
        if self.room is not None:
            self.argument["room"] = self.room
        warps, part = blocks * -(-self.threads // 32), int(self.argument["part"])
        for name in names:
            super().launch(file, (name,), words, argument, blocks)
            if name == "gather":
                counts = (ctypes.c_uint32 * warps).from_address(int(self.argument["counts"]))
                self.counts = np.array(counts)
                for warp, number in enumerate(self.counts):
                    if number <= self.argument["room"]:
                        self.row[warp * part : (warp + 1) * part].view(np.uint8)[:] = 0xFF


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("threads", "blocks"), [(4, 3), (64, 2)])
def test_the_row_is_read_once(dtype: str, with_residual: bool, threads: int, blocks: int) -> None:
    """All later launches have the lists alone: about as many elements as the sample foretold."""
    x, k = row("random", 40_000).astype(dtype), 200
    residual = row("halves", x.size, 1) if with_residual else None
    theirs = None if residual is None else residual.copy()
    calls = Forgetful(threads, blocks)
    found = calls.select(x.copy(), dtype, k, residual)
    same(found, kernels.topk_abs(x, k) if theirs is None else kernels.sparsify(x, theirs, k))
    if theirs is not None:
        same([residual], [theirs])
    digits = ONCE if dtype == "float32" or with_residual else ["gather", *ONCE[2:]]
    assert calls.launches == ["sample"] * with_residual + digits
    assert k <= calls.counts.sum() <= 5 * k
    assert 0 < calls.counts.max() <= calls.argument["room"] <= x.size // (6 * calls.counts.size)


def test_lists_that_hold_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that misleads: here a rank of 1 asks for far too few."""
    monkeypatch.setattr(gpu_select, "rank_of", lambda samples, n, k: 1)
    monkeypatch.setattr(gpu_select, "launches_of", gpu_select.launches_of.__wrapped__)
    for dtype in ("float32", "float16"):
        x = row("random", 40_000).astype(dtype)
        residual = row("halves", x.size, 1)
        theirs = residual.copy()
        same(GpuKernels(HostKernels()).topk_abs(x, 9000), kernels.topk_abs(x, 9000))
        same(GpuKernels(HostKernels()).sparsify(x, residual, 9000),
             kernels.sparsify(x, theirs, 9000))  # fmt: skip
        same([residual], [theirs])


def test_a_list_that_is_exactly_full_or_too_short() -> None:
    """A warp whose list is too short selects from its part of the row, the others do not."""
    x, k = row("ascending", 40_000), 500
    want = kernels.topk_abs(x, k)
    calls = Forgetful(64, 2)
    same(calls.select(x.copy(), "float32", k), want)
    counts = calls.counts
    assert counts.min() == 0 < counts.max() < calls.argument["room"]
    for room in (counts.max() - 1, counts.max(), counts.max() + 1):
        calls.room = int(room)
        same(calls.select(x.copy(), "float32", k), want)
        assert calls.counts.tolist() == counts.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (3, 2), (4, 4)])
def test_rows_that_are_not_aligned(dtype: str, offsets: tuple[int, int]) -> None:
    n = 20_011
    x = row("special", n + 8).astype(dtype)[offsets[0] :][:n]
    residual = row("random", n + 8)[offsets[1] :][:n]
    theirs = residual.copy()
    same(GpuKernels(HostKernels()).topk_abs(x, 300), kernels.topk_abs(x, 300))
    same(GpuKernels(HostKernels()).sparsify(x, residual, 300), kernels.sparsify(x, theirs, 300))
    same([residual], [theirs])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n", [0, 1, 100, 70_003])
def test_sparsify_is_that_of_the_cpu(n: int, dtype: str) -> None:
    grad, residual = row("random", n).astype(dtype), row("halves", n, 1)
    for k in sorted({0, min(1, n), n // 50, n}):
        mine, theirs = residual.copy(), residual.copy()
        same(GpuKernels(HostKernels()).sparsify(grad, mine, k), kernels.sparsify(grad, theirs, k))
        same([mine], [theirs])


def vector(n: int, seed: int, dtype: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([n, seed])
    indices = np.sort(rng.choice(2 * n + 5, n, replace=False)).astype(dtype)
    return rng.standard_normal(n).astype(np.float32), indices


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    ("sizes", "k"), [((0, 0), 3), ((0, 5), 2), ((5, 0), 9), ((7, 7), 4), ((700, 501), 60)]
)
def test_merges_are_those_of_the_cpu(sizes: tuple[int, int], k: int, dtype: str) -> None:
    a, b = vector(sizes[0], 0, dtype), vector(sizes[1], 1, dtype)
    for calls in (HostKernels(), HostKernels(7, 2)):
        for mine, theirs in zip(
            GpuKernels(calls).merge_topk(a, b, k), kernels.merge_topk(a, b, k), strict=True
        ):
            same(mine, theirs)


@pytest.mark.parametrize(("at", "which"), [(0, "first"), (1, "second")])
def test_indices_that_do_not_ascend(at: int, which: str) -> None:
    pair = [vector(50, 0), vector(40, 1)]
    pair[at][1][20] = pair[at][1][19]
    with pytest.raises(ValueError, match=f"the {which} vector's indices must ascend"):
        GpuKernels(HostKernels()).merge_topk(pair[0], pair[1], 9)


@given(
    st.integers(0, 400), st.integers(0, 5), st.sampled_from([1, 3, 300, 70_000, 1 << 33]),
    st.sampled_from(GRIDS), st.sampled_from(["float32", "float64"]), st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_coalesced_rows(n: int, width: int, limit: int, grid: Any, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, limit, n).astype("int64" if limit > 1 << 31 else "int32")
    values = rng.integers(-99, 100, (n, width)).astype(dtype)  # sums of which are exact
    calls = GpuKernels(HostKernels(*grid))
    same(calls.coalesce(indices, values, limit), kernels.coalesce(indices, values, limit))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_order_of_sums_is_that_of_the_windows(dtype: str) -> None:
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(0, 4, 500)).astype(np.int32)
    values = rng.standard_normal((500, 3)).astype(dtype)
    _, sums = GpuKernels(HostKernels()).coalesce(indices, values, 4)
    wide = np.float64 if dtype == "float64" else np.float32
    for run in range(4):
        positions = np.flatnonzero(indices == run)
        total = np.zeros(3, wide)
        for window in np.unique(positions // gpu_rows.WINDOW):
            part = np.zeros(3, wide)
            for i in positions[positions // gpu_rows.WINDOW == window]:
                part = part + values[i].astype(wide)
            total = total + part if total.any() else part
        assert sums[run].tolist() == total.astype(dtype).tolist()


def test_rows_are_split() -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 50, 300)
    values = rng.integers(-9, 10, (300, 4)).astype(np.float32)
    calls = GpuKernels(HostKernels())
    for a, b in zip(calls.split_rows(indices, values, np.arange(9)),
                    kernels.split_rows(indices, values, np.arange(9)), strict=True):  # fmt: skip
        same(a, b)


@pytest.mark.parametrize("limit", [8, 1 << 40])
@pytest.mark.parametrize("bad", [-1, 1 << 40])
def test_indices_out_of_range_are_named(bad: int, limit: int) -> None:
    indices = np.array([1, 2, 3, bad, 5, bad])
    with pytest.raises(ValueError, match=rf"indices\[3\] is {bad}; the table has {limit} rows"):
        GpuKernels(HostKernels()).coalesce(indices, np.ones((6, 2), np.float32), limit)


def test_bad_arguments_are_refused() -> None:
    calls, x = GpuKernels(HostKernels()), np.zeros(4, np.float32)
    for call, words in (
        (lambda: calls.topk_abs(x, 5), "k must be from 0 to 4, not 5"),
        (lambda: calls.topk_abs(x.reshape(2, 2), 1), "x must have one dimension"),
        (lambda: calls.sparsify(x, x[:3], 1), "they must agree"),
        (lambda: calls.sparsify(x[::2], np.zeros(4, np.float32)[::2], 1), "contiguous float32"),
        (lambda: calls.coalesce(np.zeros(3), x[:3], 4), "indices must be int32 or int64"),
        (lambda: calls.coalesce(np.zeros(3, int), x, 4), "3 indices, but values of shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            call()


# ---- entries of sparse vectors ------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_entries_are_settled_as_on_the_cpu(dtype: str) -> None:
    wire, limit = Wire(dtype), 5000
    values = row("special", 700)
    values[:5] = 70_000, -3.4e38, 1.00390625, 65_519, 1e-40
    indices = np.sort(np.random.default_rng(0).choice(limit, 700, False)).astype(np.int32)
    lost, wanted, errors = row("random", 700), wire.rounded(values), np.zeros(700, np.float32)
    fine = np.isfinite(values)
    errors[fine] = values[fine] - wanted[fine]
    calls = HostKernels()
    gpu_entries.settle(calls, (values, indices), dtype, lost)
    numbers = ~np.isnan(wanted)
    assert (
        values[numbers].tobytes() == wanted[numbers].tobytes() and np.isnan(values[~numbers]).all()
    )
    assert lost.tobytes() == errors.tobytes()

    message = np.full(wire.message(800), 7, np.uint8)  # room for more
    gpu_entries.pack(calls, (wanted, indices), dtype, calls.address(message), 800)
    assert message.tobytes() == wire.message_of((wanted, indices), 800).tobytes()
    padded = gpu_entries.unpack(calls, 800, dtype, calls.address(message))
    assert padded[1][700:].tolist() == [PAD] * 100
    found = gpu_entries.measured(calls, padded)
    for a, b, c in zip(found, wire.read(message), (wanted, indices), strict=True):
        assert np.array_equal(a, b, equal_nan=True) and np.array_equal(a, c, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_vectors_with_room_are_merged_as_those_without(seed: int) -> None:
    rng, calls = np.random.default_rng(seed), HostKernels()
    pair = []
    for n in rng.integers(0, 60, 2):
        indices = np.sort(rng.choice(80, n, False)).astype(np.int32)
        values = rng.integers(-3, 4, n).astype(np.float32)  # with zeros, which are entries
        if n and seed % 3 == 0:
            values[0] = np.nan
        pair.append((values, indices))
    rooms = [
        (np.append(v, np.zeros(pad, np.float32)), np.append(i, np.full(pad, PAD, np.int32)))
        for (v, i), pad in zip(pair, rng.integers(0, 30, 2), strict=True)
    ]
    room = sum(len(v) for v, _ in rooms)
    room = min(room, 80)
    for k in (0, 1, 7, 40, room, room + 5):
        kept, left = gpu_merge.merge_padded(calls, *rooms, k, 80)
        assert [len(kept[1]), len(left[1])] == [min(k, room), room - min(k, room)]
        for mine, wanted in zip((kept, left), kernels.merge_topk(*pair, k), strict=True):
            entries = gpu_entries.measured(calls, mine)
            assert all(np.array_equal(a, b, equal_nan=True)
                       for a, b in zip(entries, wanted, strict=True))  # fmt: skip
            assert (mine[1][len(entries[1]) :] == PAD).all()


def test_what_is_kept_is_common_or_foreign_and_within_the_residual() -> None:
    values, indices = np.arange(1, 7, dtype=np.float32), np.array([-4, 0, 2, 5, 9, PAD], np.int32)
    other = np.array([2, 3, 9, PAD, PAD], np.int32)
    for how, wanted in (
        ({}, [2, 0, 3, 0, 0, 4, 0, 0]), ({"common": other}, [0, 0, 3, 0, 0, 0, 0, 0]),
        ({"foreign": other}, [2, 0, 0, 0, 0, 4, 0, 0]), ({"common": other[:0]}, [0] * 8),
        ({"foreign": other[:0]}, [2, 0, 3, 0, 0, 4, 0, 0]),
    ):  # fmt: skip
        residual = np.zeros(8, np.float32)
        gpu_entries.keep(HostKernels(), (values, indices), residual, **how)
        assert residual.tolist() == wanted


def test_indices_that_are_wrong_are_seen() -> None:
    values = np.zeros(5, np.float32)
    for where in ([0, 1, 1, 2, 3], [3, 2, 4, 5, 6], [-1, 0, 1, 2, 3], [0, 1, 2, 3, 9]):
        indices = np.array(where, np.int32)
        assert gpu_entries.admit(HostKernels(), values, indices, "float32", 9) is None
    found = gpu_entries.admit(HostKernels(), values, np.arange(4, 9, dtype=np.int32), "float32", 9)
    assert found is not None and found[0].tolist() == [0] * 5
    assert gpu_entries.admit(HostKernels(), values[:0], indices[:0], "float32", 0) is not None


# ---- the sources --------------------------------------------------------------------------------
STRUCTS = {
    "topk/select.cu": {"Select": gpu_select.SELECT}, "rows/rows.cu": {"Rows": gpu_rows.ROWS},
    "merge/merge.cu": {"Merge": gpu_merge.MERGE, "Part": gpu_merge.PART},
    "rows/sort.cu": {"Sort": gpu_rows.SORT}, "merge/entries.cu": {"Entries": gpu_entries.ENTRIES},
}  # fmt: skip


@pytest.mark.parametrize("file", STRUCTS)
def test_structs_are_those_of_the_device(file: str) -> None:
    structs = {name: dtype.names or () for name, dtype in STRUCTS[file].items()}
    wanted = []
    for dtype in STRUCTS[file].values():
        fields = [dtype.fields[f] for f in dtype.names or ()]
        wanted += [(offset, kind.itemsize) for kind, offset, *_ in fields]
        wanted.append((dtype.itemsize, 0))
    if file == "topk/select.cu":
        structs["State"] = ()
        wanted.append((gpu_select.STATE_BYTES, 0))
    assert source_of_layouts(file, structs) == wanted


CASES = [
    *((file, gpu.element(d)) for file in ("topk/select.cu", "merge/entries.cu", "rows/rows.cu")
      for d in ("float32", "float16", "bfloat16")),
    ("rows/rows.cu", gpu.element("float64")),
    *(("merge/merge.cu", gpu.element(i, "INDEX")) for i in ("int32", "int64")),
    *(("rows/sort.cu", (*gpu.element(i, "INDEX"), f"-DKEY={k}"))
      for i in ("int32", "int64") for k in ("u32", "u64")),
]  # fmt: skip


FLOAT = gpu.element("float32")
RECORD = Path(__file__).parents[1] / "golden" / "kernels.registers.json"
"""How many registers each kernel has; after a wanted change run with --update-golden."""


def compiled_for() -> Iterator[Any]:
    """Each file for all architectures; if it has three cases or more, these in turn."""
    for _, group in groupby(CASES, lambda case: case[0]):
        cases = list(group)
        for i, case in enumerate(cases):
            for j, architecture in enumerate((70, 80, 90, 100, 120)):
                left_out = len(cases) >= 3 and (i + j) % 3
                marks = [pytest.mark.slow] if left_out else []
                yield pytest.param(*case, architecture, marks=marks)


@pytest.mark.parametrize(("file", "words", "architecture"), [*compiled_for()])
def test_they_compile_with_no_spills(
    file: str, words: tuple[str, ...], architecture: int, update_golden: bool
) -> None:
    made = Nvrtc().compile(source(file), (*PLAIN, *words), architecture)
    assert set(made) == set(re.findall(r"^KERNEL\((\w+)", source(file), re.MULTILINE))
    for name, kernel in made.items():
        assert kernel.spilled == kernel.stack == 0, name
        assert kernel.registers <= 64, name  # two blocks of 512 threads a multiprocessor
        assert kernel.shared <= 48 << 10, name
        assert ".ftz" not in kernel.ptx
    key = " ".join([f"sm_{architecture}", file, *words])
    found = {f"{key} {name}": kernel.registers for name, kernel in made.items()}
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if update_golden:
        RECORD.write_text(json.dumps({**recorded, **found}, indent=1, sort_keys=True) + "\n")
    else:
        assert found == {k: v for k, v in recorded.items() if k in found}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_four_wide_loads_are_in_flight_while_the_row_is_read(dtype: str) -> None:
    """Four loads of the row follow each other directly, and four of the residual with no store
    between them, so that the assembler issues them together."""
    made = Nvrtc().compile(source("topk/select.cu"), (*PLAIN, *gpu.element(dtype)), 80)["gather"]
    text = made.ptx.split(".entry gather(")[1].split(".entry ")[0]
    assert len(re.findall(r"((\tld\.global\.v4\.u32 .*\n){4})", text)) == 1
    accesses = "".join(re.findall(r"\t(ld|st)\.global\.v4", text)).replace("ldldldld", "read ")
    residual = "read stststst" * (1 if dtype == "float32" else 2)
    assert accesses == "read " + residual


@pytest.mark.parametrize(("name", "loads"), [("windows", 24), ("join", 16)])
def test_eight_rows_are_in_flight(name: str, loads: int) -> None:
    """The loads of eight rows, or of eight windows' sums, stand between two branches, so that the
    assembler issues them before it waits: of each its run, its value, and in a window its place."""
    made = Nvrtc().compile(source("rows/rows.cu"), (*PLAIN, *FLOAT), 80)[name]
    text = made.ptx.split(f".entry {name}(")[1].split(".entry ")[0]
    found = [part.count("\tld.global") for part in re.split(r"\tbra|\n\$L", text)]
    assert max(found) == loads


@pytest.mark.parametrize("sanitizer", [pytest.param("thread", marks=pytest.mark.slow), "address"])
def test_no_sanitizer_complains(sanitizer: str) -> None:
    """In a process of its own, into which the sanitizer is loaded first."""
    name = f"-print-file-name=lib{sanitizer[0]}san.so"
    library = subprocess.run(
        [str(COMPILER), name], capture_output=True, text=True, check=True
    ).stdout.strip()
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "sanitized.py"), sanitizer], capture_output=True, text=True,
        timeout=280, check=False, cwd=here.parents[1],
        env={**os.environ, "LD_PRELOAD": library, "PYTHONPATH": str(here.parents[1]),
             "TSAN_OPTIONS": f"exitcode={BROKEN}:report_signal_unsafe=0",
             "ASAN_OPTIONS": f"exitcode={BROKEN}:detect_leaks=0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ran" in done.stdout


# ---- the libraries' arrays ----------------------------------------------------------------------
class FakeDevice:
    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def blocks_to_fill(self) -> int:
        return 8

    def here(self) -> Any:
        return nullcontext()

    def start(self, *arguments: Any) -> None:
        self.started.append(arguments)


def test_torch_tensors_and_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device = FakeDevice()
    monkeypatch.setattr(gpu, "device_of", lambda index: device)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77)
    )
    x = torch.zeros(6)
    found = gpu.LibraryGpu(x)
    assert found.blocks == 8 and found.address(x) == x.data_ptr()
    assert found.empty(3, "bfloat16").dtype == torch.bfloat16
    assert found.full(2, "int64", 5).tolist() == [5, 5]
    assert found.read(torch.arange(3)).tolist() == [0, 1, 2]
    values, where = found.nonzero(torch.tensor([0.0, 2, -0.0, -1]))
    assert values.tolist() == [2, -1] and where.dtype == torch.int32 and where.tolist() == [1, 3]
    rows, others = found.parted([torch.arange(3)], torch.arange(3), torch.tensor([1]))
    assert rows[0].tolist() == [1] and others[0].tolist() == [0, 2]
    assert found.contiguous(torch.nn.Parameter(torch.zeros(3))).tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match=r"Tensor on cpu, not ndarray"):
        found.contiguous(np.zeros(3))
    argument = np.zeros(1)
    found.launch("topk/select.cu", ("take",), ("-DX",), argument, 5)
    assert device.started == [("topk/select.cu", ("take",), (*PLAIN, "-DX"), argument, 5, 512, 77)]
    gpu_select.select(found, torch.zeros(1 << 16), "float32", 1 << 16, 100)
    file, names, _, argument, blocks, threads, stream = device.started[1]
    assert (file, list(names), blocks, threads, stream) == ("topk/select.cu", ONCE, 8, 512, 77)
    assert len(device.started) == 2 and argument.nbytes == gpu_select.SELECT.itemsize
