// Sparse vectors: copies of the caller's entries, their residual, and messages.
//
// `admit` copies a caller's entries, widened to float, and counts indices that do not ascend or are
// out of range. `settle` rounds values to ELEMENT (to nearest even; finite values stay finite) and
// writes the rounding errors; `keep` adds entries to a residual. `pack` and `unpack` copy
// entries to and from a message. All launches go to one stream.
// Bounds: one thread accesses entry i of n. The residual is accessed at indices that `admit` has
// checked; these are distinct, so no two threads add to the same element.
#include "gpu/block.h"
#include "gpu/element.h"

struct Entries {
    float* values;  // [n]
    int* indices;  // [n]
    ELEMENT* far_values;  // [n] of a message or of the caller
    int* far_indices;  // [n]
    u64* head;  // of a message: n; for `admit`: the number of wrong entries
    float* residual;  // [limit]; for `settle`: errors [n]
    u64 n;
    u64 limit;
};

__device__ __forceinline__ bool finite(float v) { return v - v == 0; }

// The nearest value of ELEMENT.
__device__ __forceinline__ float carried(float v) {
    const float most = largest(ELEMENT());
    if (finite(v)) v = v > most ? most : v < -most ? -most : v;
    ELEMENT stored;
    narrow(v, stored);
    return widen(stored);
}

__device__ __forceinline__ void admit_entries(const Entries& a) {
    EACH(i, a.n) {
        const i64 index = a.far_indices[i];
        if (index < 0 || u64(index) >= a.limit || (i && a.far_indices[i - 1] >= index))
            count_up(a.head, u64(1));
        a.values[i] = widen(a.far_values[i]);
        a.indices[i] = int(index);
    }
}

__device__ __forceinline__ void settle_entries(const Entries& a) {
    EACH(i, a.n) {
        const float v = a.values[i], kept = carried(v);
        a.values[i] = kept;
        a.residual[i] = finite(v) ? v - kept : 0;
    }
}

__device__ __forceinline__ void keep_entries(const Entries& a) {
    EACH(i, a.n) a.residual[a.indices[i]] += a.values[i];
}

__device__ __forceinline__ void pack_entries(const Entries& a) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.head = a.n;
    EACH(i, a.n) {
        narrow(a.values[i], a.far_values[i]);
        a.far_indices[i] = a.indices[i];
    }
}

__device__ __forceinline__ void unpack_entries(const Entries& a) {
    EACH(i, a.n) {
        a.values[i] = widen(a.far_values[i]);
        a.indices[i] = a.far_indices[i];
    }
}

KERNEL(admit, Entries, admit_entries)
KERNEL(settle, Entries, settle_entries)
KERNEL(keep, Entries, keep_entries)
KERNEL(pack, Entries, pack_entries)
KERNEL(unpack, Entries, unpack_entries)
