"""The CPU's arithmetic against the reference's, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from linkweave.collectives import CollectiveError
from linkweave.collectives.runtime import reference
from linkweave.kernels import small_floats
from linkweave.kernels.dtypes import DTYPES, OPS, Dtype, ops_of
from linkweave.kernels.plan.combine import combine_address

LENGTHS = (0, 1, 7, 2047, 2048, 2049, 5003)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
PATTERNS = ("bfloat16", *FLOAT8)  # which NumPy lacks
FLOATS = ("float32", "float64", "float16", *PATTERNS)
CASES = [(d, op) for d in DTYPES for op in ops_of(d)]
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5, ctypes.c_double)


def storage(dtype: str) -> np.dtype:
    return np.dtype(DTYPES[dtype].stored)


def placed(x: np.ndarray, shift: int) -> np.ndarray:
    """A copy that begins `shift` bytes past a 64-byte boundary."""
    raw = np.empty(x.nbytes + 128 + shift, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    y = raw[start : start + x.nbytes].view(x.dtype)
    y[...] = x
    assert y.size == 0 or y.ctypes.data % 64 == shift
    return y


def run(
    dtype: str, op: str, own: np.ndarray, others: list[np.ndarray], divisor: int, ahead: int = 0
) -> np.ndarray:
    """The kernel's result; bytes before and after its own must stay as they were."""
    shift = own.dtype.itemsize
    raw = np.full(own.nbytes + 256, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    dst = raw[start : start + own.nbytes].view(own.dtype)
    dst[...] = own
    shifted = [placed(x, (j + 2) * shift) for j, x in enumerate(others)]
    before = [x.copy() for x in shifted]
    table = np.array([x.ctypes.data for x in shifted], np.int64)
    KERNEL(combine_address(dtype, op))(
        start + raw.ctypes.data, table.ctypes.data, len(others), ahead, own.size, float(divisor)
    )
    assert (raw[:start] == 0xA5).all() and (raw[start + own.nbytes :] == 0xA5).all()
    for a, b in zip(shifted, before, strict=True):
        assert a.tobytes() == b.tobytes(), "an operand was written"
    return dst.copy()


@pytest.mark.parametrize(("dtype", "op"), [c for c in CASES if c[0] in (*FLOATS, "int32", "bool")])
def test_the_own_value_may_stand_anywhere(dtype: str, op: str) -> None:
    """Behind any number of the others; min and max tell zeros of both signs by their order."""
    rng = np.random.default_rng(3)
    zeros = np.array([0.0, -0.0, 2.0, -3.0], np.float32)
    pool = reference.rounded(zeros, dtype) if dtype in PATTERNS else zeros.astype(dtype)
    for m in (1, 2, 3, 4):
        own, *others = (rng.choice(pool, 3001) for _ in range(m + 1))
        results = set()
        for ahead in range(m + 1):
            values = [*others[:ahead], own, *others[ahead:]]
            divisor = m + 1 if op == "avg" else 1
            got = run(dtype, op, own, others, divisor, ahead)
            want = reference.combine(values[0], values[1:], op, divisor, dtype)
            assert_same(got, want, dtype)
            results.add(got.tobytes())
        if op in ("min", "max") and dtype in FLOATS:
            assert len(results) > 1, "the order would not be seen"


def is_nan(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in PATTERNS:
        x = reference.widened(x, dtype)
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


def assert_same(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    nan = is_nan(want, dtype)
    assert (is_nan(got, dtype) == nan).all()
    word = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.flatnonzero((got.view(word) != want.view(word)) & ~nan)
    at = differ[:3]
    assert not differ.size, f"{differ.size} differ, at {at}: {got[at]}, not {want[at]}"


def check(dtype: str, op: str, own: np.ndarray, others: list[np.ndarray]) -> None:
    divisor = len(others) + 1 if op == "avg" else 1
    with np.errstate(all="ignore"):
        want = reference.combine(own, others, op, divisor, dtype)
    assert_same(run(dtype, op, own, others, divisor), want, dtype)


def random_bits(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray:
    """Any pattern at all: infinities, NaNs and subnormals are among them."""
    return rng.integers(0, 256, n * storage(dtype).itemsize, np.uint8).view(storage(dtype))


def tame(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray:
    """Values near one another, so that sums round and do not overflow."""
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(bool)
    if dtype not in FLOATS:
        return random_bits(rng, dtype, n)
    x = rng.standard_normal(n)
    if dtype in PATTERNS:
        return reference.rounded(x.astype(np.float32), dtype)
    return x.astype(dtype)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_every_length_and_number_of_operands(dtype: str, op: str) -> None:
    rng = np.random.default_rng([len(dtype), len(op)])
    for n in LENGTHS:
        for m in (1, 2, 3, 4):
            for make in (tame, random_bits):
                x = [make(rng, dtype, n) for _ in range(m + 1)]
                check(dtype, op, x[0], x[1:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ops_of("float16"))
def test_all_16_bit_patterns(dtype: str, op: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(5)
    neutral = np.zeros_like(every)  # +0
    others = [neutral, every[::-1].copy(), rng.permutation(every)]
    for other in others:
        check(dtype, op, every.view(storage(dtype)), [other.view(storage(dtype))])
    own = every.view(storage(dtype))
    one = np.full_like(every, 0x3C00 if dtype == "float16" else 0x3F80).view(storage(dtype))
    # x * 1 is x in every pattern: nothing is flushed to zero, no sign is lost
    assert_same(run(dtype, "prod", own, [one], 1), own, dtype)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_8_bit_patterns_and_roundings_are_torchs(dtype: str) -> None:
    """The reference and the kernel, beside torch's conversions, which neither uses."""
    of_torch = getattr(torch, dtype)
    every = np.arange(256, dtype=np.uint8)
    wide = torch.from_numpy(every).view(of_torch).float().numpy()
    np.testing.assert_array_equal(reference.widened(every, dtype), wide)
    assert_same(run(dtype, "sum", every, [np.zeros_like(every)], 1), np.where(
        wide == 0, 0, every), dtype)  # fmt: skip
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([upper, upper | 1, upper - 1]).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), *((wide[:-1] + wide[1:]) / 2 * s for s in (1, -1))])
    want = torch.from_numpy(x.copy()).to(of_torch).view(torch.uint8).numpy()
    if dtype == "float8_e4m3fn":  # where torch gives 448, in which a wrong sum would not show
        want = np.where(np.abs(x) > 464, 0x7F, want).astype(np.uint8)
    assert_same(reference.rounded(x, dtype), want, dtype)
    got = np.empty_like(want)
    getattr(small_floats, f"narrow_{dtype}")(x.view(np.uint32).copy(), got)
    assert_same(got, want, dtype)


def test_a_float_without_conversions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patterns would be added as integers."""
    monkeypatch.setitem(DTYPES, "float4", Dtype(1, "float", "uint8", "float4", 1))
    with pytest.raises(NotImplementedError, match="no conversion of float4"):
        combine_address("float4", "sum")
    with pytest.raises(KeyError):
        reference.combine(np.zeros(1, np.uint8), [np.zeros(1, np.uint8)], "sum", 1, "float4")


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 10), ("bfloat16", 7)])
def test_ties_go_to_even(dtype: str, digits: int) -> None:
    half = 2.0 ** -(digits + 1)  # half of 1's last context

    def bits(*values: float) -> np.ndarray:
        x = np.array(values, np.float32)
        if dtype == "bfloat16":
            return reference.to_bfloat16(x)
        return x.astype(np.float16).view(np.uint16)

    a = bits(1.0, 1 + 2 * half, 1.0, -1.0, -1 - 2 * half)
    b = bits(half, half, half * 1.5, -half, -half)
    got = run(dtype, "sum", a.view(storage(dtype)), [b.view(storage(dtype))], 1)
    want = bits(1.0, 1 + 4 * half, 1 + 2 * half, -1.0, -1 - 4 * half)
    assert got.view(np.uint16).tolist() == want.tolist()


def test_known_values() -> None:
    """By hand, so that kernel and reference cannot err alike."""
    i8 = np.array([127, -128, 100], np.int8)
    assert run("int8", "sum", i8, [np.array([1, -1, 100], np.int8)], 1).tolist() == [-128, 127, -56]
    u8 = np.array([255, 2], np.uint8)
    assert run("uint8", "prod", u8, [np.array([2, 200], np.uint8)], 1).tolist() == [254, 144]
    assert run("uint8", "max", u8, [np.array([1, 200], np.uint8)], 1).tolist() == [255, 200]
    big = np.array([2**62], np.int64)
    assert run("int64", "sum", big, [big], 1).tolist() == [-(2**63)]
    a, b = np.array([0b1100, -1], np.int8), np.array([0b1010, 0x55], np.int8)
    for op, want in (("and", [8, 0x55]), ("or", [14, -1]), ("xor", [6, ~0x55])):
        assert run("int8", op, a, [b], 1).tolist() == want
    nan, inf = np.nan, np.inf
    x, y = np.array([nan, 1, inf, -inf], np.float32), np.array([0, nan, 1, 1], np.float32)
    for op, want in (("min", [nan, nan, 1, -inf]), ("max", [nan, nan, inf, 1])):
        np.testing.assert_array_equal(run("float32", op, x, [y], 1), np.array(want, np.float32))
    h = np.array([60000, 2**-24], np.float16)
    got = run("float16", "sum", h, [h], 1)
    assert got.tolist() == [inf, 2**-23]
    assert run("float16", "avg", h, [h], 2).tolist() == [float(h[0]), 2**-24]  # not through inf


BYTES = [[0, 0, 1, 1, 2, 2, 4, 255], [0, 2, 0, 1, 0, 1, 8, 254]]


@pytest.mark.parametrize(
    ("ops", "want"),
    [
        (("sum", "max", "or"), [0, 1, 1, 1, 1, 1, 1, 1]),
        (("prod", "min", "and"), [0, 0, 0, 1, 0, 1, 1, 1]),
        (("xor",), [0, 1, 1, 0, 1, 0, 0, 0]),
    ],
)
def test_any_byte_but_0_is_true(ops: tuple[str, ...], want: list[int]) -> None:
    a, b = (np.array(x, np.uint8).view(np.bool_) for x in BYTES)
    for op in ops:
        for got in (run("bool", op, a, [b], 1), reference.combine(a, [b], op)):
            assert got.view(np.uint8).tolist() == want, op


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_refuses_an_op_that_the_dtype_does_not_take(dtype: str) -> None:
    x = np.zeros(2, storage(dtype))
    for op in OPS:
        if (dtype, op) not in CASES:
            with pytest.raises(CollectiveError, match=f"{op} is not defined for {dtype}; choose"):
                reference.combine(x, [x], op, 2, dtype)
