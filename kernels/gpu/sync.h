// Signals between GPUs, and time: what every kernel here uses and no kernel goes around.
//
// All by release store and acquire load at system scope, so that the other end may be a block of
// the same GPU, another GPU or the host. Never fence + relaxed: the thread sanitizer, which runs
// the same source on the host, models the former only. A host build defines HOST_SHIM and its own
// versions of these functions before this header.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HOST_SHIM
#define SHARED(T, name) __shared__ T name

__device__ __forceinline__ u32 ld_acquire_sys(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void st_release_sys(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// A line carries 4 bytes of data and 4 of flag in one 8-byte word, which is read and written whole
// (PTX: single-copy atomic): whoever sees the flag has the data, with no order among lines needed.
__device__ __forceinline__ u64 ld_line(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void st_line(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

__device__ __forceinline__ void spin_pause() { __nanosleep(20); }

// A word in shared memory that any thread of the block may raise and all read behind a barrier.
__device__ __forceinline__ void raise(u32* p) { *(volatile u32*)p = 1; }

// Counts that any block may add to; read by a later launch.
__device__ __forceinline__ u32 count_up(u32* p, u32 v) { return atomicAdd(p, v); }
__device__ __forceinline__ u64 count_up(u64* p, u64 v) { return atomicAdd(p, v); }
__device__ __forceinline__ void count_down_to(u64* p, u64 v) { atomicMin(p, v); }

// Bit i of a bitmap, from all threads of a warp at once, each with its own i, one after another and
// the first one a multiple of 32. Returns bits that this thread is to count: those of the word for
// its first thread, else none.
__device__ __forceinline__ u32 write_bit(u32* words, u64 i, bool on) {
    const u32 word = __ballot_sync(0xffffffff, on);
    if (i % 32) return 0;
    words[i / 32] = word;
    return __popc(word);
}

// A kernel `name` of one argument by value; two blocks a multiprocessor have registers enough.
#define KERNEL(name, T, body) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const T a) { body(a); }

__device__ __forceinline__ float half_bits_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 float_to_half_bits(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ u32 float_bits(float f) { return __float_as_uint(f); }
__device__ __forceinline__ float bits_float(u32 b) { return __uint_as_float(b); }
#endif
