"""What Numba lacks: memory by address, acquire and release, yielding, sleeping on a word.

All addresses are int64. A `store_release` is seen by another process's `load_acquire` of the same
mapped memory after everything the storing process wrote before it (C++11 order; on x86 both are
plain moves, and the compiler keeps their place). `fence` is sequentially consistent. Linux only.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32, _F64 = ir.IntType(64), ir.IntType(32), ir.DoubleType()
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # the system call's number


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _extern(builder: Any, name: str, result: Any, args: list[Any], vararg: bool = False) -> Any:
    kind = ir.FunctionType(result, args, var_arg=vararg)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`; nothing after it is read before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(builder, args[0], _I64), ordering="acquire", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 after everything written before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], _I64)
        builder.store_atomic(args[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def exchange_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store `value` in the int64 at `address` if that is `expected`; whether it was. Ordered both
    ways."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], _I64)
        found = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order earlier stores before later loads, too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`, with no order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], _I64), align=8)

    return types.int64(types.int64), codegen


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """`address` as a pointer to values of the type of `like`, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_data_type(like).as_pointer())

    return types.CPointer(like)(types.int64, like), codegen


_VECTOR = ir.VectorType(ir.FloatType(), 16)  # 64 bytes; LLVM splits it where registers are less
_UNROLL = 4


def _copy(streaming: bool) -> Any:
    """A copy in 64-byte vectors; `streaming` stores go past the caches (64-byte aligned dst)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dst, src, nbytes = args

        def move(at: Any, kind: Any, align: int) -> None:
            value = builder.load(_at(builder, builder.add(src, at), kind), align=1)
            pointer = _at(builder, builder.add(dst, at), kind)
            store = builder.store(value, pointer, align=align)
            if streaming and kind is _VECTOR:
                store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))

        align = 64 if streaming else 1
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
    """Copy between regions that do not overlap; faster here than memcpy's string moves."""
    return types.void(types.int64, types.int64, types.int64), _copy(streaming=False)


@intrinsic
def copy_bytes_nontemporal(typingctx: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Copy past the caches, `dst` 64-byte aligned; `fence` before others may read it."""
    return types.void(types.int64, types.int64, types.int64), _copy(streaming=True)


@intrinsic
def call_combine(
    typingctx: Any,
    function: Any,
    dst: Any,
    table: Any,
    m: Any,
    ahead: Any,
    n: Any,
    divisor: Any,
) -> Any:
    """Call a combine kernel (`kernels.combine`) by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [*[_I64] * 5, _F64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64, types.float64), codegen


@intrinsic
def sched_yield(typingctx: Any) -> Any:
    """Let another process have this core, if one wants it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(_extern(builder, "sched_yield", _I32, []), [])

    return types.int32(), codegen


@intrinsic
def futex_wait(typingctx: Any, address: Any, value: Any, nanoseconds: Any) -> Any:
    """Sleep while the low int32 at `address` equals `value`, `nanoseconds` (< 1 s) at most."""

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
    """Wake whoever sleeps on `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        syscall = _extern(builder, "syscall", _I64, [_I64], vararg=True)
        zero, many = _I64(0), _I64(1 << 30)
        return builder.call(syscall, [_I64(_FUTEX), args[0], _I64(1), many, zero, zero, zero])

    return types.int64(types.int64), codegen
