// Synchronisation, atomics and the clock: the only place where kernels use PTX.
//
// Signals are release stores and acquire loads at system scope, so the other side may be a block of
// the same GPU, another GPU or the host. Fences with relaxed accesses are not used: the thread
// sanitizer, which checks the same source on the host, does not model them. A host build defines
// HOST_SHIM and its own versions of these functions before it includes this header.
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

// A line is an 8-byte word of 4 data bytes and a 4-byte flag. Lines move in pairs, but each is
// loaded and stored atomically (PTX: single-copy atomicity of a vector's elements): a reader that
// sees the flag has the data, so lines need no order.
struct Lines { u64 first, second; };

// Load a pair if `on`. Predicated, as loads behind branches would wait for each other.
__device__ __forceinline__ void ld_lines(Lines& v, const u8* p, bool on) {
    asm volatile("{ .reg .pred on; setp.ne.u32 on, %3, 0;\n\t"
                 "@on ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2]; }"
                 : "+l"(v.first), "+l"(v.second) : "l"(p), "r"(u32(on)) : "memory");
}

__device__ __forceinline__ void st_lines(u8* p, Lines v) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 ::"l"(p), "l"(v.first), "l"(v.second) : "memory");
}

__device__ __forceinline__ u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

__device__ __forceinline__ void spin_pause() { __nanosleep(20); }

// Tells the compiler, which does not see where addresses in tables point.
__device__ __forceinline__ void in_global_memory(const void* p) {
    __builtin_assume(__isGlobal(p));
}

// Sets a word in shared memory; any thread may do so, and all threads read it behind a barrier.
__device__ __forceinline__ void raise(u32* p) { *(volatile u32*)p = 1; }

// Atomics on counts that blocks share; a later launch reads the result.
__device__ __forceinline__ u32 count_up(u32* p, u32 v) { return atomicAdd(p, v); }
__device__ __forceinline__ u64 count_up(u64* p, u64 v) { return atomicAdd(p, v); }
__device__ __forceinline__ void count_down_to(u64* p, u64 v) { atomicMin(p, v); }

// Define a kernel `name` with one argument, whose registers allow two blocks per multiprocessor.
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

// Threads of a warp; on the host also fewer, as many as the block has.
__device__ __forceinline__ constexpr u32 warp_size() { return 32; }

// Exclusive prefix sum of `v` over the threads of a warp, all of which call it together; `total`
// receives the sum over all of them.
template <class T> __device__ __forceinline__ T scan_warp(T v, T& total) {
    T upto = v;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(0xffffffff, upto, step);
        if (threadIdx.x % 32 >= step) upto += before;
    }
    total = __shfl_sync(0xffffffff, upto, 31);
    return upto - v;
}

// The threads of a warp, as bits, whose `v` is this thread's; all of them call it together.
__device__ __forceinline__ u32 same_in_warp(u32 v) { return __match_any_sync(0xffffffff, v); }

// Threads of a warp see what its others have written to shared memory before it.
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
#endif

// A waiting thread looks at the GPU's stop word after each SPINS polls, and at the host's abort
// word after each FAR_SPINS, some milliseconds. Reads of the host's memory follow one another, a
// microsecond each, and so do fences behind stores to it: a thousand threads that waited for them
// kept all others waiting as long, in every wait of a call (H200: 75 times its time).
enum { SPINS = 256, FAR_SPINS = 16 * SPINS };

// Whether all must stop.
__device__ __forceinline__ bool stopped(u32* stop, const u32* abort, u32 spins) {
    if (ld_acquire_sys(stop)) return true;
    if (spins % FAR_SPINS || !ld_acquire_sys(abort)) return false;
    st_release_sys(stop, 1);
    return true;
}

// Make all threads of this GPU stop, and tell the host.
__device__ __forceinline__ void stop_all(u32* stop, u32* abort) {
    st_release_sys(stop, 1);
    st_release_sys(abort, 1);
}
