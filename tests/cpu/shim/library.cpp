// The kernels as a library: one launch, over when it returns.
#include "table.h"

extern "C" void launch(int dtype, int op, const Launch* launch, unsigned blocks, unsigned threads) {
    const Launch copy = *launch;
    shim::launch(blocks, threads, [&] { kernels[dtype][op](copy); });
}

extern "C" void check(const Check* argument, unsigned blocks, unsigned threads) {
    const Check copy = *argument;
    shim::launch(blocks, threads, [&] { await_layer(copy); });
}
