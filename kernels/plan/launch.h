// What the host hands to the plan interpreter. collectives/runtime/gpu/program.py mirrors the layouts,
// and a test compares them.
#pragma once
#include "gpu/sync.h"

enum Op { SEND, REDUCE, COPY, SIGNAL, WAIT, STOP };
enum { INPUT = -2 };  // a step's source: its own chunk, as the caller gave it
enum Flag {
    SENDER = 1, DATA = 2,  // SIGNAL and WAIT: at the sender; of a connection that carries data
    PUSHES = 1,  // SEND and COPY: into the receiver's buffer, where the launch is direct
    LAST = 1,  // REDUCE: completes the chunk
    PASSES_ON = 2,  // REDUCE and COPY: the next step, a SEND of the result, is part of this one
    DROPS = 4,  // likewise: and needs no result here
    AHEAD = 3,  // REDUCE: from this bit on, how many of the peers come before the own value
};
enum State { NOTHING, WAITS, TIMED_OUT, ABORTED, DONE };  // first word of a report

enum {
    MOST_RANKS = 64,  // of one launch
    MOST_PEERS = 64,  // of one step
    CODE_WORDS = 1024,  // of a track, kept in shared memory; a longer one is read where it lies
    MOST_ENDS = 128,  // likewise
    LINE = 128,  // bytes from one counter to the next: nobody's polling slows another's
    REPORT = 4,  // words: state, phase, group, place in the code
};

// A track's end of a connection; addresses as this process maps them. Counters are 32 bits and
// wrap; each block (block) has its own, LINE bytes apart, and its own part of every slot.
struct End {
    u8* slot;  // the first slot, at the receiver; 0 where the connection carries no data
    u8* ready;  // data-ready counters, at the receiver
    u8* free;  // slot-free counters, at the sender
    u32 peer;  // at the sender: whose buffer it may write, an index of Launch.buffers
    u32 pad;
};

// How far one block has come at one end of a connection, over all calls: waits, accesses to slots
// and signals, which are equal between calls, and the slot that comes next.
struct Cursor { u32 waited, moved, signalled, slot; };

// One track of one rank; `width` blocks run it.
struct Group {
    const int* code;  // number of phases; phases + 1 offsets; steps, with numbers of ends
    const End* ends;
    Cursor* cursors;  // [width][num_ends]
    const i64* place;  // [chunks][2]: first byte in the rank's buffer, number of bytes
    u32* report;  // [width][REPORT], which the host may read at any time
    u32 rank;  // whose buffer it works on: an index of Launch.buffers
    u32 num_ends;
    u32 code_words;
    u32 pad;
};

struct Launch {
    const Group* groups;  // [gridDim.x / width]
    u32* abort;  // not zero: everybody stops; the host may set it, and a deadline does
    u32* finals;  // [blocks], zero at first: chunks that each has made final, for a queue; or 0
    u64 timeout_ns;  // of one wait
    u32 width;
    u32 num_chunks;
    u32 stride;
    u32 slots;
    u32 stripe;  // bytes of data that one block's part of a slot takes; a multiple of 16
    u32 low_latency;  // 1: slots hold lines, and data-ready counters are not used
    u32 divisor;  // of a chunk that is complete; 0 or 1: none
    u32 ps_per_byte;  // emulated links: a send takes that long at least; 0: as fast as it goes
    u32 direct;  // 1: pushes (see programs in program.py) go past the slots
    u32 pad;
    u8* buffers[MOST_RANKS];  // where results go: of the ranks of this launch, then of their peers
    const u8* inputs[MOST_RANKS];  // what our callers gave; the same where in place
};
