// CUDA on the host. Included before the kernels' sources by the compiler's command line; defines
// what sync.h defines for a GPU.
//
// Built with a sanitizer, every thread of every block is an OS thread, all at once. Built without,
// a launch's threads take turns on one OS thread, in an order that changes from turn to turn: they
// change over at barriers and where they wait, which costs no system's scheduler and no time on a
// busy machine.
//
// Lines are relaxed, as on the GPU, where they are still ordered behind all that their block has
// released, and by dependencies: a line depends on the loads before it, and stores behind it depend
// on the line. The thread sanitizer is told of what was released (`Messenger`), but it does not
// model dependencies, so the driver checks launches in two ways (`ordered_lines`).
#pragma once
#define HOST_SHIM
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include <sched.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define OS_THREADS
#include <mutex>
#include <thread>

#include <pthread.h>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#else
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __popc __builtin_popcount
#define __ffs __builtin_ffs

struct uint4 { unsigned x, y, z, w; };

namespace shim {
struct Index { unsigned x; };
constexpr unsigned WARP = 32;
#ifdef OS_THREADS
struct Barrier {  // C++20 has one, but its headers take longer to compile than the kernels
    pthread_barrier_t barrier;
    explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier); }
};
#else
struct Barrier {
    unsigned threads, arrived = 0, passed = 0;  // how many have arrived; how often it was opened
    explicit Barrier(unsigned threads) : threads(threads) {}
};
#endif
struct Block {
    std::vector<char> storage;
    std::atomic<int> any[3] = {};  // __syncthreads_or
    std::vector<uint64_t> values;  // of each thread, for its warp
    Barrier barrier;
    std::deque<Barrier> warps;
#ifdef OS_THREADS
    std::mutex mutex;
#endif
    explicit Block(unsigned threads) : values(threads), barrier(threads) {
        for (unsigned first = 0; first < threads; first += WARP)
            warps.emplace_back(std::min(WARP, threads - first));
    }
};
inline bool ordered_lines = false;  // lines are acquired and released
inline thread_local Index thread_index, block_index, block_size, grid_size;
inline thread_local Block* block;

// The block's one shared variable. Filled with rubbish: shared memory is not cleared.
template <class T> T& shared() {
#ifdef OS_THREADS
    std::lock_guard<std::mutex> guard(block->mutex);
#endif
    if (block->storage.empty()) block->storage.assign(sizeof(T) + 64, char(0xa5));
    const uintptr_t at = reinterpret_cast<uintptr_t>(block->storage.data());
    return *reinterpret_cast<T*>((at + 63) & ~uintptr_t(63));
}

