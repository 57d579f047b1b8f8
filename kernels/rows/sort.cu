// A stable radix sort of indices and their places, and the runs of equal ones.
//
// A pass sorts by 8 bits: `histogram` counts digits by block, `offsets` (one block) adds them up in
// the order (digit, block), `scatter` writes. Within a block threads take `blockDim` neighbours at
// a time, and each finds how many before it have its digit: so equal digits keep their order. The
// first pass reads the caller's indices. Then `runs` counts and `name` numbers the runs of equal
// indices. Launches follow each other on one stream. Bounds: an index out of range is reported and
// sorted by its low bits; nothing is read or written by an index's value.
#include "gpu/block.h"

#ifndef INDEX
#define INDEX int
#endif
#ifndef KEY
#define KEY u32
#endif

enum { RADIX = 256 };

struct Sort {
    const INDEX* indices;  // [n]; the first pass's keys, or 0
    const KEY* keys;
    const u32* order;
    KEY* keys_out;
    u32* order_out;
    u32* counts;  // [RADIX][blocks]; of `runs` [blocks]
    u64* told;  // [2]: runs; the first place whose index is out of range, or n
    u32* run;  // [n]: the number of each sorted place's run
    INDEX* unique;  // [n]: the index of each run
    u64 n;  // below 2^32
    u64 limit;  // of indices
    u64 chunk;  // of a block
    u32 shift;
    u32 blocks;  // of the other launches, for `offsets`
};

__device__ __forceinline__ KEY key_at(const Sort& a, u64 i) {
    return a.indices ? KEY(a.indices[i]) : a.keys[i];
}

struct SortRoom { u32 bins[RADIX]; u32 scan[THREADS]; u8 digit[THREADS]; u64 sum; };

__device__ __forceinline__ void count_digits(const Sort& a) {
    SHARED(SortRoom, room);
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x) room.bins[i] = 0;
    __syncthreads();
    const u64 start = blockIdx.x * a.chunk;
    for (u64 i = start + threadIdx.x; i < start + a.chunk && i < a.n; i += blockDim.x) {
        // as unsigned numbers negative indices are out of range as well
        if (a.indices && u64(i64(a.indices[i])) >= a.limit) count_down_to(a.told + 1, i);
        count_up(&room.bins[key_at(a, i) >> a.shift & (RADIX - 1)], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x)
        a.counts[i * gridDim.x + blockIdx.x] = room.bins[i];
}

__device__ __forceinline__ void add_offsets(const Sort& a) {
    SHARED(SortRoom, room);
    u32 before = 0;
    const u32 number = RADIX * a.blocks;
    for (u32 first = 0; first < number; first += blockDim.x) {
        const u32 i = first + threadIdx.x;
        const u32 mine = i < number ? a.counts[i] : 0;
        u32 total;
        const u32 upto = scan(room.scan, mine, total);
        if (i < number) a.counts[i] = before + upto;
        before += total;
    }
}

__device__ __forceinline__ void scatter_pairs(const Sort& a) {
    SHARED(SortRoom, room);
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x)
        room.bins[i] = a.counts[i * gridDim.x + blockIdx.x];
    const u64 start = blockIdx.x * a.chunk;
    for (u64 first = start; first < start + a.chunk && first < a.n; first += blockDim.x) {
        const u64 i = first + threadIdx.x;
        const bool here = i < start + a.chunk && i < a.n;
        const KEY key = here ? key_at(a, i) : 0;
        const u32 digit = u32(key >> a.shift) & (RADIX - 1);
        room.digit[threadIdx.x] = u8(digit);
        __syncthreads();
        u32 rank = 0;
        for (u32 t = 0; t < threadIdx.x; ++t) rank += room.digit[t] == digit;
        const u64 to = here ? u64(room.bins[digit]) + rank : 0;
        __syncthreads();
        if (here) {
            count_up(&room.bins[digit], 1u);  // for the next ones
            a.keys_out[to] = key;
            a.order_out[to] = a.indices ? u32(i) : a.order[i];
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void count_runs(const Sort& a) {
    SHARED(SortRoom, room);
    count_firsts(room.scan, a.keys, a.n, a.chunk, a.counts, a.told);
}

__device__ __forceinline__ void name_runs(const Sort& a) {
    SHARED(SortRoom, room);
    const u64 start = blockIdx.x * a.chunk;
    u64 before = sum_of(&room.sum, a.counts, blockIdx.x, 1);
    for (u64 first = start; first < start + a.chunk && first < a.n; first += blockDim.x) {
        const u64 i = first + threadIdx.x;
        const bool here = i < start + a.chunk && i < a.n, head = here && first_of(a.keys, i);
        u32 total;
        const u64 upto = before + scan(room.scan, u32(head), total) + head;  // at least 1 if here
        if (here) a.run[i] = u32(upto - 1);
        if (head) a.unique[upto - 1] = INDEX(a.keys[i]);
        before += total;
    }
}

KERNEL(histogram, Sort, count_digits)
KERNEL(offsets, Sort, add_offsets)
KERNEL(scatter, Sort, scatter_pairs)
KERNEL(runs, Sort, count_runs)
KERNEL(name, Sort, name_runs)
