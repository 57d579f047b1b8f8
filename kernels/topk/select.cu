// The k largest |x| of a row, exact, ties by lowest index; with a residual, the fused selection of
// gTop-k (algorithm 1, lines 4 to 8). Compiled for each ELEMENT; the host takes no decisions.
//
// The key of x is the bit pattern of |x|; all NaN share one key above infinity. Each warp has a
// part of the row: adjacent elements, in the order of the warps. A sample yields a threshold that
// somewhat more than k keys should reach. `gather` reads the row once; each warp lists the elements
// of its part that reach the threshold, in order. With a residual, `gather` also writes the sums,
// so `sample` has to come before it; otherwise each block takes the same sample itself. `upper`,
// `middle` and `lower` count the keys of the lists digit by digit (radix select), and `take` writes
// the result. A warp whose list is too short selects from its part of the row instead, and so do
// all warps if the lists hold fewer than k elements: the result is exact whatever the sample was.
//
// Order: all launches go to one stream, so a launch sees what earlier ones wrote; within a launch
// no block reads what another one writes, but for atomic counters that later launches read. So
// blocks may run in any order, and the result does not depend on it, as only integers are counted.
// Bounds: a warp accesses elements of its part below n, and `room` entries of its list. Exactly k
// outputs are written: the keys above the k-th largest and, in order, enough of those equal to it.
// Barriers and warp sums stand in loops whose bounds are the same for all threads concerned.
#include "topk/gather.h"

struct DigitScratch { u32 bins[BINS]; StepScratch step; };

template <int D> __device__ __forceinline__ void count_digit(const Select& a) {
    SHARED(DigitScratch, scratch);
    enum { SHIFT = Digit<D>::SHIFT, NUMBER = Digit<D>::NUMBER };
    for (u32 i = threadIdx.x; i < NUMBER; i += blockDim.x) scratch.bins[i] = 0;
    const Step step = step_before<D>(a, scratch.step);
    __syncthreads();
    u32 above = 0;
    each_key(a, items_of(a, step.listed), [&](u32 key) {
        const u32 prefix = (key >> SHIFT) / NUMBER;
        above += prefix > step.prefix;
        if (prefix == step.prefix) count_up(&scratch.bins[(key >> SHIFT) % NUMBER], 1u);
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < NUMBER; i += blockDim.x)
        if (scratch.bins[i]) count_up(&a.state->bins[D][i], u64(scratch.bins[i]));
    if (D != LAST) return;
    u32* row = a.rows + blockIdx.x * u64(NUMBER + 1);
    u64 sum, total;
    scan(scratch.step.sums, u64(above), sum);
    if (threadIdx.x == 0) row[NUMBER] = u32(sum);
    for (u32 first = 0; first < NUMBER; first += blockDim.x, sum += total) {
        const u32 i = first + threadIdx.x, mine = i < NUMBER ? scratch.bins[NUMBER - 1 - i] : 0;
        const u64 upto = sum + scan(scratch.step.sums, u64(mine), total) + mine;
        if (i < NUMBER) row[NUMBER - 1 - i] = u32(upto);
    }
}

__device__ __forceinline__ void take_keys(const Select& a) {
    SHARED(StepScratch, scratch);
    const Step step = step_before<DIGITS>(a, scratch);
    const u32* row = a.rows + step.prefix % LAST_BINS;
    u64 more = 0, upto = 0;  // elements of earlier blocks above the k-th largest, and not below it
#pragma unroll 1  // on sm_120 it would spill
    for (u32 b = threadIdx.x; b < blockIdx.x; b += blockDim.x) {
        more += row[b * u64(LAST_BINS + 1) + 1];
        upto += row[b * u64(LAST_BINS + 1)];
    }
    const Items items = items_of(a, step.listed);
    u64 mine = 0, total;  // of the warp: 32 bits for keys above the k-th largest, 32 for equal ones
    each_key(a, items, [&](u32 key) {
        mine += u64(key > step.prefix) << 32 | u64(key == step.prefix);
    });
    u64 sum_more, sum_upto;  // 16 words of 64 bits at once would spill there as well
    scan<8>(scratch.sums, more, sum_more);
    scan<8>(scratch.sums, upto, sum_upto);
    scan_warp(mine, total);
    const u64 before = scan_warps<8>(scratch.sums, total, total);
    u64 above = sum_more + (before >> 32), equal = sum_upto - sum_more + u32(before);
    const u32 width = warp_size();
    for (u64 first = 0; first < items.number; first += width) {
        const u64 j = first + threadIdx.x % width;
        const bool here = j < items.number;
        const u32 bits = here ? get_bits(a, items.bits, j) : 0, key = key_of(a, bits);
        const bool larger = here && key > step.prefix, same = here && key == step.prefix;
        u32 both;
        const u32 rank = scan_warp(u32(larger) << 16 | u32(same), both);
        const u64 equal_before = equal + (rank & 0xffff);
        if (larger || (same && equal_before < step.left)) {
            const u64 i = items.first + (items.offsets ? items.offsets[j] : j);
            const u64 to = above + (rank >> 16)
                           + (equal_before < step.left ? equal_before : step.left);
            put_bits(a, a.values, to, bits);
            if (a.residual) a.residual[i] = 0;
            if (a.wide) ((i64*)a.indices)[to] = i64(i);
            else ((int*)a.indices)[to] = int(i);
        }
        above += both >> 16;
        equal += both & 0xffff;
    }
}

KERNEL(sample, Select, sample_sums)
KERNEL(gather, Select, gather_row)
KERNEL(upper, Select, count_digit<0>)
KERNEL(middle, Select, count_digit<1>)
KERNEL(lower, Select, count_digit<2>)
KERNEL(take, Select, take_keys)
