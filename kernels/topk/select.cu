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
#include "topk/mark.h"

struct DigitRoom { u32 bins[BINS]; u64 sums[THREADS]; Found found; };

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
