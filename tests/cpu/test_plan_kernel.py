"""The CUDA plan interpreter, run on the host by threads, against the reference, bit for bit."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from host_gpu import BROKEN, HostGpu, build, needs_compiler

from linkweave.collectives import PlanError, plan_allreduce, plan_collective
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.collectives.planning.dataflow import finals, passed_on
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.verify import races, verify
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.gpu import launch_tables as tables
from linkweave.collectives.runtime.gpu.launch_tables import LaunchConfig, State, fit
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.topology import load
from tests.null.helpers import by_hand, hop, random_plan, receive, send, step

pytestmark = needs_compiler

PATTERNS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # which NumPy lacks
LINES = LaunchConfig(1, 16 << 10, True)
ALGORITHMS = [
    ("dgx1-v100", name)
    for name in ("ring", "chain", "tree", "double_tree", "overlapped_tree", "packed_trees",
                 "overlapped_double_tree", "ccube_dgx1")
] + [("dgx1-p100", "overlapped_double_tree")] + [
    ("mesh-8", name) for name in ("one_shot", "two_shot", "recursive_doubling", "halving_doubling")
]  # fmt: skip


def plain(width: int, chunk: int = 4096) -> LaunchConfig:
    """Slots for chunks of so many bytes, small enough that a short message takes many chunks."""
    return LaunchConfig(width, -(-chunk // (16 * width)) * 16, False)


def values(plan: Plan, nbytes: int, dtype: str = "float32", seed: int = 0) -> list[np.ndarray]:
    """A buffer for each rank, in which sums round differently in every order."""
    made = []
    factor = 2 if plan.collective == "alltoall" else 1
    for rank in range(plan.size):
        rng = np.random.default_rng([rank, nbytes, seed])
        kind = np.dtype("float32" if dtype in PATTERNS else dtype)
        n = factor * nbytes // DTYPES[dtype].size
        if kind.kind == "f":
            x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(kind)
        elif kind.kind == "b":
            x = rng.integers(0, 2, n).astype(kind)
        else:
            info = np.iinfo(kind)
            x = rng.integers(info.min, info.max, n, kind, endpoint=True)
        made.append(reference.rounded(x, dtype) if dtype in PATTERNS else x)
    if plan.collective == "alltoall":  # the block to itself lies there from the start
        block = made[0].size // 2 // plan.size
        for rank, x in enumerate(made):
            start = rank * block
            x[x.size // 2 + start :][:block] = x[start : start + block]
    return made


def same(a: np.ndarray, b: np.ndarray, dtype: str) -> bool:
    """Bit for bit, but any NaN is as good as another."""
    if dtype in PATTERNS:
        a, b = reference.widened(a, dtype), reference.widened(b, dtype)
    return a.tobytes() == b.tobytes() or bool(
        np.array_equal(a, b, equal_nan=True) and (np.signbit(a) == np.signbit(b))[a == a].all()
    )


def check(
    plan: Plan, shape: LaunchConfig, sizes: list[int], dtype: str = "float32", op: str = "sum",
    sanitizer: str = "", start: int = 0, threads: int = 2, skew: int = 0,
    apart: tuple[bool, ...] = (False,), direct: tuple[bool, ...] = (False,), fuse: bool = True,
) -> None:  # fmt: skip
    """Messages of several sizes, one after another over the same memory; out of context and pushing
    into buffers where that call's turn of `apart` and `direct` says so."""
    gpu = HostGpu(plan, shape, threads, start, fuse=fuse)
    calls = []
    for seed, nbytes in enumerate(sizes):
        chunks = plan
        most = shape.stripe * shape.width
        while chunks.chunk_bytes(nbytes) > most:
            chunks = chunks.with_chunks(chunks.num_chunks + plan.stride)
        inputs = values(plan, nbytes, dtype, seed)
        how = {"apart": apart[seed % len(apart)], "direct": direct[seed % len(direct)]}
        segments = gpu.call(inputs, op, dtype, nbytes, chunks, skew, **how)
        calls.append((segments, reference.run(chunks, inputs, op, dtype=dtype)))
    everything = dtype != "float32" or op not in ("sum", "avg")
    done = gpu.image.run(build(sanitizer, everything))
    assert isinstance(done, list), done.stderr[-4000:]
    for segments, expected in calls:
        for segment, want in zip(segments, expected, strict=True):
            assert same(done[segment][skew:].view(want.dtype), want, dtype)
    assert {row[0] for row in gpu.reports(done).values()} <= {State.NOTHING, State.DONE}
    for segment, given in gpu.given:
        assert (done[segment][skew:] == given).all()


