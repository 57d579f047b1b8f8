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
            u32 of[AHEAD], from[AHEAD];
            Sum row[AHEAD];
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u) {
                const u32 on = u < stop - i ? u : 0;  // a branch would wait for loads
                of[u] = a.run[i + on];
                from[u] = a.order[i + on];
            }
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u)
                row[u] = widen(a.values[from[u] * a.width + column]);
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u) {
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
        const u64 stop = start + WINDOW;
        if (stop >= a.n) continue;
        const u32 run = a.run[stop - 1];
        if (a.run[stop] != run) continue;  // no run continues in the next window
        if (a.run[start] == run && start && a.run[start - 1] == run) continue;  // it began earlier
        Sum sum = a.tail[id];
        bool on[AHEAD] = {};  // whether the run continues in a window; it may do so in thousands
        u64 next = w + 1;
        do {
            Sum head[AHEAD];
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u) {
                const u64 at = (next + u) * WINDOW;
                on[u] = (a.run[at < a.n ? at : start] == run) & (at < a.n);
            }
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u)
                head[u] = a.head[(on[u] ? next + u : w) * a.width + column];
#pragma unroll
            for (u32 u = 0; u < AHEAD; ++u)
                if (on[u]) sum += head[u];
            next += AHEAD;
        } while (on[AHEAD - 1]);
        put(a, run, column, sum);
    }
}

KERNEL(windows, Rows, add_windows)
KERNEL(join, Rows, join_windows)
