// Dequeue a layer: the stream continues once its gradients are final (C-Cube, section III-D,
// `check`).
//
// The plan interpreter counts the chunks that each thread block has completed. It stores a block's
// counter with release after the chunk's data, and this kernel loads it with acquire, so later work
// on the stream sees the data. The kernel is a single block, for which the host leaves one
// multiprocessor free, since all of the interpreter's blocks must be resident at the same time. If
// a counter does not change for `timeout_ns`, twice the interpreter's timeout, the abort word is
// set.
#include "gpu/sync.h"

struct Check {
    const u32* counters;  // [tracks][width]
    const u32* need;  // [tracks]
    u32* stop;  // these two as those of a Launch
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
            if (++spins % SPINS) continue;
            if (stopped(c.stop, c.abort, spins)) return;
            if (now != before) {
                before = now;
                since = clock_ns();
            } else if (clock_ns() - since > c.timeout_ns) {
                stop_all(c.stop, c.abort);
                return;
            }
        }
    }
}

#ifndef HOST_SHIM
extern "C" __global__ void __launch_bounds__(128) check(const Check c) { await_layer(c); }
#endif