def test_layouts_and_numbers_are_those_of_the_device() -> None:
    told = subprocess.run(
        [build(), "--layout"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = {"End": tables.END, "Cursor": tables.CURSOR, "Track": tables.TRACK,
             "Launch": tables.LAUNCH, "Check": tables.CHECK}  # fmt: skip
    mine = [
        f"{name} {field} {dtype.fields[field][1]} {dtype.fields[field][0].itemsize}"
        for name, dtype in names.items()
        for field in dtype.names or ()
    ]
    mine += [f"sizeof {name} {dtype.itemsize}" for name, dtype in names.items()]
    words = (tables.LENGTH, tables.CHUNK, tables.FLAGS, tables.NUM_WAITS, tables.NUM_OPERANDS,
             tables.NUM_OUTPUTS, tables.NUM_SIGNALS, tables.HEADER)  # fmt: skip
    mine += ["Field " + " ".join(map(str, words))]
    mine += ["State " + " ".join(str(state.value) for state in State)]
    limits = (tables.MAX_RANKS, tables.MAX_PEERS, tables.LINE, tables.REPORT)
    flags = (tables.OWN, tables.INPUT, tables.SENDER, tables.DATA, tables.AVERAGES,
             tables.COMPLETES, tables.PUSHED, tables.PUSHES, tables.KEEPS)  # fmt: skip
    mine += ["limits " + " ".join(map(str, limits)), "flags " + " ".join(map(str, flags))]
    assert told == mine


@pytest.mark.parametrize(("machine", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("shape", [LINES, plain(1), plain(2)], ids=["lines", "1-block", "2-width"])
def test_all_reduces(machine: str, algorithm: str, shape: LaunchConfig) -> None:
    """In place and not, pushing into buffers and not, in turns over the same slots and counters."""
    plan = plan_allreduce(load(machine), 40_000, algorithm)
    assert not races(plan, pushing=True)
    direct = (False,) if shape.low_latency else (True, False, True)
    sizes = [4 * 5003, 4, 0, 4 * 1009, 4 * 337, 4 * 5003]
    check(plan, shape, sizes, op="avg", apart=(False, True), direct=direct)


def test_a_copy_that_is_passed_on_and_overwritten_is_not_stored() -> None:
    """Over lines nothing would order that store and the one by the other track."""
    connections = [hop(1, 0, 2), hop(0, 0, 1, 1), hop(1, 1, 2), hop(2, 0, 0), hop(2, 0, 1, 2),
                   hop(1, 0, 1, 1)]  # fmt: skip
    total = [step(Op.WAIT, 0), step(Op.WAIT, 2), step(Op.REDUCE, 0, 2, last=True)]
    total += [step(Op.SIGNAL, 0), step(Op.SIGNAL, 2), step(Op.WAIT, 3), step(Op.WAIT, 4)]
    total += [step(Op.SEND, 3, 4), step(Op.SIGNAL, 3), step(Op.SIGNAL, 4)]
    plan = by_hand(connections, {
        (0, 0): [[*send(1), *receive(Op.COPY, 3)]], (1, 0): [[*send(0), step(Op.SIGNAL, 5)]],
        (1, 1): [[step(Op.WAIT, 5), *receive(Op.COPY, 1), *send(2)]],
        (1, 2): [receive(Op.COPY, 4)], (2, 0): [total],
    })  # fmt: skip
    verify(plan, load("mesh-3"))
    assert False in passed_on(plan).values()
    check(plan, LINES, [4 * 16], sanitizer="thread")


@pytest.mark.parametrize("sanitizer", ["", "thread"])
@pytest.mark.parametrize("shape", [LINES, plain(2, 512)], ids=["lines", "slots"])
def test_results_that_are_not_passed_on_in_the_step_that_makes_them(
    shape: LaunchConfig, sanitizer: str
) -> None:
    plan = plan_allreduce(load("dgx1-v100"), 40_000, "ccube_dgx1")
    direct = (False, not shape.low_latency)
    check(plan, shape, [4 * 1009, 4], sanitizer=sanitizer, direct=direct, fuse=False)


def test_what_is_pushed_passes_no_slot() -> None:
    plan, shape = plan_allreduce(load("mesh-5"), 40_000, "double_tree"), plain(2)
    gpu = HostGpu(plan, shape)
    gpu.call(values(plan, 4000), direct=True)
    done, layout = gpu.image.run(build()), tables.lay_out(plan, shape)
    copies = {i for s in plan.tracks for body in s.phases for step in body
              if step.op is Op.COPY for i in step.connections}  # fmt: skip
    assert len(copies) == 8  # of two trees with four edges each
    for i, c in enumerate(plan.connections):
        if not c.local:
            at, size = layout.slot[i], plan.slots * shape.width * shape.stripe
            ring = done[gpu.memory[c.dst]][at : at + size]
            assert ring.any() == (i not in copies)


def test_nothing_is_pushed_by_a_launch_after_an_abort() -> None:
    """The tensors may be in other use by then, and counters of the call may be there."""
    plan = plan_allreduce(load("mesh-3"), 4000, "chain")
    gpu = HostGpu(plan, plain(2))
    gpu.image.segments[(gpu.stop >> 40) - 1][:] = 1
    given = values(plan, 4000)
    segments = gpu.call(given, direct=True)
    done = gpu.image.run(build())
    for segment, want in zip(segments, given, strict=True):
        assert done[segment].tobytes() == want.tobytes()
    assert {row[0] for row in gpu.reports(done).values()} == {State.NOTHING}


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_that_push_where_that_is_no_race(seed: int) -> None:
    plan = random_plan(seed)[0]
    check(plan, plain(2, 512), [4 * 1009, 4], direct=(not races(plan, pushing=True),))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("collective", PUBLIC)
@pytest.mark.parametrize("shape", [LINES, plain(2, 512)], ids=["lines", "2-width"])
def test_every_collective_on_any_number_of_ranks(
    size: int, collective: str, shape: LaunchConfig
) -> None:
    plan = plan_collective(collective, load(f"mesh-{size}"), 1000 * size, size // 2)
    check(plan, shape, [4 * size * n for n in (1, 337, 16)])


@pytest.mark.parametrize("machine", ["mesh-2", "mesh-5", "ring-7", "dgx1-v100"])
@pytest.mark.parametrize("shape", [LINES, plain(2, 512)], ids=["lines", "2-width"])
def test_sendrecv(machine: str, shape: LaunchConfig) -> None:
    topology = load(machine)
    size = len(topology.gpus)
    for pairs in (
        tuple((r + 1, r) for r in range(0, size - 1, 2)),
        tuple((r, size // 2 + r) for r in range(size // 2)),
    ):
        check(plan_collective("sendrecv", topology, 4000, pairs), shape, [4, 4 * 1009, 16])


@pytest.mark.parametrize(
    ("number", "dtype", "op"), [(i, d, op) for d in DTYPES for i, op in enumerate(ops_of(d))]
)
@pytest.mark.parametrize("shape", [LINES, plain(1)], ids=["lines", "slots"])
def test_dtypes_and_ops(number: int, dtype: str, op: str, shape: LaunchConfig) -> None:
    """Aligned and not, by turns: each protocol with either."""
    plan = plan_allreduce(load("mesh-3"), 3000, "overlapped_tree")
    item = DTYPES[dtype].size
    skew = item if (number + shape.low_latency) % 2 else 0
    check(plan, shape, [item * 331, item], dtype, op, skew=skew)


@pytest.mark.parametrize("op", ["min", "max", "sum"])
@pytest.mark.parametrize("dtype", ["float16", *PATTERNS, "float32", "float64"])
def test_special_values(op: str, dtype: str) -> None:
    """NaN, infinities, subnormals and zeros of both signs, each with each."""
    plan = plan_allreduce(load("mesh-2"), 400, "one_shot")
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 65504.0, 2**-24, 3 * 2**-16, -1e-45]
    first, second = np.meshgrid(special, special)
    kind = np.float32 if dtype in PATTERNS else np.dtype(dtype)
    with np.errstate(over="ignore"):
        inputs = [x.astype(kind).ravel() for x in (first, second)]
    if dtype in PATTERNS:
        inputs = [reference.rounded(x, dtype) for x in inputs]
    gpu = HostGpu(plan, LINES)
    segments = gpu.call(inputs, op, dtype)
    done = gpu.image.run(build(everything=True))
    for segment, want in zip(segments, reference.run(plan, inputs, op, dtype=dtype), strict=True):
        assert same(done[segment].view(want.dtype), want, dtype)


@pytest.mark.parametrize("shape", [LINES, plain(2, 256)], ids=["lines", "slots"])
@pytest.mark.parametrize("start", [2**32 - 3, 2**31 - 3, 2**30 - 3])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_counters_wrap(shape: LaunchConfig, start: int, slots: int) -> None:
    plan = replace(plan_allreduce(load("mesh-3"), 4000, "overlapped_tree"), slots=slots)
    check(plan, shape, [4000, 12, 4000, 400, 4000], start=start)


@pytest.mark.parametrize("shape", [LINES, plain(2)], ids=["lines", "slots"])
def test_programs_too_long_for_shared_memory(shape: LaunchConfig) -> None:
    """They are read, and their cursors kept, where they lie."""
    small = (
        ("plan/launch.h", "CODE_WORDS = 1024", "CODE_WORDS = 1"),
        ("plan/launch.h", "MAX_ENDS = 128", "MAX_ENDS = 1"),
    )
    plan = plan_allreduce(load("mesh-4"), 4000, "one_shot")
    gpu = HostGpu(plan, shape)
    inputs = values(plan, 4000)
    calls = [gpu.call(inputs) for _ in range(4)]
    done = gpu.image.run(build("thread", changes=small))
    assert isinstance(done, list), done.stderr[-4000:]
    for segments in calls:
        for segment, want in zip(segments, reference.run(plan, inputs), strict=True):
            assert same(done[segment].view(want.dtype), want, "float32")


def test_more_peers_or_ranks_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"65 ranks in one launch; at most 64"):
        tables.launch(plan_allreduce(load("mesh-2"), 4), LINES, 0, 0, 0, [(0, 0)] * 65, 1.0, False)
    plan = plan_allreduce(load("mesh-2"), 4, "one_shot")
    wide = replace(plan.tracks[0].phases[0][1], connections=(0,) * 65)
    track = replace(plan.tracks[0], phases=((wide,),))
    with pytest.raises(PlanError, match=r"rank 0 has a SEND with 65 peers; .* at most 64"):
        tables.programs(replace(plan, tracks=(track,)), 0)


def test_a_stale_flag_is_gone_before_its_number_comes_again() -> None:
    """Every line of a slot is written anew as the count passes a multiple of 2^30."""
    plan = plan_allreduce(load("mesh-2"), 8, "tree")
    gpu = HostGpu(plan, LINES, start=2**30 - 1)
    gpu.call(values(plan, 8))
    done = gpu.image.run(build())
    layout = tables.lay_out(plan, LINES)
    for rank in range(2):
        (at,) = [layout.slot[i] for i, c in enumerate(plan.connections) if c.dst == rank]
        flags = done[gpu.memory[rank]][at : at + 2 * LINES.stripe].view(np.uint32)[1::2]
        assert (flags == 2**30).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", [LINES, plain(2, 512)], ids=["lines", "slots"])
def test_random_plans(seed: int, shape: LaunchConfig) -> None:
    plan = random_plan(seed)[0]
    check(plan, shape, [4 * 1009, 4], threads=3)


SANITIZED = [  # each with steps, or an order of them, that none of the others has
    ("thread", "dgx1-v100", "ring"), ("thread", "mesh-5", "packed_trees"),
    ("thread", "dgx1-v100", "double_tree"), ("thread", "dgx1-v100", "overlapped_double_tree"),
    ("thread", "dgx1-v100", "ccube_dgx1"), ("thread", "mesh-8", "one_shot"),
    ("thread", "mesh-5", "two_shot"), ("thread", "mesh-4", "halving_doubling"),
    ("thread", "mesh-4", "recursive_doubling"),
    ("address,undefined", "dgx1-v100", "ring"), ("address,undefined", "dgx1-v100", "ccube_dgx1"),
    ("address,undefined", "mesh-8", "one_shot"), ("address,undefined", "mesh-5", "two_shot"),
    ("address,undefined", "mesh-4", "recursive_doubling"),
]  # fmt: skip


@pytest.mark.parametrize(("sanitizer", "machine", "algorithm"), SANITIZED)
@pytest.mark.parametrize("shape", [LINES, plain(2, 512)], ids=["lines", "slots"])
def test_sanitizers_find_nothing(
    sanitizer: str, machine: str, algorithm: str, shape: LaunchConfig
) -> None:
    """In and out of context, pushing and not, in turns."""
    plan = plan_allreduce(load(machine), 4000, algorithm)
    how = {"apart": (False, True), "direct": (False,) if shape.low_latency else (True, False, True)}
    check(plan, shape, [4 * 1009, 4, 4 * 1009], op="avg", sanitizer=sanitizer, **how)


@pytest.mark.parametrize("collective", PUBLIC)
def test_sanitizers_find_nothing_in_other_collectives(collective: str) -> None:
    plan = plan_collective(collective, load("mesh-3"), 6000, 1)
    for sanitizer in ("thread", "address,undefined"):
        check(plan, plain(1, 256), [3 * 4 * 337, 12], sanitizer=sanitizer)


def test_sanitizers_find_nothing_in_pairs_of_ranks_with_one_between() -> None:
    plan = plan_collective("sendrecv", load("ring-4"), 6000, ((2, 0), (1, 3)))
    assert plan.detours
    for sanitizer in ("thread", "address,undefined"):
        check(plan, plain(1, 256), [4 * 337, 4], sanitizer=sanitizer)


@pytest.mark.parametrize("sanitizer", ["", "thread", "address"])
@pytest.mark.parametrize("nbytes", [400, 200_000])
def test_lanes_count_the_chunks_that_they_make_final(nbytes: int, sanitizer: str) -> None:
    plan = plan_allreduce(load("mesh-4"), nbytes, "overlapped_double_tree", 6)
    plan, shape = fit(plan, nbytes, 2)
    gpu = HostGpu(plan, shape)
    words = gpu.image.add(np.zeros(len(gpu.programs) * shape.width, np.uint32))
    gpu.call([np.zeros(nbytes // 4, np.float32)] * 4, finals=words)
    segments = gpu.image.run(build(sanitizer))
    counted = segments[(words >> 40) - 1].view(np.uint32).reshape(-1, shape.width)
    wanted = [len(chunks) for rank in range(4) for chunks in finals(plan, rank)]
    assert (counted == np.array(wanted)[:, None]).all()


MUTANTS = {
    "release of data": (
        "plan/interpret.h", "st_release_sys((u32*)(end.ready", "st_relaxed_sys((u32*)(end.ready",
    ),
    "release of a slot": (
        "plan/interpret.h", "st_release_sys((u32*)(end.free", "st_relaxed_sys((u32*)(end.free",
    ),
    "wait for data": (
        "plan/interpret.h", "if (!await(end.ready + mine, count,", "if (0 && !await(end.ready, 0,",
    ),
    "wait for a slot": (
        "plan/interpret.h", "if (!await(end.free + mine, count - l.slots,",
        "if (0 && !await(end.free, 0,",
    ),
    "one slot too many": ("plan/interpret.h", "count - l.slots,", "count - l.slots - 1,"),
    "barrier behind the waits": (
        "plan/plan.cu", "if (__syncthreads_or(!good)) return false;\n                if (l.low",
        "if (l.low",
    ),
    "barrier behind the data": (
        "plan/plan.cu", "if (__syncthreads_or(!good)) return false;\n                good = signal",
        "good = signal",
    ),
    "slots that turn early": (
        "plan/interpret.h", "at.slot + 1 == l.slots", "at.slot + 2 >= l.slots",
    ),
    "flag of a line": (
        "plan/move.h", "any |= missing[b];", "any |= 0 & missing[b];",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "how"), [
    *((what, "slots") for what in MUTANTS if what != "flag of a line"),
    *((what, "pushes") for what in ("release of data", "wait for data", "barrier behind the data")),
    ("flag of a line", "lines"),
])  # fmt: skip
def test_a_mutant_is_caught_by_the_thread_sanitizer(what: str, how: str) -> None:
    """Most give right results here: only the order that they lack is seen, if not every time."""
    plan = plan_allreduce(
        load("mesh-3"), 8000, "chain" if how == "pushes" else "overlapped_tree", 8
    )
    shape = LINES if how == "lines" else plain(1, 1024)
    assert_race(replace(plan, slots=3), shape, how == "pushes", (MUTANTS[what],))


def test_a_partial_sum_that_is_overwritten_is_released_before_its_lines() -> None:
    """Unless it is passed on in the step that makes it."""
    plan = replace(plan_allreduce(load("mesh-3"), 8000, "chain", 8), slots=3)
    assert_race(plan, LINES, changes=(MUTANTS["release of a slot"],), fuse=False)


def test_a_result_stored_that_is_overwritten_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "passed_on", lambda plan: dict.fromkeys(passed_on(plan), True))
    plan = plan_allreduce(load("mesh-3"), 8000, "overlapped_tree", 8)
    assert_race(replace(plan, slots=3), LINES)


def assert_race(
    plan: Plan, shape: LaunchConfig, direct: bool = False,
    changes: tuple[tuple[str, str, str], ...] = (), fuse: bool = True,
) -> None:  # fmt: skip
    gpu = HostGpu(plan, shape, threads=2, fuse=fuse)
    for _ in range(3):
        gpu.call(values(plan, 8000), direct=direct)
    driver = build("thread", changes=changes)
    tries = (gpu.image.run(driver) for _ in range(30))
    done = next((done for done in tries if not isinstance(done, list)), None)
    assert done is not None, "nothing was reported"
    # without a barrier a thread may use addresses that are not there yet
    assert done.returncode == BROKEN and re.search("data race|SEGV", done.stderr)


@pytest.mark.parametrize(
    "change",
    [
        ("gpu/element.h",
         "if (have >= BYTES && !(u64(p) & (BYTES - 1))) return load_word",
         "if (!(u64(p) & (BYTES - 1))) return load_word"),
        ("plan/interpret.h", "size - start < slice ? size - start : slice", "slice"),
    ],
    ids=["load of a whole pack", "slice beyond the chunk"],
)  # fmt: skip
def test_a_step_beyond_the_buffer_is_caught_by_the_address_sanitizer(
    change: tuple[str, str, str],
) -> None:
    plan = plan_allreduce(load("mesh-2"), 4036, "tree", 1)
    gpu = HostGpu(plan, plain(2))
    gpu.call(values(plan, 4036))
    done = gpu.image.run(build("address", changes=(change,)))
    assert not isinstance(done, list) and done.returncode == BROKEN
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("shape", [LINES, plain(2)], ids=["lines", "slots"])
def test_a_rank_whose_peers_do_not_come_gives_up_and_says_where(shape: LaunchConfig) -> None:
    plan = plan_allreduce(load("mesh-3"), 4000, "chain", 1)
    gpu = HostGpu(plan, shape, timeout=0.2)
    gpu.call(values(plan, 4000), only=1)
    done = gpu.image.run(build(), timeout=280)
    reports = gpu.reports(done)
    mine = {key: row for key, row in reports.items() if key[0] == 1}
    assert State.TIMED_OUT in {row[0] for row in mine.values()}
    assert {row[0] for row in mine.values()} <= {State.TIMED_OUT, State.ABORTED}
    assert {row[0] for key, row in reports.items() if key[0] != 1} == {State.NOTHING}
    assert done[0].view(np.uint32)[0] == 1
    for program_, (rank, _) in zip(gpu.programs, gpu.groups, strict=True):
        for (r, channel, _), (_, _, _, pc) in mine.items():
            if (rank, program_.track.channel) == (r, channel):
                wait = program_.waits[pc]
                (step,) = [step for at, _, step in plan.steps(program_.track) if at == wait.step]
                assert (step.op is Op.WAIT) != shape.low_latency
                assert wait.connection in step.connections


def test_a_forwarder_that_gives_up_passes_nothing_on() -> None:
    """Rank 0 forwards between ranks 2 and 4 on the paper's trees; nobody else comes."""
    plan = plan_allreduce(load("dgx1-v100"), 4000, "ccube_dgx1", 2)
    gpu = HostGpu(plan, LINES, timeout=0.2)
    gpu.call([np.zeros_like(x) for x in values(plan, 4000)], only=0)
    done = gpu.image.run(build(), timeout=280)
    layout = tables.lay_out(plan, LINES)
    forwarded = {out for s in plan.tracks if s.rank == 0 for body in s.phases for step in body
                 if step.source is not None for out in step.connections}  # fmt: skip
    assert forwarded
    for i in forwarded:
        at = layout.slot[i]
        memory = done[gpu.memory[plan.connections[i].dst]]
        assert not memory[at : at + 2 * LINES.stripe * plan.slots].any()


@pytest.mark.parametrize("word", ["stop", "abort"])
@pytest.mark.parametrize("shape", [LINES, plain(2)], ids=["lines", "slots"])
def test_either_word_frees_every_rank(shape: LaunchConfig, word: str) -> None:
    plan = plan_allreduce(load("mesh-3"), 4000, "chain", 1)
    gpu = HostGpu(plan, shape, timeout=1000)
    gpu.call(values(plan, 4000), only=2)
    done = gpu.image.run(build(), timeout=280, abort=getattr(gpu, word))
    states = {row[0] for key, row in gpu.reports(done).items() if key[0] == 2}
    assert done[(gpu.stop >> 40) - 1].any()
    assert State.ABORTED in states and states <= {State.ABORTED, State.NOTHING, State.DONE}


@pytest.mark.parametrize(("shape", "direct"), [
    (LINES, False), (plain(2), False), (plain(2), True),
], ids=["lines", "slots", "pushes"])  # fmt: skip
def test_an_emulated_link_takes_its_time(shape: LaunchConfig, direct: bool) -> None:
    """4,096 bytes at 25 us a byte over four hops, one after the other; the inner ones send on what
    they make, and what they get."""
    plan, driver = plan_allreduce(load("mesh-3"), 4096, "chain", 1), build()
    assert passed_on(plan)

    def seconds(ps_per_byte: int) -> float:
        gpu = HostGpu(plan, shape)
        gpu.call(values(plan, 4096), ps_per_byte=ps_per_byte, direct=direct)
        assert isinstance(gpu.image.run(driver), list)
        return gpu.image.seconds

    assert seconds(25_000_000) >= 4 * 4096 * 25e-6
    assert any(seconds(0) < 4 * 4096 * 25e-6 for _ in range(20))  # some on a busy machine as well


@pytest.mark.parametrize("shape", [LINES, plain(1)], ids=["lines", "slots"])
def test_a_connection_that_is_awaited_or_signalled_twice_in_a_row(shape: LaunchConfig) -> None:
    """Two threads must not count for it at the same time."""

    def twice(op: Op, i: int, **how: bool) -> list[Step]:
        return [Step(op, (i,), chunk, **how) for chunk in (0, 1)]

    up = [*twice(Op.WAIT, 0), *twice(Op.REDUCE, 0, last=True), *twice(Op.SIGNAL, 0)]
    down = [*twice(Op.WAIT, 1), *twice(Op.COPY, 1), *twice(Op.SIGNAL, 1)]
    sends = [[*twice(Op.WAIT, i), *twice(Op.SEND, i), *twice(Op.SIGNAL, i)] for i in (0, 1)]
    plan = by_hand(
        [hop(1, 0, 0), hop(0, 0, 1)], {(0, 0): [up + sends[1]], (1, 0): [sends[0] + down]},
        num_chunks=6, stride=2,
    )  # fmt: skip
    verify(plan, load("mesh-2"))
    for track in plan.tracks:
        for action in tables.actions(plan, track, 0):
            for run in (action.waits, action.signals):
                assert len({step.connections for _, step in run}) == len(run)
    check(plan, shape, [4 * 1009, 4], sanitizer="thread")


def test_lines_need_each_wait_for_data_just_before_its_step() -> None:
    plan = plan_allreduce(load("mesh-2"), 4000, "one_shot")
    assert fit(plan, 4000, 2)[1].low_latency
    track = plan.tracks[-1]
    body = track.phases[0]
    wait = next(i for i, s in enumerate(body) if s.op is Op.WAIT
                and not plan.sends_on(track, s.connections[0]))  # fmt: skip
    early = (body[wait], *body[:wait], *body[wait + 1 :])
    tracks = (*plan.tracks[:-1], replace(track, phases=(early,)))
    assert not fit(replace(plan, tracks=tracks), 4000, 2)[1].low_latency


def test_less_than_a_group_of_chunks_is_not_divided() -> None:
    plan = plan_allreduce(load("mesh-3"), 4000, "two_shot").with_chunks(1)
    with pytest.raises(PlanError, match=r"two_shot: 1 chunks of 4194304 bytes"):
        fit(plan, 4 << 20, 1)


@pytest.mark.parametrize("collective", PUBLIC)
@pytest.mark.parametrize("nbytes", [0, 4, 8 << 10, 1 << 20, 1 << 26, (1 << 30) + 48])
def test_chunks_fit_their_slots(collective: str, nbytes: int) -> None:
    plan = plan_collective(collective, load("mesh-6"), nbytes // 24 * 24)
    fitted, shape = fit(plan, nbytes // 24 * 24, 3)
    sizes = fitted.chunk_sizes(nbytes // 24 * 24)
    assert sizes.max() <= shape.stripe * shape.width
    assert shape.stripe % 16 == 0 and fitted.num_chunks % fitted.stride == 0
    assert shape.low_latency == (nbytes <= 8 << 10)
