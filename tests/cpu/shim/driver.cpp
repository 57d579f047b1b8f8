// Runs launches of the plan interpreter that a test wrote into a file ("image").
//
// An image is a list of segments, each of which becomes one allocation of exactly its size, so that
// the address sanitizer sees every step beyond it. Addresses in it are (segment + 1) << 40 | offset
// and are listed; the driver puts the real ones in their place. All numbers are u64:
//   segments, then for each its size and bytes; addresses, then (segment, offset) of each;
//   launches, then for each the segment of its Launch, blocks, threads, dtype, op.
// Then every segment is written back, in order, to the second file. With a third argument the
// abort word, the first one of that segment, is raised after 100 ms. `--layout` prints layouts.
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <thread>

#include "table.h"

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
    FIELD(Launch, tracks), FIELD(Launch, abort), FIELD(Launch, finals), FIELD(Launch, timeout_ns);
    FIELD(Launch, width);
    FIELD(Launch, num_chunks), FIELD(Launch, stride), FIELD(Launch, slots), FIELD(Launch, stripe);
    FIELD(Launch, low_latency), FIELD(Launch, divisor), FIELD(Launch, ps_per_byte);
    FIELD(Launch, direct), FIELD(Launch, pad);
    FIELD(Launch, buffers), FIELD(Launch, inputs);
    FIELD(Check, counters), FIELD(Check, need), FIELD(Check, abort), FIELD(Check, timeout_ns);
    FIELD(Check, tracks), FIELD(Check, width);
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
    for (u64 n = image.number(); n--;) {
        const u64 segment = image.number(), blocks = image.number(), threads = image.number();
        const u64 dtype = image.number(), op = image.number();
        const Launch& launch = *reinterpret_cast<const Launch*>(segments[segment].get());
        shim::launch(blocks, threads, [&] { kernels[dtype][op](launch); });
    }
    if (aborting.joinable()) aborting.join();
    std::ofstream out(argv[2], std::ios::binary);
    for (size_t i = 0; i < segments.size(); ++i)
        out.write(reinterpret_cast<char*>(segments[i].get()), std::streamsize(sizes[i]));
    return 0;
}
