// Common to the kernels of a selection: their argument, keys, digits, and the marked elements.
#pragma once
#include "gpu/block.h"
#include "gpu/element.h"

enum { BINS = 2048, SAMPLE_BINS = 4096, DIGITS = 3 };

struct Step { u64 left; u32 prefix; u32 pad; };  // take keys above `prefix`, and `left` that match

struct Choice {  // `sample` zeroes all but `low` and `step[0].left`
    u64 marked;  // number of marked elements
    Step step[DIGITS + 1];  // before each digit, and after the last one
    u64 bins[DIGITS][BINS];
    u32 low;  // the threshold of `mark`
    u32 pad;
};

struct Select {
    const ELEMENT* x;
    float* residual;  // [n], to which x is added; or 0
    u32* words;  // [(n + 31) / 32]: a bit for each element, set if it is marked
    u32* counts;  // [blocks][2]: keys above the k-th largest, and keys equal to it
    Choice* choice;
    ELEMENT* values;  // [k]; float if there is a residual
    void* indices;  // [k]
    u64 n;
    u64 k;
    u64 chunk;  // elements per block
    u32 samples;
    u32 rank;  // of the sampled key that becomes the threshold; 0: mark all elements
    u32 wide;  // 1: indices have 64 bits
    u32 digit;
};

template <class K> __device__ __forceinline__ u32 key_of(u32 bits) {
    const u32 key = bits & ((1u << K::BITS) - 1);
    return key < u32(K::NAN_BITS) ? key : u32(K::NAN_BITS);
}
__device__ __forceinline__ u32 key_of(float v) { return key_of<Keys<float>>(float_bits(v)); }
__device__ __forceinline__ u32 key_of(float16 v) { return key_of<Keys<float16>>(v.bits); }
__device__ __forceinline__ u32 key_of(bfloat16 v) { return key_of<Keys<bfloat16>>(v.bits); }

// With a residual, keys are those of the float sums, whatever the type of x.
__device__ __forceinline__ u32 bits_of(const Select& a) {
    return a.residual ? u32(Keys<float>::BITS) : u32(Keys<ELEMENT>::BITS);
}
__device__ __forceinline__ u32 key_at(const Select& a, u64 i) {  // after `mark`
    return a.residual ? key_of(a.residual[i]) : key_of(a.x[i]);
}

// Digits from the highest: 11, 10 and 10 bits of a float's key; 8 and 7 of a 16-bit float's.
__device__ __forceinline__ u32 shift_of(u32 bits, u32 digit) {
    return bits == 31 ? (digit == 0 ? 20 : digit == 1 ? 10 : 0) : (digit == 0 ? 7 : 0);
}
__device__ __forceinline__ u32 width_of(u32 bits, u32 digit) {
    return (digit ? shift_of(bits, digit - 1) : bits) - shift_of(bits, digit);
}

// Word w of the bitmap; all ones if fewer than k elements are marked.
__device__ __forceinline__ u32 marked_word(const Select& a, u64 w) {
    const u64 left = a.n - 32 * w;
    const u32 all = left >= 32 ? ~0u : (1u << left) - 1;
    return a.choice->marked >= a.k ? a.words[w] & all : all;
}

// The step after digit d - 1, whose histogram is complete.
__device__ __forceinline__ Step step_at(const Select& a, u32 d, u64* sums, Found& scratch) {
    if (d == 0) return a.choice->step[0];
    const Step before = a.choice->step[d - 1];
    const u32 width = width_of(bits_of(a), d - 1);
    const Found found = reach(sums, scratch, a.choice->bins[d - 1], 1u << width, before.left);
    const Step step = {before.left - found.above, before.prefix << width | found.bin, 0};
    if (blockIdx.x == 0 && threadIdx.x == 0) a.choice->step[d] = step;  // for the next launch
    return step;
}