#ifdef __SANITIZE_THREAD__
// What a thread's lines pass on: what its block has released and what it has read from lines, but
// nothing else that the thread has done since it began.
struct Messenger {
    void* const fiber = __tsan_create_fiber(0);
    ~Messenger() { __tsan_destroy_fiber(fiber); }
};
inline thread_local Messenger messenger;
#define UNSEEN __attribute__((no_sanitize("thread"))) inline  // the fiber reads the thread's stack
UNSEEN void switch_to(void* fiber) {
    __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
inline void begin_thread() { (void)messenger.fiber; }
inline void released() {
    if (block) __tsan_release(block);  // the driver's own threads have none
}
UNSEEN void write_line(void* line) {
    void* const thread = __tsan_get_current_fiber();
    switch_to(messenger.fiber);
    __tsan_acquire(block);
    __tsan_release(line);
    switch_to(thread);
}
UNSEEN void read_line(void* line) {
    void* const thread = __tsan_get_current_fiber();
    __tsan_acquire(line);
    switch_to(messenger.fiber);
    __tsan_acquire(line);
    switch_to(thread);
}
#else
inline void begin_thread() {}
inline void released() {}
inline void write_line(void*) {}
inline void read_line(void*) {}
#endif

#ifdef OS_THREADS
inline void meet(Barrier& barrier) { pthread_barrier_wait(&barrier.barrier); }
inline unsigned& turn() {
    static thread_local unsigned mine = 0;
    return mine;
}
inline void pause() { sched_yield(); }

template <class F> void run(std::vector<Block*>& all, unsigned threads, F kernel) {
    std::vector<std::thread> running;
    const unsigned blocks = unsigned(all.size());
    for (unsigned b = 0; b < blocks; ++b)
        for (unsigned t = 0; t < threads; ++t)
            running.emplace_back([=, mine = all[b]] {
                block = mine;
                thread_index = {t}, block_index = {b}, block_size = {threads}, grid_size = {blocks};
                begin_thread();
                kernel();
            });
    for (auto& thread : running) thread.join();
}
#else
constexpr size_t STACK = 256 << 10;

struct Fiber {
    ucontext_t context;
    Index thread_index, block_index;
    Block* block;
    const Barrier* waits = nullptr;  // where it is
    unsigned passed = 0;  // how often that had been opened when it arrived
    unsigned turn = 0;  // __syncthreads_or
    bool done = false;
};

struct Turns {
    ucontext_t main;
    Fiber* now;
    bool moved;  // since all had their turn, somebody came to a barrier, or to the end
    void (*call)(const void*);
    const void* kernel;
};
inline thread_local Turns turns;

inline void change_over() { swapcontext(&turns.now->context, &turns.main); }
inline void pause() { change_over(); }
inline unsigned& turn() { return turns.now->turn; }
inline void meet(Barrier& barrier) {
    Fiber& mine = *turns.now;
    turns.moved = true;
    mine.waits = &barrier;  // the last one too: it does not always go on first
    mine.passed = barrier.passed;
    if (++barrier.arrived == barrier.threads) {
        barrier.arrived = 0;
        ++barrier.passed;
    }
    change_over();
}
inline void begin() {
    turns.call(turns.kernel);
    turns.now->done = turns.moved = true;
}

template <class F> void run(std::vector<Block*>& all, unsigned threads, F kernel) {
    std::vector<Fiber> fibers(all.size() * threads);
    char* const stacks = new char[fibers.size() * STACK];  // touched only as far as they grow
    turns.call = [](const void* kernel) { (*static_cast<const F*>(kernel))(); };
    turns.kernel = &kernel;
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread_index = {unsigned(i % threads)}, fiber.block_index = {unsigned(i / threads)};
        fiber.block = all[i / threads];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &turns.main;
        makecontext(&fiber.context, begin, 0);
    }
    block_size = {threads}, grid_size = {unsigned(all.size())};
    uint64_t order = 1;
    unsigned idle = 0;
    for (size_t left = fibers.size(), n = left; left;) {
        order = order * 6364136223846793005u + 1442695040888963407u;
        const size_t start = (order >> 33) % n;
        const bool down = order >> 63;
        turns.moved = false;
        for (size_t k = 0; k < n; ++k) {
            Fiber& fiber = fibers[(start + (down ? n - k : k)) % n];
            if (fiber.done || (fiber.waits && fiber.passed == fiber.waits->passed)) continue;
            fiber.waits = nullptr;
            turns.now = &fiber;
            block = fiber.block;
            thread_index = fiber.thread_index, block_index = fiber.block_index;
            swapcontext(&turns.main, &fiber.context);
            left -= fiber.done;
        }
        idle = turns.moved ? 0 : idle + 1;
        if (idle > 32) sched_yield();  // what they wait for comes from another launch
    }
    delete[] stacks;
}
#endif

template <class F> void launch(unsigned blocks, unsigned threads, F kernel) {
    std::vector<Block*> all;
    for (unsigned b = 0; b < blocks; ++b) all.push_back(new Block(threads));
    run(all, threads, kernel);
    for (const Block* of : all) delete of;
}
}  // namespace shim

#define threadIdx (::shim::thread_index)
#define blockIdx (::shim::block_index)
#define blockDim (::shim::block_size)
#define gridDim (::shim::grid_size)
#define SHARED(T, name) T& name = ::shim::shared<T>()

