/* Ranks as threads of one process on one segment, for ThreadSanitizer: every kind of collective, both sizes of
   all-reduce, in place too, and messages, with results checked. Prints "ok". */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "_shm.h"

size_t lockstep_segment_bytes(int, size_t, size_t);
void lockstep_format(void *, size_t, size_t);
Group *lockstep_join(void *, int, int, int, int, Interrupted);
void lockstep_leave(Group *);
int lockstep_all_reduce(Group *, char *, size_t, int, int, int, int64_t, size_t, char *const *, const char *const *,
                        const uint64_t *, size_t, double, int32_t *, int, int64_t);
int lockstep_reduce_scatter(Group *, char *const *, const uint64_t *, char *, int, int, int64_t, size_t,
                            char *const *, const char *const *, const uint64_t *, size_t, double, int32_t *,
                            int, int64_t);
int lockstep_exchange(Group *, int, int, int, const char *const *, const uint64_t *, char *const *, const uint64_t *,
                      int64_t, size_t, char *const *, int64_t);
uint32_t lockstep_bell(Group *);
void lockstep_await_bell(Group *, uint32_t, int64_t);
size_t lockstep_ring_write(Group *, int, const char *, size_t);
size_t lockstep_ring_read(Group *, int, char *, size_t);

enum { MOST = 8, CHUNK = 65536, RING = 1024, F32 = 0, SUM = 0, PIECE = 80001, MESSAGE = 5000 };

static void *segment;
static int size, rounds, spins;
static char *shares[MOST];

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "line %d, rank %d: %s\n", __LINE__, rank, #condition);    \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

/* With `pieces`, all but the last element come out of two of them. */
static void reduce(Group *g, int rank, float *data, size_t count, int64_t alloc, int pieces) {
    float *values = pieces ? malloc(count * sizeof *values) : data;
    const char *begins[] = {(char *)values, (char *)(values + count / 3)};
    uint64_t counts[] = {count / 3, count - 1 - count / 3};
    int32_t nonfinite = 0;
    for (size_t i = 0; i < count; i++) values[i] = (float)(rank + 1) * (float)(i % 7) / (pieces ? 2 : 1);
    if (pieces) memset(data, 0, count * sizeof *data), data[count - 1] = 2 * values[count - 1];
    for (int phase = pieces ? BEGIN : WHOLE; phase <= (pieces ? REST : WHOLE); phase++)
        CHECK(lockstep_all_reduce(g, (char *)data, count, F32, SUM, -1, alloc, 0, shares, begins, counts, pieces ? 2 : 0,
                                  2, &nonfinite, phase, 60000) == OK);
    CHECK(nonfinite == 0);
    if (pieces) free(values);
    float factor = (float)(size * (size + 1)) / 2;
    for (size_t i = 0; i < count; i++) CHECK(data[i] == factor * (float)(i % 7));
}

static void scatter(Group *g, int rank, float *data, float *output, int64_t alloc) {
    char *inputs[MOST];
    uint64_t counts[MOST];
    for (int to = 0; to < size; to++) inputs[to] = (char *)(data + to * PIECE), counts[to] = PIECE;
    for (size_t i = 0; i < (size_t)size * PIECE; i++) data[i] = (float)(rank + (int)(i / PIECE));
    CHECK(lockstep_reduce_scatter(g, inputs, counts, (char *)output, F32, SUM, alloc, 0, shares, NULL, NULL, 0, 1,
                                  NULL, WHOLE, 60000) == OK);
    for (size_t i = 0; i < PIECE; i++) CHECK(output[i] == (float)(size * (size - 1) / 2 + size * rank));
}

