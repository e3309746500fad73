/* The shared segment, and the state of one process. docs/design/shm.md shows the layout. */
#ifndef LOCKSTEP_SHM_H
#define LOCKSTEP_SHM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

#define MAX_RANKS 64
#define LINE 128 /* two cache lines: neighbours are fetched in pairs */

/* A number that only grows, and that others wait for. */
typedef struct {
    _Alignas(LINE) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} Word;

/* The call of a rank; must be the same on all ranks, except for `alloc` and `offset`. */
typedef struct {
    int32_t kind, dtype, op, root;
    uint64_t extent;
    int64_t alloc; /* -1: the tensor lies in this process's own memory */
    uint64_t offset;
} Call;

enum { JOINED = 1, LEFT = 2, FAILED = 3 };

typedef struct {
    Word arrived; /* this step's part lies in the outbox */
    Word reduced; /* this step's slice lies in the results */
    Word done;    /* this rank does not read anything of this step any more */
    Word bell;    /* something may have changed for this rank's sends and receives */
    _Alignas(LINE) Call call[2];
    uint64_t sizes[2][MAX_RANKS];
    _Atomic uint32_t state;
    int32_t pid;
    char reason[512];
} Member;

typedef struct {
    char token[16]; /* written by the rank that created the segment, so that the others can verify it */
    uint64_t chunk_bytes, ring_bytes;
    _Alignas(LINE) Member member[];
} Head;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t read;
    _Alignas(LINE) char data[];
} Ring;

typedef int (*Interrupted)(void);

typedef struct {
    Head *head;
    int fd, rank, size, spins;
    uint32_t step;
    int failed_rank;         /* the rank that the last error is about */
    uint64_t missing;    /* the ranks that were missing at a timeout, as bits */
    _Atomic int stopped; /* another thread of this process stops the call */
    Interrupted interrupted;
} Group;

enum { OK = 0, TIMED_OUT = 1, DIED = 2, WENT = 3, BROKEN = 4, MISMATCH = 5, INTERRUPTED = 6, STOPPED = 7 };

enum { WHOLE = 0, BEGIN = 1, REST = 2 }; /* the phases of a call */

enum { ALL_REDUCE = 1, REDUCE_SCATTER = 2 }; /* the other kinds are exchanges, named by the caller */

/* The bits of a float, and back. */
static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

size_t lockstep_element_bytes(int dtype);

/* Where the elements of a tensor come from: pieces, back to back, each multiplied by `factor`. No pieces: they are
   already there. The kernel searches from piece `at` on, which begins at element `offset`. */
typedef struct {
    const char *const *pieces;
    const uint64_t *counts;
    size_t num_pieces;
    double factor;
    int32_t *nonfinite; /* set to 1 if an element is NaN or infinite; NULL: not checked */
    size_t at, offset;
} Pieces;

/* Write the elements `start` to `end` of `pieces` to their places in `to`, which begins at element 0. */
void lockstep_fill(char *to, Pieces *pieces, size_t start, size_t end, int dtype);

/* first[i] = sources[0][i] op sources[1][i] op ..., in this order; second gets a copy. Either may be NULL. */
void lockstep_reduce(void *first, void *second, const void *const *sources, int num_sources, size_t count, int dtype,
                     int op);

#endif
