// CUDA on the host: every thread of every block is an OS thread, all at once. Included before the
// kernels' sources by the compiler's command line; defines what sync.h defines for a GPU.
//
// Lines are acquired and released here, though the GPU's are relaxed: their order comes from the
// data they carry, which the sanitizer does not model.
#pragma once
#define HOST_SHIM
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <sched.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __popc __builtin_popcount

struct uint4 { unsigned x, y, z, w; };

namespace shim {
struct Index { unsigned x; };
struct Block {
    std::barrier<> barrier;
    std::mutex mutex;
    std::unique_ptr<char[]> storage;
    std::vector<uint64_t> votes;  // of each thread: how often, and over which words
    explicit Block(unsigned threads) : barrier(threads), votes(threads) {}
};
inline bool partial_vote = false;  // some lanes of a warp voted without the others
inline thread_local Index thread_index, block_index, block_size, grid_size;
inline thread_local Block* block;

// The block's one shared variable. Filled with rubbish: shared memory is not cleared.
template <class T> T& shared() {
    std::lock_guard<std::mutex> guard(block->mutex);
    if (!block->storage) {
        block->storage.reset(new char[sizeof(T) + 64]);
        std::memset(block->storage.get(), 0xa5, sizeof(T) + 64);
    }
    const uintptr_t at = reinterpret_cast<uintptr_t>(block->storage.get());
    return *reinterpret_cast<T*>((at + 63) & ~uintptr_t(63));
}

template <class F> void launch(unsigned blocks, unsigned threads, F kernel) {
    std::vector<std::unique_ptr<Block>> all;
    std::vector<std::thread> running;
    for (unsigned b = 0; b < blocks; ++b) {
        all.emplace_back(new Block(threads));
        for (unsigned t = 0; t < threads; ++t)
            running.emplace_back([=, mine = all.back().get()] {
                block = mine;
                thread_index = {t}, block_index = {b}, block_size = {threads}, grid_size = {blocks};
                kernel();
            });
    }
    for (auto& thread : running) thread.join();
    for (auto& of : all)
        for (unsigned t = 0; t < threads && threads % 32 == 0; ++t)
            if (of->votes[t] != of->votes[t / 32 * 32]) partial_vote = true;
}
}  // namespace shim
extern "C" bool voted_in_part() { return shim::partial_vote; }

#define threadIdx (::shim::thread_index)
#define blockIdx (::shim::block_index)
#define blockDim (::shim::block_size)
#define gridDim (::shim::grid_size)
#define SHARED(T, name) T& name = ::shim::shared<T>()

inline void __syncthreads() { ::shim::block->barrier.arrive_and_wait(); }
inline uint32_t ld_acquire_sys(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void st_release_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void st_relaxed_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline unsigned long long ld_line(const unsigned long long* p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void st_line(unsigned long long* p, unsigned long long v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline unsigned long long clock_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
inline void spin_pause() { sched_yield(); }
inline void raise(uint32_t* p) { __atomic_store_n(p, 1, __ATOMIC_RELAXED); }
inline uint32_t count_up(uint32_t* p, uint32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline unsigned long long count_up(unsigned long long* p, unsigned long long v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline void count_down_to(unsigned long long* p, unsigned long long v) {
    unsigned long long now = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < now && !__atomic_compare_exchange_n(p, &now, v, true, __ATOMIC_RELAXED,
                                                   __ATOMIC_RELAXED)) {}
}
inline uint32_t write_bit(uint32_t* words, unsigned long long i, bool on) {
    uint64_t& votes = ::shim::block->votes[::shim::thread_index.x];
    votes = votes * 1000003 + i / 32 + 1;
    const uint32_t bit = 1u << i % 32;
    if (on) __atomic_fetch_or(words + i / 32, bit, __ATOMIC_RELAXED);
    else __atomic_fetch_and(words + i / 32, ~bit, __ATOMIC_RELAXED);
    return on;
}
#define KERNEL(name, T, body)                                                         \
    extern "C" void name(const T* argument, unsigned blocks, unsigned threads) {      \
        const T a = *argument;                                                        \
        shim::launch(blocks, threads, [&] { body(a); });                              \
    }
inline float half_bits_to_float(unsigned short h) { return _cvtsh_ss(h); }
inline unsigned short float_to_half_bits(float f) { return _cvtss_sh(f, 0); }
inline uint32_t float_bits(float f) {
    uint32_t b;
    std::memcpy(&b, &f, 4);
    return b;
}
inline float bits_float(uint32_t b) {
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}
