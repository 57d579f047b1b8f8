// The k largest |x| of a row, exact, ties by lowest index; with a residual, the fused selection of
// gTop-k (algorithm 1, lines 4 to 8). Compiled once for each ELEMENT; no host in between.
//
// A key is the bit pattern of |x|; all NaN are alike, above infinity. `sample` tells a key that
// somewhat more than k others reach; `mark` reads the row once, and writes a bit for each element
// that does (n / 32 words) and, with a residual, the sums. `digit` counts the marked elements' keys
// digit by digit, `tally` those above and at the k-th largest by block, and `take` writes them in
// order. Only `mark` reads the whole row: were fewer than k marked, all count as marked.
//
// Launches follow each other on one stream, so nothing is waited for; counts are of integers, so
// their order does not matter. Each block has a run of `chunk` elements, a multiple of 32 threads.
// Bounds: no element at or beyond n is read, no output at or beyond k is written (there are exactly
// k keys above the k-th largest or, in order, at it).
#include "block.h"
#include "element.h"

#ifndef ELEMENT
#define ELEMENT float
#endif

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

struct SampleRoom { u64 bins[SAMPLE_BINS]; u64 sums[THREADS]; Found found; };

// One block.
__device__ __forceinline__ void sample_row(const Select& a) {
    SHARED(SampleRoom, room);
    u32* state = (u32*)a.choice;
    for (u32 i = threadIdx.x; i < sizeof(Choice) / 4; i += blockDim.x) state[i] = 0;
    for (u32 i = threadIdx.x; i < SAMPLE_BINS; i += blockDim.x) room.bins[i] = 0;
    __syncthreads();
    const u32 shift = bits_of(a) - 12;
    for (u32 j = threadIdx.x; j < a.samples && a.rank; j += blockDim.x) {
        // multiples of the golden ratio, which lie evenly
        const u64 i = a.samples == a.n ? j : u64(j * 2654435769u) * a.n >> 32;
        const u32 key = a.residual ? key_of(widen(a.x[i]) + a.residual[i]) : key_of(a.x[i]);
        count_up(&room.bins[key >> shift], u64(1));
    }
    __syncthreads();
    Found found = {0, 0, 0};
    if (a.rank) found = reach(room.sums, room.found, room.bins, SAMPLE_BINS, a.rank);
    if (threadIdx.x) return;
    a.choice->low = found.bin << shift;
    a.choice->step[0].left = a.k;
}

enum { AHEAD = 8 };  // loads of a thread in flight

struct MarkRoom { u32 marked; };

__device__ __forceinline__ void mark_row(const Select& a) {
    SHARED(MarkRoom, room);
    if (threadIdx.x == 0) room.marked = 0;
    __syncthreads();
    const u32 low = a.choice->low;
    const u64 start = blockIdx.x * a.chunk, whole = start + a.chunk;
    const u64 stop = whole < a.n ? whole : a.n;
    u32 marked = 0;
    for (u64 first = start; first < stop; first += u64(AHEAD) * blockDim.x) {
        const u64 mine = first + threadIdx.x, far = mine < stop ? stop - mine : 0;
        const u32 step = blockDim.x, left = far < AHEAD * step ? u32(far) : AHEAD * step;
        const ELEMENT* from = a.x + mine;
        float* to = a.residual + mine;
        ELEMENT x[AHEAD];
        u32 key[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)  // all loads before the first use
            x[u] = u * step < left ? from[u * step] : ELEMENT();
        if (a.residual) {
            float sum[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) sum[u] = u * step < left ? to[u * step] : 0.f;
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                sum[u] = widen(x[u]) + sum[u];
                key[u] = key_of(sum[u]);
                if (u * step < left) to[u * step] = sum[u];
            }
        } else {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) key[u] = key_of(x[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const u64 i = mine + u * step;
            if (i / 32 * 32 < stop)
                marked += write_bit(a.words, i, u * step < left && key[u] >= low);
        }
    }
    if (marked) count_up(&room.marked, marked);
    __syncthreads();
    if (threadIdx.x == 0 && room.marked) count_up(&a.choice->marked, u64(room.marked));
}

// Word w of the bitmap; where too few are marked, all are.
__device__ __forceinline__ u32 marked_word(const Select& a, u64 w) {
    const u64 left = a.n - 32 * w;
    const u32 all = left >= 32 ? ~0u : (1u << left) - 1;
    return a.choice->marked >= a.k ? a.words[w] & all : all;
}