static void gather(Group *g, int rank, float *data, int64_t alloc) {
    const char *sends[MOST];
    char *receives[MOST];
    uint64_t bytes[MOST];
    for (int from = 0; from < size; from++) {
        sends[from] = (char *)(data + rank * PIECE), receives[from] = (char *)(data + from * PIECE);
        bytes[from] = PIECE * sizeof(float);
    }
    for (size_t i = 0; i < PIECE; i++) data[rank * PIECE + (int)i] = (float)(1000 * rank + (int)(i % 7));
    CHECK(lockstep_exchange(g, 8, -1, 1, sends, bytes, receives, bytes, alloc, 0, shares, 60000) == OK);
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < PIECE; i++) CHECK(data[from * PIECE + (int)i] == (float)(1000 * from + (int)(i % 7)));
}

static void swap(Group *g, int rank, float *data, float *output) {
    const char *sends[MOST];
    char *receives[MOST];
    uint64_t bytes[MOST];
    for (int to = 0; to < size; to++) {
        sends[to] = (char *)(data + to * PIECE), receives[to] = (char *)(output + to * PIECE);
        bytes[to] = PIECE * sizeof(float);
        for (size_t i = 0; i < PIECE; i++) data[to * PIECE + (int)i] = (float)(100 * rank + to);
    }
    CHECK(lockstep_exchange(g, 7, -1, 0, sends, bytes, receives, bytes, -1, 0, NULL, 60000) == OK);
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < PIECE; i++) CHECK(output[from * PIECE + (int)i] == (float)(100 * from + rank));
}

static void ring(Group *g, int rank, char *data) {
    int to = (rank + 1) % size, from = (rank + size - 1) % size;
    size_t sent = 0, got = 0;
    char *received = data + MESSAGE;
    memset(data, rank, MESSAGE);
    while (sent < MESSAGE || got < MESSAGE) {
        uint32_t seen = lockstep_bell(g);
        size_t out = lockstep_ring_write(g, to, data + sent, MESSAGE - sent);
        size_t in = lockstep_ring_read(g, from, received + got, MESSAGE - got);
        sent += out, got += in;
        if (out + in == 0) lockstep_await_bell(g, seen, 1000);
    }
    for (size_t i = 0; i < MESSAGE; i++) CHECK(received[i] == from);
}

static void *run(void *argument) {
    int rank = (int)(intptr_t)argument;
    Group *g = lockstep_join(segment, -1, rank, size, spins, NULL);
    size_t most = (size_t)size * PIECE;
    float *data = malloc(most * sizeof *data), *output = malloc(most * sizeof *output);
    for (int round = 0; round < rounds; round++) {
        for (int pieces = 0; pieces < 2; pieces++) {
            reduce(g, rank, data, 100, -1, pieces);
            reduce(g, rank, data, 25007, -1, pieces);
            reduce(g, rank, data, most, -1, pieces);
            reduce(g, rank, (float *)shares[rank], PIECE, 1, pieces);
            reduce(g, rank, (float *)shares[rank], PIECE, rank == 0 ? -1 : 1, pieces);
        }
        scatter(g, rank, data, output, -1);
        for (int who = 0; who < 2; who++) { /* all in place; all but one */
            float *shared = (float *)shares[rank];
            int64_t alloc = who == 1 && rank == 0 ? -1 : 1;
            scatter(g, rank, shared, shared + rank * PIECE, alloc);
            gather(g, rank, shared, alloc);
        }
        gather(g, rank, data, -1);
        swap(g, rank, data, output);
        ring(g, rank, (char *)data);
    }
    free(data), free(output);
    lockstep_leave(g);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size = atoi(argv[1]), rounds = atoi(argv[2]), spins = atoi(argv[3]);
    size_t bytes = lockstep_segment_bytes(size, CHUNK, RING);
    segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    lockstep_format(segment, CHUNK, RING);
    pthread_t threads[MOST];
    for (int rank = 0; rank < size; rank++) shares[rank] = calloc((size_t)size * PIECE, sizeof(float));
    for (intptr_t rank = 0; rank < size; rank++) pthread_create(&threads[rank], NULL, run, (void *)rank);
    for (int rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
    puts("ok");
    return 0;
}
