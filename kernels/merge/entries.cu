// Entries of sparse vectors: as their owner gives them, as they are added, and as they travel.
//
// `admit` copies a caller's entries, widened, and counts indices that do not ascend or are out of
// range. `settle` rounds values to such as ELEMENT carries (of two as near the even one; what is finite
// stays so) and adds the rest to a residual, `keep` adds entries to it. `pack` and `unpack` move
// entries to and from a message. Launches follow each other on one stream. Bounds: entry i of n
// alone is touched by a thread; a residual at indices that `admit` has counted as right on the rank
// that gave them; these are all different, so no two threads add to one element.
#include "gpu/block.h"
#include "gpu/element.h"

struct Entries {
    float* values;  // [n]
    int* indices;  // [n]
    ELEMENT* far_values;  // [n] of a message, or of the caller
    int* far_indices;  // [n]
    u64* head;  // of a message: n; for `admit`, which adds to it: how many entries are wrong
    float* residual;  // [limit], or 0
    u64 n;
    u64 limit;
};

__device__ __forceinline__ float largest(float) { return 3.4028234663852886e38f; }
__device__ __forceinline__ float largest(float16) { return 65504.0f; }
__device__ __forceinline__ float largest(bfloat16) { return 3.3895313892515355e38f; }

__device__ __forceinline__ bool finite(float v) { return v - v == 0; }

// The nearest value that ELEMENT holds.
__device__ __forceinline__ float carried(float v) {
    const float most = largest(ELEMENT());
    if (finite(v)) v = v > most ? most : v < -most ? -most : v;
    ELEMENT stored;
    narrow(v, stored);
    return widen(stored);
}

#define EACH(i) \
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < a.n; \
         i += u64(gridDim.x) * blockDim.x)

__device__ __forceinline__ void admit_entries(const Entries& a) {
    EACH(i) {
        const i64 index = a.far_indices[i];
        if (index < 0 || u64(index) >= a.limit || (i && a.far_indices[i - 1] >= index))
            count_up(a.head, u64(1));
        a.values[i] = widen(a.far_values[i]);
        a.indices[i] = int(index);
    }
}

__device__ __forceinline__ void settle_entries(const Entries& a) {
    EACH(i) {
        const float v = a.values[i], kept = carried(v);
        a.values[i] = kept;
        if (a.residual && finite(v)) a.residual[a.indices[i]] += v - kept;
    }
}

__device__ __forceinline__ void keep_entries(const Entries& a) {
    EACH(i) a.residual[a.indices[i]] += a.values[i];
}

__device__ __forceinline__ void pack_entries(const Entries& a) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.head = a.n;
    EACH(i) {
        narrow(a.values[i], a.far_values[i]);
        a.far_indices[i] = a.indices[i];
    }
}

__device__ __forceinline__ void unpack_entries(const Entries& a) {
    EACH(i) {
        a.values[i] = widen(a.far_values[i]);
        a.indices[i] = a.far_indices[i];
    }
}

KERNEL(admit, Entries, admit_entries)
KERNEL(settle, Entries, settle_entries)
KERNEL(keep, Entries, keep_entries)
KERNEL(pack, Entries, pack_entries)
KERNEL(unpack, Entries, unpack_entries)
