// Sums of rows that have the same index, in float32, or in float64 of float64; sort.cu has sorted
// the rows by index.
//
// The sorted rows are divided into windows of WINDOW. In `windows`, a thread adds the rows of one
// window in one column, in order. A run that lies within the window is complete; otherwise its sum
// goes to `tail` of the window in which it begins, and to `head` of each later window. `join` adds
// these in the order of the windows. So the order of summation is fixed by the sorted positions:
// within windows, then window by window. All launches go to one stream.
// Bounds: rows are read at positions below n and written at runs below their number.
#include "gpu/block.h"
#include "gpu/element.h"

enum { WINDOW = 32, AHEAD = 8 };  // rows per window; loads in flight per thread

typedef Wide<ELEMENT>::type Sum;

struct Rows {
    const ELEMENT* values;  // [n][width]
    const u32* order;  // [n]: the position in `values` of each sorted row
    const u32* run;  // [n]: the run of each sorted row
    ELEMENT* sums;  // [runs][width]
    Sum* head;  // [windows][width]
    Sum* tail;
    u64 n;
    u64 width;
};

__device__ __forceinline__ void put(const Rows& a, u32 run, u64 column, Sum sum) {
    narrow(sum, a.sums[u64(run) * a.width + column]);
}

__device__ __forceinline__ void add_windows(const Rows& a) {
    const u64 windows = (a.n + WINDOW - 1) / WINDOW;
    EACH(id, windows * a.width) {
        const u64 w = id / a.width, column = id % a.width, start = w * WINDOW;
        const u64 stop = start + WINDOW < a.n ? start + WINDOW : a.n;
        u32 run = a.run[start];
        bool begun = start && a.run[start - 1] == run;  // the run began in an earlier window
        Sum sum = 0;
#pragma unroll 1
        for (u64 i = start; i < stop; i += AHEAD) {
            Sum row[AHEAD];
            u32 of[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const bool here = i + u < stop;
                of[u] = here ? a.run[i + u] : 0;
                row[u] = here ? widen(a.values[u64(a.order[i + u]) * a.width + column]) : 0;
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
    const u64 windows = (a.n + WINDOW - 1) / WINDOW;
    EACH(id, windows * a.width) {
        const u64 w = id / a.width, column = id % a.width, start = w * WINDOW;
        u64 stop = start + WINDOW;
        if (stop >= a.n) continue;
        const u32 run = a.run[stop - 1];
        if (a.run[stop] != run) continue;  // no run continues in the next window
        if (a.run[start] == run && start && a.run[start - 1] == run) continue;  // it began earlier
        Sum sum = a.tail[id];
        for (u64 next = w + 1; stop < a.n && a.run[stop] == run; ++next, stop += WINDOW)
            sum += a.head[next * a.width + column];
        put(a, run, column, sum);
    }
}

KERNEL(windows, Rows, add_windows)
KERNEL(join, Rows, join_windows)