struct DigitRoom { u32 bins[BINS]; u64 sums[THREADS]; Found found; };

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

__device__ __forceinline__ void count_digit(const Select& a) {
    SHARED(DigitRoom, room);
    const u32 d = a.digit, bits = bits_of(a), shift = shift_of(bits, d), width = width_of(bits, d);
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) room.bins[i] = 0;
    const Step step = step_at(a, d, room.sums, room.found);
    __syncthreads();
    const u64 start = blockIdx.x * a.chunk / 32, words = (a.n + 31) / 32;
    for (u64 w = start + threadIdx.x; w < start + a.chunk / 32 && w < words; w += blockDim.x)
        for (u32 left = marked_word(a, w), bit = 0; left; left >>= 1, ++bit) {
            if (!(left & 1)) continue;
            const u32 key = key_at(a, 32 * w + bit);
            if (key >> shift >> width == step.prefix)
                count_up(&room.bins[key >> shift & ((1u << width) - 1)], 1u);
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x)
        if (room.bins[i]) count_up(&a.choice->bins[d][i], u64(room.bins[i]));
}

struct TakeRoom { u32 scan[THREADS]; u64 sums[THREADS]; Found found; u64 sum; };

__device__ __forceinline__ void tally_keys(const Select& a) {
    SHARED(TakeRoom, room);
    const Step step = step_at(a, a.digit, room.sums, room.found);
    u32 more = 0, equal = 0;
    const u64 start = blockIdx.x * a.chunk / 32, words = (a.n + 31) / 32;
    for (u64 w = start + threadIdx.x; w < start + a.chunk / 32 && w < words; w += blockDim.x)
        for (u32 left = marked_word(a, w), bit = 0; left; left >>= 1, ++bit) {
            if (!(left & 1)) continue;
            const u32 key = key_at(a, 32 * w + bit);
            more += key > step.prefix;
            equal += key == step.prefix;
        }
    u32 total;
    scan(room.scan, more, total);
    if (threadIdx.x == 0) a.counts[2 * blockIdx.x] = total;
    scan(room.scan, equal, total);
    if (threadIdx.x == 0) a.counts[2 * blockIdx.x + 1] = total;
}

__device__ __forceinline__ void take_keys(const Select& a) {
    SHARED(TakeRoom, room);
    const Step step = a.choice->step[a.digit];
    u64 more = sum_of(&room.sum, a.counts, blockIdx.x, 2);
    u64 equal = sum_of(&room.sum, a.counts + 1, blockIdx.x, 2);
    const u64 start = blockIdx.x * a.chunk / 32, words = (a.n + 31) / 32;
    for (u64 first = start; first < start + a.chunk / 32 && first < words; first += blockDim.x) {
        const u64 w = first + threadIdx.x;
        const u32 word = w < words ? marked_word(a, w) : 0;
        u32 above = 0, at = 0;  // bits
        for (u32 left = word, bit = 0; left; left >>= 1, ++bit) {
            if (!(left & 1)) continue;
            const u32 key = key_at(a, 32 * w + bit);
            above |= u32(key > step.prefix) << bit;
            at |= u32(key == step.prefix) << bit;
        }
        u32 total_above, total_at;
        u64 above_before = more + scan(room.scan, u32(__popc(above)), total_above);
        u64 at_before = equal + scan(room.scan, u32(__popc(at)), total_at);
        for (u32 left = above | at, bit = 0; left; left >>= 1, ++bit) {
            const bool takes = at >> bit & 1 && at_before < step.left;
            if (above >> bit & 1 || takes) {
                const u64 i = 32 * w + bit;
                const u64 place = above_before + (at_before < step.left ? at_before : step.left);
                if (a.residual) {
                    ((float*)a.values)[place] = a.residual[i];
                    a.residual[i] = 0;
                } else {
                    a.values[place] = a.x[i];
                }
                if (a.wide) ((i64*)a.indices)[place] = i64(i);
                else ((int*)a.indices)[place] = int(i);
            }
            above_before += above >> bit & 1;
            at_before += at >> bit & 1;
        }
        more += total_above;
        equal += total_at;
    }
}

KERNEL(sample, Select, sample_row)
KERNEL(mark, Select, mark_row)
KERNEL(digit, Select, count_digit)
KERNEL(tally, Select, tally_keys)
KERNEL(take, Select, take_keys)
