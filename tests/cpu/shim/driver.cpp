// Runs launches of the plan interpreter that a test wrote into a file ("image").
//
// An image is a list of segments, each of which becomes one allocation of exactly its size, so that
// the address sanitizer sees every step beyond it. Addresses in it are (segment + 1) << 40 | offset
// and are listed; the driver puts the real ones in their place. All numbers are u64:
//   segments, then for each its size and bytes; addresses, then (segment, offset) of each;
//   launches, then for each the segment of its Launch, blocks, threads, dtype, op.
// Then every segment is written back, in order, to the second file. With a third argument the
// abort word, the first one of that segment, is raised after 100 ms. It prints how many seconds the
// launches took; with `--layout`, layouts.
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <thread>

#include "table.h"

// In an image's first launch, lines are acquired and released. They then order a load and a later
// store, as dependencies do on the GPU, but also accesses that nothing orders there. Later launches
// find these: lines are relaxed, and a store after a load is no race.
#ifdef __SANITIZE_THREAD__
static bool dependent_stores = false;

extern "C" int __tsan_get_report_mop(void* report, uintptr_t index, int* thread, void** address,
                                     int* size, int* write, int* atomic, void** trace,
                                     uintptr_t trace_size);
namespace __tsan {
class ReportDesc;
// Whether a race is not reported. The sanitizer's runtime calls it.
bool OnReport(const ReportDesc* report, bool suppressed) {
    int thread, size, write[2] = {}, atomic[2] = {};
    void *address, *trace[1];
    for (int i = 0; i < 2; ++i)  // the access that is a race, and the one before it
        __tsan_get_report_mop(const_cast<ReportDesc*>(report), i, &thread, &address, &size,
                              write + i, atomic + i, trace, 1);
    const bool plain = !atomic[0] && !atomic[1];
    return suppressed || (dependent_stores && plain && write[0] && !write[1]);
}
}  // namespace __tsan
#endif

struct Image {
    std::ifstream in;
    u64 number() {
        u64 v = 0;
        in.read(reinterpret_cast<char*>(&v), 8);
        return v;
    }
};

#define FIELD(S, f) std::printf(#S " " #f " %zu %zu\n", offsetof(S, f), sizeof(S::f))
static int layout() {
    FIELD(End, slot), FIELD(End, ready), FIELD(End, free), FIELD(End, peer), FIELD(End, pad);
    FIELD(Cursor, waited), FIELD(Cursor, moved), FIELD(Cursor, signalled), FIELD(Cursor, slot);
    FIELD(Track, code), FIELD(Track, ends), FIELD(Track, cursors), FIELD(Track, chunks);
    FIELD(Track, report), FIELD(Track, rank), FIELD(Track, num_ends), FIELD(Track, code_words);
    FIELD(Track, pad);
    FIELD(Launch, tracks), FIELD(Launch, stop), FIELD(Launch, abort), FIELD(Launch, finals);
    FIELD(Launch, timeout_ns), FIELD(Launch, width);
    FIELD(Launch, num_chunks), FIELD(Launch, stride), FIELD(Launch, slots), FIELD(Launch, stripe);
    FIELD(Launch, low_latency), FIELD(Launch, divisor), FIELD(Launch, ps_per_byte);
    FIELD(Launch, direct), FIELD(Launch, pad);
    FIELD(Launch, buffers), FIELD(Launch, inputs);
    FIELD(Check, counters), FIELD(Check, need), FIELD(Check, stop), FIELD(Check, abort);
    FIELD(Check, timeout_ns), FIELD(Check, tracks), FIELD(Check, width);
    std::printf("sizeof End %zu\nsizeof Cursor %zu\n", sizeof(End), sizeof(Cursor));
    std::printf("sizeof Track %zu\nsizeof Launch %zu\n", sizeof(Track), sizeof(Launch));
    std::printf("sizeof Check %zu\n", sizeof(Check));
    std::printf("Field %d %d %d %d %d %d %d %d\n", LENGTH, CHUNK, FLAGS, NUM_WAITS, NUM_OPERANDS,
                NUM_OUTPUTS, NUM_SIGNALS, HEADER);
    std::printf("State %d %d %d %d %d\n", NOTHING, WAITS, TIMED_OUT, ABORTED, DONE);
    std::printf("limits %d %d %d %d\n", MAX_RANKS, MAX_PEERS, LINE, REPORT);
    std::printf("flags %d %d %d %d %d %d %d %d %d\n", OWN, INPUT, SENDER, DATA, AVERAGES, COMPLETES,
                PUSHED, PUSHES, KEEPS);
    return 0;
}

int main(int argc, char** argv) {
    if (argc == 2 && !std::strcmp(argv[1], "--layout")) return layout();
    Image image{std::ifstream(argv[1], std::ios::binary)};
    std::vector<std::unique_ptr<u8, void (*)(u8*)>> segments;
    std::vector<u64> sizes(image.number());
    for (u64& size : sizes) {
        size = image.number();
        segments.emplace_back(static_cast<u8*>(::operator new(size, std::align_val_t(16))),
                              [](u8* p) { ::operator delete(p, std::align_val_t(16)); });
        image.in.read(reinterpret_cast<char*>(segments.back().get()), std::streamsize(size));
    }
    for (u64 n = image.number(); n--;) {
        const u64 segment = image.number(), offset = image.number();
        u64* at = reinterpret_cast<u64*>(segments[segment].get() + offset);
        if (*at) *at = u64(segments[(*at >> 40) - 1].get()) + (*at & ((u64(1) << 40) - 1));
    }
    std::thread aborting;
    if (argc > 3)
        aborting = std::thread([word = reinterpret_cast<u32*>(segments[std::atoi(argv[3])].get())] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            st_release_sys(word, 1);
        });
    const auto start = std::chrono::steady_clock::now();
    const u64 launches = image.number();
    for (u64 n = 0; n < launches; ++n) {
        const u64 segment = image.number(), blocks = image.number(), threads = image.number();
        const u64 dtype = image.number(), op = image.number();
        const Launch& launch = *reinterpret_cast<const Launch*>(segments[segment].get());
#ifdef __SANITIZE_THREAD__
        shim::ordered_lines = n == 0;
        dependent_stores = launch.low_latency && n;
#endif
        shim::launch(blocks, threads, [&] { kernels[dtype][op](launch); });
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("%.9f\n", taken.count());
    if (aborting.joinable()) aborting.join();
    std::ofstream out(argv[2], std::ios::binary);
    for (size_t i = 0; i < segments.size(); ++i)
        out.write(reinterpret_cast<char*>(segments[i].get()), std::streamsize(sizes[i]));
    return 0;
}
