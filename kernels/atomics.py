"""Numba intrinsics: memory access by address, acquire and release, fma, futexes, and memory of
other processes. Linux only.

Addresses are int64. If a `load_acquire` sees the value of a `store_release`, by any process that
maps the memory, it also sees everything written before the store (C++11 memory order; on x86 both
are plain moves that the compiler does not reorder). `fence` is sequentially consistent.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32, _F64 = ir.IntType(64), ir.IntType(32), ir.DoubleType()
_FUTEX, _READV = {"x86_64": (202, 310), "aarch64": (98, 270)}.get(platform.machine(), (0, 0))
"""Numbers of system calls."""


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _extern(builder: Any, name: str, result: Any, args: list[Any], vararg: bool = False) -> Any:
    kind = ir.FunctionType(result, args, var_arg=vararg)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """Load the int64 at `address` with acquire."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(builder, args[0], _I64), ordering="acquire", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64 with release."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], _I64)
        builder.store_atomic(args[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def exchange_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap the int64 at `address` (sequentially consistent); returns whether it was
    `expected`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], _I64)
        found = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """A sequentially consistent fence."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """Load the int64 at `address` without ordering."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], _I64), align=8)

    return types.int64(types.int64), codegen


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """`address` as a pointer to the type of `like`, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_data_type(like).as_pointer())

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once; all are floats of one type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return x(x, x, x), codegen


_VECTOR = ir.VectorType(ir.FloatType(), 16)  # 64 bytes; LLVM splits it for smaller registers
_UNROLL = 4


def _copy(nontemporal: bool) -> Any:
    """A copy in 64-byte vectors; non-temporal stores need a 64-byte aligned destination."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dst, src, nbytes = args

        def move(at: Any, kind: Any, align: int) -> None:
            value = builder.load(_at(builder, builder.add(src, at), kind), align=1)
            pointer = _at(builder, builder.add(dst, at), kind)
            store = builder.store(value, pointer, align=align)
            if nontemporal and kind is _VECTOR:
                store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))

        align = 64 if nontemporal else 1
        wide = builder.and_(nbytes, _I64(-64 * _UNROLL))
        with cgutils.for_range_slice(builder, _I64(0), wide, _I64(64 * _UNROLL)) as (i, _):
            for u in range(_UNROLL):
                move(builder.add(i, _I64(64 * u)), _VECTOR, align)
        with cgutils.for_range_slice(builder, wide, nbytes, _I64(1)) as (i, _):
            move(i, ir.IntType(8), 1)
        return context.get_dummy_value()

    return codegen


@intrinsic
def copy_bytes(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Copy between regions that do not overlap. For chunks it is faster than memcpy."""
    return types.void(types.int64, types.int64, types.int64), _copy(nontemporal=False)


@intrinsic
def copy_bytes_nontemporal(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """`copy_bytes` with stores that bypass the caches; `dst` is aligned to 64 bytes.

    Call `fence` before other processes may read the data.
    """
    return types.void(types.int64, types.int64, types.int64), _copy(nontemporal=True)


@intrinsic
def call_combine(
    typingctx: Any, function: Any, dst: Any, table: Any, m: Any, ahead: Any, n: Any, divisor: Any
) -> Any:
    """Call a function of `kernels.plan.combine` by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [*[_I64] * 5, _F64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64, types.float64), codegen


@intrinsic
def sched_yield(typingctx: Any) -> Any:
    """Yield this core to another runnable process."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(_extern(builder, "sched_yield", _I32, []), [])

    return types.int32(), codegen


@intrinsic
def futex_wait(typingctx: Any, address: Any, value: Any, nanoseconds: Any) -> Any:
    """Sleep while the low int32 at `address` equals `value`, for at most `nanoseconds` (< 1 s)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        zero = _I64(0)
        builder.store(zero, builder.gep(spec, [zero, zero]))
        builder.store(args[2], builder.gep(spec, [zero, _I64(1)]))
        syscall = _extern(builder, "syscall", _I64, [_I64], vararg=True)
        timeout = builder.ptrtoint(spec, _I64)
        wait = [_I64(_FUTEX), args[0], _I64(0), args[1], timeout, zero, zero]  # FUTEX_WAIT
        return builder.call(syscall, wait)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def futex_wake(typingctx: Any, address: Any) -> Any:
    """Wake all that sleep on `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        syscall = _extern(builder, "syscall", _I64, [_I64], vararg=True)
        zero, many = _I64(0), _I64(1 << 30)
        return builder.call(syscall, [_I64(_FUTEX), args[0], _I64(1), many, zero, zero, zero])

    return types.int64(types.int64), codegen


@intrinsic
def read_process(typingctx: Any, pid: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Copy from address `src` of another process of this user, by `process_vm_readv`; returns how
    many bytes were copied, or -1 if that is not permitted or no memory is there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pid, dst, src, nbytes = args
        vectors = cgutils.alloca_once(builder, ir.ArrayType(_I64, 4))
        zero, one = _I64(0), _I64(1)
        for i, word in enumerate((dst, nbytes, src, nbytes)):
            builder.store(word, builder.gep(vectors, [zero, _I64(i)]))
        local, remote = (
            builder.ptrtoint(builder.gep(vectors, [zero, _I64(i)]), _I64) for i in (0, 2)
        )
        syscall = _extern(builder, "syscall", _I64, [_I64], vararg=True)
        return builder.call(syscall, [_I64(_READV), pid, local, one, remote, one, zero])

    i64 = types.int64
    return i64(i64, i64, i64, i64), codegen
