// The k largest |x| of a row, exact, ties by lowest index; with a residual, the fused selection of
// gTop-k (algorithm 1, lines 4 to 8). Compiled for each ELEMENT; the host takes no decisions.
//
// The key of x is the bit pattern of |x|; all NaN share one key above infinity. `sample` picks a
// threshold that somewhat more than k keys should reach. `mark` reads the row once and sets a bit
// for each element that reaches it; with a residual it also writes the sums. `digit` counts the
// marked elements' keys digit by digit (radix select), `tally` counts those above and at the k-th
// largest in each block, and `take` writes them in order. If fewer than k elements are marked, all
// elements count as marked.
//
// All launches go to one stream. Results do not depend on the order of blocks, as only integers are
// counted. Each block has `chunk` elements, a multiple of 32 times its threads.
// Bounds: no element beyond n is read, and exactly k outputs are written: the keys above the k-th
// largest and, in order of position, enough of those equal to it.
#include "topk/mark.h"

struct DigitScratch { u32 bins[BINS]; u64 sums[THREADS]; Found found; };

__device__ __forceinline__ void count_digit(const Select& a) {
    SHARED(DigitScratch, scratch);
    const u32 d = a.digit, bits = bits_of(a), shift = shift_of(bits, d), width = width_of(bits, d);
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) scratch.bins[i] = 0;
    const Step step = step_at(a, d, scratch.sums, scratch.found);
    __syncthreads();
    const u64 start = blockIdx.x * a.chunk / 32, words = (a.n + 31) / 32;
    for (u64 w = start + threadIdx.x; w < start + a.chunk / 32 && w < words; w += blockDim.x)
        for (u32 left = marked_word(a, w), bit = 0; left; left >>= 1, ++bit) {
            if (!(left & 1)) continue;
            const u32 key = key_at(a, 32 * w + bit);
            if (key >> shift >> width == step.prefix)
                count_up(&scratch.bins[key >> shift & ((1u << width) - 1)], 1u);
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x)
        if (scratch.bins[i]) count_up(&a.choice->bins[d][i], u64(scratch.bins[i]));
}

struct TakeScratch { u32 scan[THREADS]; u64 sums[THREADS]; Found found; u64 sum; };

__device__ __forceinline__ void tally_keys(const Select& a) {
    SHARED(TakeScratch, scratch);
    const Step step = step_at(a, a.digit, scratch.sums, scratch.found);
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
    scan(scratch.scan, more, total);
    if (threadIdx.x == 0) a.counts[2 * blockIdx.x] = total;
    scan(scratch.scan, equal, total);
    if (threadIdx.x == 0) a.counts[2 * blockIdx.x + 1] = total;
}

__device__ __forceinline__ void take_keys(const Select& a) {
    SHARED(TakeScratch, scratch);
    const Step step = a.choice->step[a.digit];
    u64 more = sum_of(&scratch.sum, a.counts, blockIdx.x, 2);
    u64 equal = sum_of(&scratch.sum, a.counts + 1, blockIdx.x, 2);
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
        u64 above_before = more + scan(scratch.scan, u32(__popc(above)), total_above);
        u64 at_before = equal + scan(scratch.scan, u32(__popc(at)), total_at);
        for (u32 left = above | at, bit = 0; left; left >>= 1, ++bit) {
            const bool takes = at >> bit & 1 && at_before < step.left;
            if (above >> bit & 1 || takes) {
                const u64 i = 32 * w + bit;
                const u64 to = above_before + (at_before < step.left ? at_before : step.left);
                if (a.residual) {
                    ((float*)a.values)[to] = a.residual[i];
                    a.residual[i] = 0;
                } else {
                    a.values[to] = a.x[i];
                }
                if (a.wide) ((i64*)a.indices)[to] = i64(i);
                else ((int*)a.indices)[to] = int(i);
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
