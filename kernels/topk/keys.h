// What the kernels of a selection share: their argument, keys, digits, and which elements count.
#pragma once
#include "gpu/block.h"
#include "gpu/element.h"

enum { BINS = 2048, SAMPLE_BINS = 4096, DIGITS = 3 };

struct Step { u64 left; u32 prefix; u32 pad; };  // keys above the prefix are taken; of it, `left`

struct Choice {  // all zero but `low` after `sample`
    u64 marked;
    Step step[DIGITS + 1];  // before each digit, and after the last one
    u64 bins[DIGITS][BINS];
    u32 low;
    u32 pad;
};

struct Select {
    const ELEMENT* x;
    float* residual;  // or 0; x is added to it
    u32* words;  // [(n + 31) / 32]
    u32* counts;  // [blocks][2]: keys above the k-th largest, and at it
    Choice* choice;
    ELEMENT* values;  // [k]; float where there is a residual
    void* indices;  // [k]
    u64 n;
    u64 k;
    u64 chunk;
    u32 samples;
    u32 rank;  // of the sampled key that is taken for the least; 0: none is
    u32 wide;  // indices are 64 bits
    u32 digit;
};

template <class T> struct Keys;
template <> struct Keys<float> { enum { BITS = 31, NAN_BITS = 0x7f800001 }; };
template <> struct Keys<float16> { enum { BITS = 15, NAN_BITS = 0x7c01 }; };
template <> struct Keys<bfloat16> { enum { BITS = 15, NAN_BITS = 0x7f81 }; };

template <class K> __device__ __forceinline__ u32 key_of(u32 bits) {
    const u32 key = bits & ((1u << K::BITS) - 1);
    return key < u32(K::NAN_BITS) ? key : u32(K::NAN_BITS);
}
__device__ __forceinline__ u32 key_of(float v) { return key_of<Keys<float>>(float_bits(v)); }
__device__ __forceinline__ u32 key_of(float16 v) { return key_of<Keys<float16>>(v.bits); }
__device__ __forceinline__ u32 key_of(bfloat16 v) { return key_of<Keys<bfloat16>>(v.bits); }

// With a residual keys are of float sums, whatever the row's type.
__device__ __forceinline__ u32 bits_of(const Select& a) {
    return a.residual ? u32(Keys<float>::BITS) : u32(Keys<ELEMENT>::BITS);
}
__device__ __forceinline__ u32 key_at(const Select& a, u64 i) {  // behind `mark`
    return a.residual ? key_of(a.residual[i]) : key_of(a.x[i]);
}

// Digits from the highest: 11, 10 and 10 bits of a float's key, 8 and 7 of a short one's.
__device__ __forceinline__ u32 shift_of(u32 bits, u32 digit) {
    return bits == 31 ? (digit == 0 ? 20 : digit == 1 ? 10 : 0) : (digit == 0 ? 7 : 0);
}
__device__ __forceinline__ u32 width_of(u32 bits, u32 digit) {
    return (digit ? shift_of(bits, digit - 1) : bits) - shift_of(bits, digit);
}

// Word w of the bitmap; where too few are marked, all are.
__device__ __forceinline__ u32 marked_word(const Select& a, u64 w) {
    const u64 left = a.n - 32 * w;
    const u32 all = left >= 32 ? ~0u : (1u << left) - 1;
    return a.choice->marked >= a.k ? a.words[w] & all : all;
}

// The step behind digit d - 1, of which all elements have been counted.
__device__ __forceinline__ Step step_at(const Select& a, u32 d, u64* sums, Found& room) {
    if (d == 0) return a.choice->step[0];
    const Step before = a.choice->step[d - 1];
    const u32 width = width_of(bits_of(a), d - 1);
    const Found found = reach(sums, room, a.choice->bins[d - 1], 1u << width, before.left);
    const Step step = {before.left - found.above, before.prefix << width | found.bin, 0};
    if (blockIdx.x == 0 && threadIdx.x == 0) a.choice->step[d] = step;  // for the next launch
    return step;
}
