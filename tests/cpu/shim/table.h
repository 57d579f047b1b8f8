// The plan interpreter for each (dtype, op), in the order in which the tests number them.
#pragma once
#include "plan/plan.cu"
#include "plan/queue.cu"

typedef void (*Kernel)(const Launch&);
#ifdef ALL
#define ROW(T) run<T, sum>, run<T, min_>, run<T, max_>, run<T, prod>
#define INTS(T) {ROW(T), run<T, and_>, run<T, or_>, run<T, xor_>}
static const Kernel kernels[10][7] = {{ROW(float)}, {ROW(double)}, {ROW(float16)}, {ROW(bfloat16)},
                                     {ROW(float8_e4m3fn)}, {ROW(float8_e5m2)},
                                     INTS(signed char), INTS(u8), INTS(int), INTS(i64)};
#else
static const Kernel kernels[1][1] = {run<ELEMENT, OP>};
#endif
