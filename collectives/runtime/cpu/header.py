"""Where words lie in the first pages of a communicator's part of the shared memory: a page of abort
words, and a page for each rank, its control block.

Offsets are in bytes, and words are int64. They begin at 0. A control block is its rank's to write;
what others wait for is raised by `counters.raise_counter`, which wakes them, and is 128 bytes from
the next: CPUs fetch cache lines in adjacent pairs. Ranks of another version of linkweave are
refused when they meet (`cluster.join`).
"""

from __future__ import annotations

LAYOUT = 2  # raised with each change of what ranks read of each other: these pages, and the tables
# whose indices they compare (`calls.request.notice`)
PAGE = 4096

# the page of abort words, which every split and lane has at its `Arena.start`
ABORT = 0  # 4 words: 1 if set, who gave up, why, whom it blames
CLAIMED = 32  # by the first rank to give up
LEFT = 64  # how many ranks have left
TAG = 256  # 32 bytes: the hash of the job, of a whole mapping only
PAST = 288  # 1 if messages pass sooner past the caches (`cores`), of a whole mapping only

# a rank's control block
BELL = 0  # what the rank sleeps on
POSTED, FINISHED = 128, 256  # numbers of the calls that it has begun and ended
PID, GONE, CLOSED = 384, 392, 400  # its process; whether that is gone; whether it has left
WAITS, BEATS, BASE = 408, 416, 424  # for whom; signs of life; where it has mapped the memory
# two notices, of even and odd calls: `calls.request.notice`, two words of memory, and a status
NOTICE, NOTICE_WORDS = 512, 16
GPU_CALLS, GPU_CALL_WORDS = 768, 32  # its last calls on the GPU
MESSAGES, MAX_MESSAGE = 1024, 1008  # two messages of so many bytes at most, each behind 2 words
LAST_WORDS = 3072  # a third one, before it gives up

SPANS = {
    "abort": {"ABORT": 32, "CLAIMED": 8, "LEFT": 8, "TAG": 32, "PAST": 8},
    "control": {
        "BELL": 8, "POSTED": 8, "FINISHED": 8, "PID": 8, "GONE": 8, "CLOSED": 8, "WAITS": 8,
        "BEATS": 8, "BASE": 8, "NOTICE": 16 * NOTICE_WORDS, "GPU_CALLS": 8 * GPU_CALL_WORDS,
        "MESSAGES": 2 * (16 + MAX_MESSAGE), "LAST_WORDS": 16 + MAX_MESSAGE,
    },
}  # fmt: skip
"""The bytes of each field of the two kinds of pages."""
