// Elements: conversions to the type in which they are combined, and the reductions.
//
// Floats of 16 and 8 bits are combined in float32 and rounded to nearest even; integers wrap; min
// and max propagate NaN. No CUDA header is needed, so NVRTC compiles this without an include path.
#pragma once
#include "gpu/sync.h"

struct float16 { u16 bits; };
struct bfloat16 { u16 bits; };
struct float8_e4m3fn { u8 bits; };
struct float8_e5m2 { u8 bits; };

template <class T> struct Wide { typedef T type; };
template <> struct Wide<u8> { typedef u32 type; };  // as u8, min and max spill on sm_100
template <> struct Wide<float16> { typedef float type; };
template <> struct Wide<bfloat16> { typedef float type; };
template <> struct Wide<float8_e4m3fn> { typedef float type; };
template <> struct Wide<float8_e5m2> { typedef float type; };

template <class T> __device__ __forceinline__ T widen(T v) { return v; }
__device__ __forceinline__ u32 widen(u8 v) { return v; }
__device__ __forceinline__ float widen(float16 v) { return half_bits_to_float(v.bits); }
__device__ __forceinline__ float widen(bfloat16 v) { return bits_float(u32(v.bits) << 16); }
// The exponent's bias becomes 127 by a product, which is exact for subnormals too. Patterns from
// `special` on have the bits `above` as well.
template <int FRACTION, int BIAS>
__device__ __forceinline__ float float8_value(u8 v, u32 special, u32 above) {
    const u32 size = v & 0x7f;
    const float scaled = bits_float(size << (23 - FRACTION)) * bits_float(u32(254 - BIAS) << 23);
    return bits_float(float_bits(scaled) | (size >= special ? above : 0) | u32(v & 0x80) << 24);
}
__device__ __forceinline__ float widen(float8_e4m3fn v) {
    return float8_value<3, 7>(v.bits, 0x7f, 0x7fc00000);  // NaN
}
__device__ __forceinline__ float widen(float8_e5m2 v) {
    return float8_value<2, 15>(v.bits, 0x7c, 0x7f800000);  // infinity, and NaN
}

