// Readings of the clock that bounds waits and paces emulated links, which show its resolution.
#include "gpu/block.h"

struct Ticks {
    u64* readings;  // [count], each different from the one before
    u64 count;
};

__device__ __forceinline__ void read_ticks(const Ticks& a) {
    if (threadIdx.x || blockIdx.x) return;
    u64 last = clock_ns();
    for (u64 i = 0; i < a.count; ++i) {
        u64 now = last;
        while (now == last) now = clock_ns();
        a.readings[i] = last = now;
    }
}

KERNEL(ticks, Ticks, read_ticks)
