// Dequeue: the stream goes on once a layer's gradients are final (C-Cube, section III-D, `check`).
//
// The plan interpreter counts the chunks that each block has made final; a block's counter is raised
// with release behind the chunk's data, and loaded with acquire here, so what follows this kernel
// on its stream sees the data. One block: the interpreter's blocks must be resident all at once
// beside it, for which the host leaves a multiprocessor free. A counter that stands still for
// `timeout_ns`, twice the interpreter's own deadline, raises the abort word; no wait is longer.
#include "gpu/sync.h"

struct Check {
    const u32* counters;  // [tracks][width]
    const u32* need;  // [tracks]
    u32* abort;
    u64 timeout_ns;
    u32 tracks;
    u32 width;
};

__device__ __forceinline__ void await_layer(const Check& c) {
    for (u32 i = threadIdx.x; i < c.tracks * c.width; i += blockDim.x) {
        u64 since = clock_ns();
        u32 before = 0, spins = 0;
        for (;;) {
            const u32 now = ld_acquire_sys(c.counters + i);
            if (int(now - c.need[i / c.width]) >= 0) break;
            spin_pause();
            if (++spins % 256) continue;
            if (ld_acquire_sys(c.abort)) return;
            if (now != before) {
                before = now;
                since = clock_ns();
            } else if (clock_ns() - since > c.timeout_ns) {
                st_release_sys(c.abort, 1);
                return;
            }
        }
    }
}

#ifndef HOST_SHIM
extern "C" __global__ void __launch_bounds__(128) check(const Check c) { await_layer(c); }
#endif