template <class T> __device__ __forceinline__ void narrow(T v, T& to) { to = v; }
__device__ __forceinline__ void narrow(u32 v, u8& to) { to = u8(v); }
__device__ __forceinline__ void narrow(float v, float16& to) { to.bits = float_to_half_bits(v); }
__device__ __forceinline__ void narrow(float v, bfloat16& to) {
    const u32 b = float_bits(v);
    // to nearest even; a NaN keeps its sign and its payload's upper bits, and becomes quiet
    to.bits = u16(v != v ? (b >> 16 | 0x40) : (b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// To 8 bits, nearest even. Patterns from `over` on become `above`, those of NaN 0x7f.
template <int FRACTION, int BIAS>
__device__ __forceinline__ u8 float8_bits(float v, u32 over, u32 above) {
    const int cut = 23 - FRACTION;
    const u32 size = float_bits(v) & 0x7fffffff, sign = float_bits(v) >> 24 & 0x80;
    u32 out;
    if (size >= over)
        out = size > 0x7f800000 ? 0x7f : above;
    else if (size < u32(128 - BIAS) << 23) {  // subnormal: adding `magic` rounds it
        const u32 magic = u32(151 - BIAS - FRACTION) << 23;
        out = float_bits(bits_float(size) + bits_float(magic)) - magic;
    } else
        out = (size - (u32(127 - BIAS) << 23) + ((1u << (cut - 1)) - 1) + (size >> cut & 1)) >> cut;
    return u8(out | sign);
}
__device__ __forceinline__ void narrow(float v, float8_e4m3fn& to) {
    to.bits = float8_bits<3, 7>(v, 0x43e80001, 0x7f);  // it has no infinity: NaN above 464
}
__device__ __forceinline__ void narrow(float v, float8_e5m2& to) {
    to.bits = float8_bits<2, 15>(v, 0x47800000, 0x7c);
}

// The largest finite value of a float.
__device__ __forceinline__ float largest(float) { return 3.4028234663852886e38f; }
__device__ __forceinline__ float largest(float16) { return 65504.0f; }
__device__ __forceinline__ float largest(bfloat16) { return 3.3895313892515355e38f; }

// Keys order floats by magnitude: the bits without the sign, and NAN_BITS for every NaN.
template <class T> struct Keys;
template <> struct Keys<float> { enum { BITS = 31, NAN_BITS = 0x7f800001 }; };
template <> struct Keys<float16> { enum { BITS = 15, NAN_BITS = 0x7c01 }; };
template <> struct Keys<bfloat16> { enum { BITS = 15, NAN_BITS = 0x7f81 }; };

// Signed overflow is undefined in C++, so sums and products use the unsigned type.
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
// Of integers, and of bools.
struct and_ {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) { return W(a & b); }
};
struct or_ {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) { return W(a | b); }
};
struct xor_ {
    template <class W> __device__ __forceinline__ static W apply(W a, W b) { return W(a ^ b); }
};

// The elements of one memory access, and the word that the access loads or stores. A word stays
// whole until it is combined: small elements would take a register each.
template <class T, int BYTES> struct alignas(BYTES) Pack { T e[BYTES / sizeof(T)]; };
template <int BYTES> struct Word;
template <> struct Word<8> { typedef u64 type; };
template <> struct Word<16> { typedef uint4 type; };
template <class T, int BYTES> struct Total { typename Wide<T>::type e[BYTES / sizeof(T)]; };

template <class T, int BYTES> union Bits { typename Word<BYTES>::type word; Pack<T, BYTES> v; };

template <int BYTES> __device__ __forceinline__ typename Word<BYTES>::type load_word(const u8* p) {
    in_global_memory(p);
    return *(const typename Word<BYTES>::type*)p;
}

template <int BYTES>
__device__ __forceinline__ void store_word(u8* p, typename Word<BYTES>::type word) {
    in_global_memory(p);
    *(typename Word<BYTES>::type*)p = word;
}

// Load `have` bytes from p, padded with zeros. A misaligned p is read element by element.
template <class T, int BYTES>
__device__ __forceinline__ typename Word<BYTES>::type load(const u8* p, i64 have) {
    if (have >= BYTES && !(u64(p) & (BYTES - 1))) return load_word<BYTES>(p);
    Bits<T, BYTES> bits = {};
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        if (i64((i + 1) * sizeof(T)) <= have) bits.v.e[i] = ((const T*)p)[i];
    return bits.word;
}

template <class T, int BYTES>
__device__ __forceinline__ void store(u8* p, i64 have, typename Word<BYTES>::type word) {
    if (have >= BYTES && !(u64(p) & (BYTES - 1))) {
        store_word<BYTES>(p, word);
        return;
    }
    Bits<T, BYTES> bits;
    bits.word = word;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        if (i64((i + 1) * sizeof(T)) <= have) ((T*)p)[i] = bits.v.e[i];
}

template <class T, int BYTES>
__device__ __forceinline__ Total<T, BYTES> widen(typename Word<BYTES>::type word) {
    Bits<T, BYTES> bits;
    bits.word = word;
    Total<T, BYTES> total;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i) total.e[i] = widen(bits.v.e[i]);
    return total;
}

template <class Op, class T, int BYTES>
__device__ __forceinline__ void combine(Total<T, BYTES>& total, typename Word<BYTES>::type word) {
    const Total<T, BYTES> other = widen<T, BYTES>(word);
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i)
        total.e[i] = Op::apply(total.e[i], other.e[i]);
}

// Only floats have averages. The 16 of 8-bit floats are divided in memory: in registers they spill.
template <class W, int N> __device__ __forceinline__ void divide(W (&)[N], W) {}
template <int N> __device__ __forceinline__ void divide(double (&e)[N], double divisor) {
#pragma unroll
    for (int i = 0; i < N; ++i) e[i] /= divisor;
}
template <int N> __device__ __forceinline__ void divide(float (&e)[N], float divisor) {
#pragma unroll
    for (int i = 0; i < N; ++i) e[i] /= divisor;
}
__device__ __noinline__ void divide(float (&e)[16], float divisor) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) e[i] /= divisor;
}

template <class T, int BYTES>
__device__ __forceinline__ typename Word<BYTES>::type narrow(const Total<T, BYTES>& total,
                                                             u32 divisor) {
    typedef typename Wide<T>::type W;
    Total<T, BYTES> result = total;
    if (divisor > 1) divide(result.e, W(divisor));
    Bits<T, BYTES> bits;
#pragma unroll
    for (int i = 0; i < BYTES / int(sizeof(T)); ++i) narrow(result.e[i], bits.v.e[i]);
    return bits.word;
}
