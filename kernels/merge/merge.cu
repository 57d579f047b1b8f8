// The sum of two sparse vectors, and the division of one by positions (gTop-k paper, definition 1).
//
// `merge` writes every entry to its position in the merged order, which it finds by a binary search
// in the other vector; a's entry precedes b's of the same index. `heads` counts the entries that
// are the first of their index; `unite` writes these, adding b's value to a's as on the CPU. `part`
// writes each entry to the kept or the dropped ones. All launches go to one stream.
// A vector may end in any number of entries of one index, as a pad: the sum then has one of them.
// Bounds: positions are below num_a + num_b if each vector's indices ascend. If they do not, `merge`
// reports that and skips positions out of range.
#include "gpu/block.h"

#ifndef INDEX
#define INDEX int
#endif

struct Merge {
    const float* a_values;
    const INDEX* a_indices;
    const float* b_values;
    const INDEX* b_indices;
    float* values;  // [num_a + num_b], merged
    INDEX* indices;
    float* sums;  // [num_a + num_b]; one for each distinct index is written
    INDEX* unique;
    u32* counts;  // [blocks]
    u64* summary;  // [3]: distinct indices; nonzero if a's do not ascend; nonzero if b's do not; or 0
    u64 num_a;
    u64 num_b;
    u64 chunk;  // entries per block
};

__device__ __forceinline__ void merge_entries(const Merge& a) {
    const u64 number = a.num_a + a.num_b;
    EACH(i, number) {
        const bool second = i >= a.num_a;
        const u64 at = second ? i - a.num_a : i;
        const INDEX* own = second ? a.b_indices : a.a_indices;
        const INDEX index = own[at];
        if (a.summary && at && own[at - 1] >= index)
            count_up(a.summary + (second ? 2 : 1), u64(1));
        const u64 to = at + (second ? below(a.a_indices, a.num_a, index, true)
                                    : below(a.b_indices, a.num_b, index));
        if (to >= number) continue;
        a.values[to] = (second ? a.b_values : a.a_values)[at];
        a.indices[to] = index;
    }
}

struct MergeScratch { u32 scan[WARPS]; u64 sums[WARPS]; };

__device__ __forceinline__ void count_heads(const Merge& a) {
    SHARED(MergeScratch, scratch);
    count_firsts(scratch.scan, a.indices, a.num_a + a.num_b, a.chunk, a.counts, a.summary);
}

__device__ __forceinline__ void unite_entries(const Merge& a) {
    SHARED(MergeScratch, scratch);
    const u64 number = a.num_a + a.num_b, start = blockIdx.x * a.chunk;
    u64 before = sum_of(scratch.sums, a.counts, blockIdx.x);
    for (u64 first = start; first < start + a.chunk && first < number; first += blockDim.x) {
        const u64 i = first + threadIdx.x;
        const bool head = i < start + a.chunk && i < number && first_of(a.indices, i);
        u32 total;
        const u64 to = before + scan(scratch.scan, u32(head), total);
        if (head) {
            const bool pair = i + 1 < number && a.indices[i + 1] == a.indices[i];
            a.sums[to] = pair ? a.values[i] + a.values[i + 1] : a.values[i];
            a.unique[to] = a.indices[i];
        }
        before += total;
    }
}

struct Part {
    const float* values;  // [number]
    const INDEX* indices;
    const int* found;  // [kept]: ascending positions of the entries that are kept
    float* kept_values;
    INDEX* kept_indices;
    float* left_values;  // [number - kept]
    INDEX* left_indices;
    u64 number;
    u64 kept;
};

__device__ __forceinline__ void part_entries(const Part& a) {
    EACH(i, a.number) {
        const u64 first = below(a.found, a.kept, int(i));
        const bool keeps = first < a.kept && u64(a.found[first]) == i;
        const u64 to = keeps ? first : i - first;
        (keeps ? a.kept_values : a.left_values)[to] = a.values[i];
        (keeps ? a.kept_indices : a.left_indices)[to] = a.indices[i];
    }
}

KERNEL(merge, Merge, merge_entries)
KERNEL(heads, Merge, count_heads)
KERNEL(unite, Merge, unite_entries)
KERNEL(part, Part, part_entries)