inline void __syncthreads() { ::shim::meet(::shim::block->barrier); }
// Whether any thread of the block says so. Of three words one is written, one read and one cleared.
inline int __syncthreads_or(int mine) {
    std::atomic<int>* const words = ::shim::block->any;
    const unsigned turn = ::shim::turn()++ % 3;
    if (mine) words[turn].store(1, std::memory_order_relaxed);
    __syncthreads();
    const int any = words[turn].load(std::memory_order_relaxed);
    words[(turn + 2) % 3].store(0, std::memory_order_relaxed);
    return any;
}
inline uint32_t ld_acquire_sys(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void st_release_sys(uint32_t* p, uint32_t v) {
    ::shim::released();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void st_relaxed_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline unsigned long long ld_line(const unsigned long long* p) {
    if (::shim::ordered_lines) return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    const unsigned long long line = __atomic_load_n(p, __ATOMIC_RELAXED);
    ::shim::read_line(const_cast<unsigned long long*>(p));
    return line;
}
inline void st_line(unsigned long long* p, unsigned long long v) {
    if (::shim::ordered_lines) return __atomic_store_n(p, v, __ATOMIC_RELEASE);
    ::shim::write_line(p);
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
struct Lines { unsigned long long first, second; };
inline void ld_lines(Lines& v, const unsigned char* p, bool on) {
    const auto line = reinterpret_cast<const unsigned long long*>(p);
    if (on) v = {ld_line(line), ld_line(line + 1)};
}
inline void st_lines(unsigned char* p, Lines v) {
    const auto line = reinterpret_cast<unsigned long long*>(p);
    st_line(line, v.first);
    st_line(line + 1, v.second);
}
inline unsigned long long clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline void spin_pause() { ::shim::pause(); }
inline void in_global_memory(const void*) {}
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
inline unsigned warp_size() { return std::min(::shim::WARP, ::shim::block_size.x); }
template <class T> T scan_warp(T v, T& total) {
    ::shim::Block& mine = *::shim::block;
    const unsigned t = ::shim::thread_index.x, first = t / ::shim::WARP * ::shim::WARP;
    mine.values[t] = v;
    ::shim::meet(mine.warps[t / ::shim::WARP]);
    T before = total = 0;
    for (unsigned i = first; i < first + ::shim::WARP && i < mine.values.size(); ++i) {
        if (i == t) before = total;
        total += T(mine.values[i]);
    }
    ::shim::meet(mine.warps[t / ::shim::WARP]);
    return before;
}
inline void sync_warp() { ::shim::meet(::shim::block->warps[::shim::thread_index.x / ::shim::WARP]); }
inline uint32_t same_in_warp(uint32_t v) {
    ::shim::Block& mine = *::shim::block;
    const unsigned t = ::shim::thread_index.x, first = t / ::shim::WARP * ::shim::WARP;
    mine.values[t] = v;
    sync_warp();
    uint32_t same = 0;
    for (unsigned i = first; i < first + ::shim::WARP && i < mine.values.size(); ++i)
        same |= uint32_t(mine.values[i] == v) << (i - first);
    sync_warp();
    return same;
}
#define KERNEL(name, T, body)                                                         \
    extern "C" void name(const T* argument, unsigned blocks, unsigned threads) {      \
        const T a = *argument;                                                        \
        shim::launch(blocks, threads, [&] { body(a); });                              \
    }
inline float half_bits_to_float(unsigned short h) {
    float f;
    asm("vmovd %1, %0\n\tvcvtph2ps %0, %0" : "=x"(f) : "r"(unsigned(h)));
    return f;
}
inline unsigned short float_to_half_bits(float f) {
    unsigned h;
    asm("vcvtps2ph $0, %1, %1\n\tvmovd %1, %0" : "=r"(h), "+x"(f));
    return (unsigned short)h;
}
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
