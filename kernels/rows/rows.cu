// Sums of rows that have the same index, in float32, of rows sorted by their index (sort.cu).
//
// The sorted rows are cut into windows of WINDOW. `windows`: a thread has one column of a window,
// and adds its rows in their order; runs that lie in the window are complete. What is left are a
// run's first rows (`tail` of the window in which it begins) and its rows in later windows (`head`
// of each), which `join` adds in the order of the windows. So the order of a sum is fixed by the
// sorted places: within windows, then window by window; and a row that occurs often holds up a
// thread for a WINDOW-th of its times. Launches follow each other on one stream. Bounds: rows are
// read at places below n, and written at runs below their number; with `table` at rows that
// `histogram` has checked.
#include "gpu/block.h"
#include "gpu/element.h"

#ifndef INDEX
#define INDEX int
#endif

enum { WINDOW = 32, AHEAD = 8 };  // rows; loads of a thread in flight

struct Rows {
    const ELEMENT* values;  // [n][width]
    const u32* order;  // [n]: where each sorted row comes from
    const u32* run;  // [n]
    const INDEX* unique;  // [runs]
    ELEMENT* sums;  // [runs][width], or 0:
    float* table;  // [rows][width], to which the sums are added
    float* head;  // [windows][width]
    float* tail;
    u64 n;
    u64 width;
};

__device__ __forceinline__ void put(const Rows& a, u32 run, u64 column, float sum) {
    if (a.table) a.table[u64(a.unique[run]) * a.width + column] += sum;
    else narrow(sum, a.sums[u64(run) * a.width + column]);
}

__device__ __forceinline__ void add_windows(const Rows& a) {
    const u64 windows = (a.n + WINDOW - 1) / WINDOW, stride = u64(gridDim.x) * blockDim.x;
    for (u64 id = u64(blockIdx.x) * blockDim.x + threadIdx.x; id < windows * a.width;
         id += stride) {
        const u64 w = id / a.width, column = id % a.width, start = w * WINDOW;
        const u64 stop = start + WINDOW < a.n ? start + WINDOW : a.n;
        u32 run = a.run[start];
        bool begun = start && a.run[start - 1] == run;  // in an earlier window
        float sum = 0;
#pragma unroll 1
        for (u64 i = start; i < stop; i += AHEAD) {
            float row[AHEAD];
            u32 of[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const bool here = i + u < stop;
                of[u] = here ? a.run[i + u] : 0;
                row[u] = here ? widen(a.values[u64(a.order[i + u]) * a.width + column]) : 0.f;
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (i + u >= stop) break;
                if (of[u] != run) {
                    if (begun) a.head[id] = sum;
                    else put(a, run, column, sum);
                    run = of[u];
                    begun = false;
                    sum = 0;
                }
                sum += row[u];
            }
        }
        const bool ends = stop == a.n || a.run[stop] != run;
        if (begun) a.head[id] = sum;
        else if (ends) put(a, run, column, sum);
        else a.tail[id] = sum;
    }
}

__device__ __forceinline__ void join_windows(const Rows& a) {
    const u64 windows = (a.n + WINDOW - 1) / WINDOW, stride = u64(gridDim.x) * blockDim.x;
    for (u64 id = u64(blockIdx.x) * blockDim.x + threadIdx.x; id < windows * a.width;
         id += stride) {
        const u64 w = id / a.width, column = id % a.width, start = w * WINDOW;
        u64 stop = start + WINDOW;
        if (stop >= a.n) continue;
        const u32 run = a.run[stop - 1];
        if (a.run[stop] != run) continue;  // none goes on
        if (a.run[start] == run && start && a.run[start - 1] == run) continue;  // not begun here
        float sum = a.tail[id];
        for (u64 next = w + 1; stop < a.n && a.run[stop] == run; ++next, stop += WINDOW)
            sum += a.head[next * a.width + column];
        put(a, run, column, sum);
    }
}

KERNEL(windows, Rows, add_windows)
KERNEL(join, Rows, join_windows)
