// Sparse vectors: copies of the caller's entries, their residual, and messages.
//
// `admit` copies a caller's entries, widened to float, and counts indices that do not ascend or are
// out of range. `settle` rounds values to ELEMENT (to nearest even; finite values stay finite) and
// writes the rounding errors; `keep` adds entries to a residual. `pack` and `unpack` copy
// entries to and from a message, whose room behind its entries is filled with PAD; `measure` counts
// the entries before PAD. All launches go to one stream.
// Bounds: one thread accesses entry i of n. The residual is accessed at indices below `limit` only;
// a vector's are distinct, so no two threads add to the same element.
#include "gpu/block.h"
#include "gpu/element.h"

struct Entries {
    float* values;  // [n]
    int* indices;  // [n]
    ELEMENT* far_values;  // [n] of the caller, or [room] of a message
    int* far_indices;  // the same; for `keep`: [room] to be compared with
    u64* number;  // of wrong entries (`admit`), of entries (`measure`)
    float* residual;  // [limit]; for `settle`: errors [n]
    u64 n;
    u64 room;
    u64 limit;
    u64 which;  // entries that `keep` adds: ALL, or those whose index is COMMON to both, or FOREIGN
};

enum { ALL, COMMON, FOREIGN };
enum { PAD = 0x7fffffff };  // the index of what is no entry

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
            count_up(a.number, u64(1));
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
    EACH(i, a.n) {
        const int index = a.indices[i];
        if (index < 0 || u64(index) >= a.limit) continue;
        if (a.which != ALL) {
            const u64 at = below(a.far_indices, a.room, index);
            const bool common = at < a.room && a.far_indices[at] == index;
            if (common != (a.which == COMMON)) continue;
        }
        a.residual[index] += a.values[i];
    }
}

__device__ __forceinline__ void pack_entries(const Entries& a) {
    EACH(i, a.room) {
        narrow(i < a.n ? a.values[i] : 0, a.far_values[i]);
        a.far_indices[i] = i < a.n ? a.indices[i] : int(PAD);
    }
}

__device__ __forceinline__ void unpack_entries(const Entries& a) {
    EACH(i, a.n) {
        a.values[i] = widen(a.far_values[i]);
        a.indices[i] = a.far_indices[i];
    }
}

__device__ __forceinline__ void measure_entries(const Entries& a) {
    EACH(i, a.n)
        if (a.indices[i] != PAD && (i + 1 == a.n || a.indices[i + 1] == PAD)) *a.number = i + 1;
}

KERNEL(admit, Entries, admit_entries)
KERNEL(settle, Entries, settle_entries)
KERNEL(keep, Entries, keep_entries)
KERNEL(pack, Entries, pack_entries)
KERNEL(unpack, Entries, unpack_entries)
KERNEL(measure, Entries, measure_entries)
