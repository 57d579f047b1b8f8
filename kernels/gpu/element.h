// One element: its wide form, in which it is combined, and the reductions.
//
// float16 and bfloat16 are combined in float32 and rounded to nearest even; integers wrap; min and
// max propagate NaN. No header of CUDA is needed, so any NVRTC compiles this.
#pragma once
#include "gpu/sync.h"

struct float16 { u16 bits; };
struct bfloat16 { u16 bits; };

template <class T> struct Wide { typedef T type; };
template <> struct Wide<float16> { typedef float type; };
template <> struct Wide<bfloat16> { typedef float type; };

template <class T> __device__ __forceinline__ T widen(T v) { return v; }
__device__ __forceinline__ float widen(float16 v) { return half_bits_to_float(v.bits); }
__device__ __forceinline__ float widen(bfloat16 v) { return bits_float(u32(v.bits) << 16); }

template <class T> __device__ __forceinline__ void narrow(T v, T& to) { to = v; }
__device__ __forceinline__ void narrow(float v, float16& to) { to.bits = float_to_half_bits(v); }
__device__ __forceinline__ void narrow(float v, bfloat16& to) {
    const u32 b = float_bits(v);
    // to nearest even; a NaN keeps its sign and the head of its payload, and stays a NaN
    to.bits = u16(v != v ? (b >> 16 | 0x40) : (b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// Overflow of a signed integer is undefined in C++: sums and products go through the unsigned type.
template <class T> struct Modular { typedef T type; };
template <> struct Modular<signed char> { typedef u32 type; };
template <> struct Modular<u8> { typedef u32 type; };
template <> struct Modular<int> { typedef u32 type; };
template <> struct Modular<i64> { typedef u64 type; };

struct sum {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) {
        typedef typename Modular<W>::type M;
        return W(M(a) + M(b));
    }
};
struct prod {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) {
        typedef typename Modular<W>::type M;
        return W(M(a) * M(b));
    }
};
struct min_ {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) {
        return b < a || b != b ? b : a;
    }
};
struct max_ {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) {
        return b > a || b != b ? b : a;
    }
};

// As many elements as one memory access moves.
template <class T, int BYTES> struct alignas(BYTES) Pack { T e[BYTES / sizeof(T)]; };
template <int BYTES> struct Vector;  // which makes it one access
template <> struct Vector<8> { typedef u64 type; };
template <> struct Vector<16> { typedef uint4 type; };
template <class T, int BYTES> struct Total { typename Wide<T>::type e[BYTES / sizeof(T)]; };

// `have` bytes from p; what lies behind them is zero. A misaligned p is read element by element.
template <class T, int BYTES>
__device__ __forceinline__ Pack<T, BYTES> load(const u8* p, i64 have) {
    if (have >= BYTES && !(u64(p) & (BYTES - 1))) {
        union { typename Vector<BYTES>::type raw; Pack<T, BYTES> v; } whole;
        whole.raw = *(const typename Vector<BYTES>::type*)p;
        return whole.v;
    }
    Pack<T, BYTES> v = {};
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        if (i64((i + 1) * sizeof(T)) <= have) v.e[i] = ((const T*)p)[i];
    return v;
}

template <class T, int BYTES>
__device__ __forceinline__ void store(u8* p, i64 have, const Pack<T, BYTES>& v) {
    if (have >= BYTES && !(u64(p) & (BYTES - 1))) {
        union { Pack<T, BYTES> v; typename Vector<BYTES>::type raw; } whole;
        whole.v = v;
        *(typename Vector<BYTES>::type*)p = whole.raw;
        return;
    }
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        if (i64((i + 1) * sizeof(T)) <= have) ((T*)p)[i] = v.e[i];
}

template <class T, int BYTES>
__device__ __forceinline__ Total<T, BYTES> widen(const Pack<T, BYTES>& v) {
    Total<T, BYTES> total;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i) total.e[i] = widen(v.e[i]);
    return total;
}

template <class Op, class T, int BYTES>
__device__ __forceinline__ void combine(Total<T, BYTES>& total, const Pack<T, BYTES>& v) {
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        total.e[i] = Op::apply(total.e[i], widen(v.e[i]));
}

template <class T, int BYTES>
__device__ __forceinline__ Pack<T, BYTES> narrow(const Total<T, BYTES>& total, u32 divisor) {
    typedef typename Wide<T>::type W;
    Pack<T, BYTES> v;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        narrow(divisor > 1 ? W(total.e[i] / W(divisor)) : total.e[i], v.e[i]);
    return v;
}
