// The argument of the plan interpreter. collectives/runtime/gpu/launch_tables.py has the same layouts; a
// test compares them.
#pragma once
#include "gpu/sync.h"

#ifndef THREADS
#define THREADS 256
#endif
#ifdef HOST_SHIM
#define BLOCK_SIZE blockDim.x
#else
#define BLOCK_SIZE THREADS  // a constant, so that addresses differ by immediate offsets
#endif

// The words of an action: a thread block waits for counters; barrier; moves data; barrier; raises
// counters. Entries follow the header: waits (chunk, 4 * end + SENDER | DATA), operands and outputs (an end, OWN or
// INPUT; the own chunk is the last output), signals (like waits).
enum Field { LENGTH, CHUNK, FLAGS, NUM_WAITS, NUM_OPERANDS, NUM_OUTPUTS, NUM_SIGNALS, HEADER };
enum { OWN = -1, INPUT = -2 };  // this rank's chunk: of the result, of the call's input
enum { SENDER = 1, DATA = 2 };  // of a wait or signal: we are the sender; there is data
enum Flag {  // of an action
    AVERAGES = 1,  // the result is divided by the number of ranks if the call is an average
    COMPLETES = 2,  // the own chunk is final afterwards
    PUSHED = 4,  // if the launch is direct, the operand is in the own chunk already
    PUSHES = 8,  // if the launch is direct, outputs go to the receivers' buffers
    KEEPS = 16,  // the last output is the own chunk
};
enum State { NOTHING, WAITS, TIMED_OUT, ABORTED, DONE };  // first word of a report

enum {
    MAX_RANKS = 64,  // per launch
    MAX_PEERS = 64,  // per step
    CODE_WORDS = 1024,  // code up to this size is copied to shared memory
    MAX_ENDS = 128,  // up to this many ends and cursors are copied to shared memory
    LINE = 128,  // bytes between counters, so that polling one does not slow down another
    REPORT = 4,  // words: state, phase, group, offset in the code
};

// A track's end of a connection, with addresses in this process. Counters have 32 bits and wrap.
// Each block has its own counters, LINE bytes apart, and its own part of every slot.
struct End {
    u8* slot;  // the first slot, at the receiver; 0 where the connection carries no data
    u8* ready;  // data-ready counters, at the receiver
    u8* free;  // slot-free counters, at the sender
    u32 peer;  // at the sender: the receiver's index in Launch.buffers
    u32 pad;
};

// The progress of a block at one end of a connection, over all calls: the numbers of waits, slot
// accesses and signals, which are equal between calls, and the next slot.
struct Cursor { u32 waited, moved, signalled, slot; };

// One track of one rank; `width` blocks run it.
struct Track {
    const int* code;  // number of phases; phases + 1 offsets; actions, whose peers index `ends`
    const End* ends;
    Cursor* cursors;  // [width][num_ends]
    const i64* chunks;  // [chunks][2]: offset in the rank's buffer and size, in bytes
    u32* report;  // [width][REPORT], in pinned memory that the host reads at any time
    u32 rank;  // index of its buffer in Launch.buffers
    u32 num_ends;
    u32 code_words;
    u32 pad;
};

struct Launch {
    const Track* tracks;  // [gridDim.x / width]
    u32* stop;  // in the GPU's memory; nonzero: all blocks stop; set by the host or by a timeout
    u32* abort;  // the same in the host's memory
    u32* finals;  // [blocks], zeroed: the chunks that each has completed, for a queue; or 0
    u64 timeout_ns;  // of each wait
    u32 width;
    u32 num_chunks;
    u32 stride;
    u32 slots;
    u32 stripe;  // data bytes of one block's part of a slot; a multiple of 16
    u32 low_latency;  // 1: slots hold lines, and data-ready counters are not used
    u32 divisor;  // of complete chunks; 0 or 1: none
    u32 ps_per_byte;  // emulated links: the least time of a send; 0: no emulation
    u32 direct;  // 1: actions that push (program.py: programs) write buffers instead of slots
    u32 pad;
    u8* buffers[MAX_RANKS];  // results: of the ranks of this launch, then of their peers
    const u8* inputs[MAX_RANKS];  // values: of the ranks of this launch; in place equal to buffers
};
