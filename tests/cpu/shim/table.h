// The plan interpreter for each (dtype, op), in the order in which the tests number them.
#pragma once
#include "plan/plan.cu"
#include "plan/queue.cu"

typedef void (*Kernel)(const Launch&);
#ifdef ALL
#define ROW(T) {run<T, sum>, run<T, min_>, run<T, max_>, run<T, prod>}
static const Kernel kernels[10][4] = {ROW(float), ROW(double), ROW(float16), ROW(bfloat16),
                                     ROW(float8_e4m3fn), ROW(float8_e5m2),
                                     ROW(signed char), ROW(u8), ROW(int), ROW(i64)};
#else
static const Kernel kernels[1][1] = {run<ELEMENT, OP>};
#endif
