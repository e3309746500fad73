/* How the ranks wait for each other: words that only grow, read with acquire, written with release; futex waits. */
#define _GNU_SOURCE
#include "_sync.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_MS 50 /* sleep at most this long before checking whether the others are alive */

static size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

static size_t head_bytes(int size) { return aligned(sizeof(Head) + (size_t)size * sizeof(Member), 4096); }

/* Two outboxes and two results of one rank. */
static size_t room_bytes(const Head *head) { return 4 * head->chunk_bytes; }

static size_t ring_stride(const Head *head) { return sizeof(Ring) + head->ring_bytes; }

char *outbox(const Group *g, int rank, uint32_t step) {
    return (char *)g->head + head_bytes(g->size) + (size_t)rank * room_bytes(g->head) +
           (step & 1) * g->head->chunk_bytes;
}

char *results(const Group *g, int rank, uint32_t step) { return outbox(g, rank, step) + 2 * g->head->chunk_bytes; }

static Ring *ring_between(const Group *g, int from, int to) {
    char *rings = (char *)g->head + head_bytes(g->size) + (size_t)g->size * room_bytes(g->head);
    return (Ring *)(rings + ((size_t)from * (size_t)g->size + (size_t)to) * ring_stride(g->head));
}

size_t lockstep_segment_bytes(int size, size_t chunk_bytes, size_t ring_bytes) {
    Head head = {.chunk_bytes = chunk_bytes, .ring_bytes = ring_bytes};
    return head_bytes(size) + (size_t)size * room_bytes(&head) + (size_t)size * (size_t)size * ring_stride(&head);
}

/* For a new segment, which is all zeros; before any other rank reads it. */
void lockstep_format(void *segment, size_t chunk_bytes, size_t ring_bytes) {
    Head *head = segment;
    head->chunk_bytes = chunk_bytes;
    head->ring_bytes = ring_bytes;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One more, because now_ms() rounds down to milliseconds: no wait ends too early. */
int64_t deadline_after(int64_t timeout_ms) { return now_ms() + timeout_ms + 1; }

static struct flock byte_of(int rank) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

/* Join as `rank`. The kernel releases the lock when this process ends for any reason: so the others notice it.
   It belongs to the process, so children that inherit the file do not hold it. */
Group *lockstep_join(void *segment, int fd, int rank, int size, int spins, Interrupted interrupted) {
    struct flock lock = byte_of(rank);
    if (size > MAX_RANKS || (fd >= 0 && fcntl(fd, F_SETLK, &lock) != 0)) return NULL;
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->head = segment, g->fd = fd, g->rank = rank, g->size = size, g->spins = spins, g->interrupted = interrupted;
    g->failed_rank = -1;
    g->head->member[rank].pid = getpid();
    atomic_store(&g->head->member[rank].state, JOINED);
    return g;
}

void lockstep_fail(Group *g, const char *reason) {
    Member *me = &g->head->member[g->rank];
    if (atomic_load(&me->state) != JOINED) return;
    strncpy(me->reason, reason, sizeof me->reason - 1);
    atomic_store(&me->state, FAILED);
}

void lockstep_stop(Group *g) { atomic_store(&g->stopped, 1); }

void lockstep_leave(Group *g) {
    uint32_t joined = JOINED;
    atomic_compare_exchange_strong(&g->head->member[g->rank].state, &joined, LEFT);
    free(g);
}

int lockstep_failed_rank(const Group *g) { return g->failed_rank; }
uint64_t lockstep_missing(const Group *g) { return g->missing; }
const char *lockstep_reason(const Group *g, int rank) { return g->head->member[rank].reason; }
const Call *lockstep_call_of(const Group *g, int rank) { return &g->head->member[rank].call[g->step & 1]; }

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ms) {
    struct timespec span = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &span, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static void wake_sleepers(Word *word) {
    /* Either this load sees the sleeper, or the sleeper's load after its increment sees the new value: all four are
       sequentially consistent. And the kernel compares again before it puts a thread to sleep. */
    if (atomic_load(&word->sleepers) > 0) futex_wake(&word->value);
}

void announce(Word *word, uint32_t value) {
    atomic_store(&word->value, value);
    wake_sleepers(word);
}

static bool reached(Word *word, uint32_t target) {
    /* The difference, so that the count may wrap around. */
    return (int32_t)(atomic_load_explicit(&word->value, memory_order_acquire) - target) >= 0;
}

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The state of another rank: JOINED while it is alive. */
static uint32_t state_of(const Group *g, int rank, bool *died) {
    Member *member = &g->head->member[rank];
    uint32_t state = atomic_load(&member->state);
    struct flock lock = byte_of(rank);
    *died = state == JOINED && g->fd >= 0 && member->pid != g->head->member[g->rank].pid &&
            fcntl(g->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    return state;
}

/* Return whether a rank that has not reached `target` never will. Dead ranks first: they make others fail. */
static int hopeless(Group *g, size_t word_at, uint32_t target) {
    int found = OK;
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank) continue;
        bool died;
        uint32_t state = state_of(g, rank, &died);
        /* Read after its state: the rank may have reached the target before it ended. */
        if (reached((Word *)((char *)&g->head->member[rank] + word_at), target)) continue;
        int code = died ? DIED : state == FAILED ? BROKEN : state == LEFT ? WENT : OK;
        if (code != OK && (found == OK || code == DIED)) {
            found = code;
            g->failed_rank = rank;
            if (code == DIED) break;
        }
    }
    return found;
}

static uint64_t missing_ranks(const Group *g, size_t word_at, uint32_t target) {
    uint64_t missing = 0;
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && !reached((Word *)((char *)&g->head->member[rank] + word_at), target))
            missing |= (uint64_t)1 << rank;
    return missing;
}

static int sleep_until_reached(Group *g, Word *word, size_t word_at, uint32_t target, int64_t deadline_ms) {
    while (true) {
        int64_t left_ms = deadline_ms - now_ms();
        atomic_fetch_add(&word->sleepers, 1);
        uint32_t seen = atomic_load(&word->value);
        if ((int32_t)(seen - target) < 0 && left_ms > 0)
            futex_wait(&word->value, seen, left_ms < SLICE_MS ? left_ms : SLICE_MS);
        atomic_fetch_sub(&word->sleepers, 1);
        if (reached(word, target)) return OK;
        if (atomic_load(&g->stopped)) return STOPPED;
        /* Python runs signal handlers in the main thread only. */
        if (g->interrupted && syscall(SYS_gettid) == getpid() && g->interrupted()) return INTERRUPTED;
        int code = hopeless(g, word_at, target);
        if (code != OK) return code;
        if (left_ms <= 0) {
            g->missing = missing_ranks(g, word_at, target);
            if (g->missing) return TIMED_OUT;
        }
    }
}

/* Wait until a word of every rank has reached `target`. */
int await_all(Group *g, size_t word_at, uint32_t target, int64_t deadline_ms) {
    for (int rank = 0; rank < g->size; rank++) {
        Word *word = (Word *)((char *)&g->head->member[rank] + word_at);
        int spins = g->spins;
        while (!reached(word, target)) {
            if (spins-- > 0) {
                breathe();
                continue;
            }
            int code = sleep_until_reached(g, word, word_at, target, deadline_ms);
            if (code != OK) return code;
        }
    }
    return OK;
}

/* --- Point to point: one ring of bytes for each ordered pair of ranks, one writer and one reader each. --- */

void lockstep_ring_bell(Group *g, int rank) {
    Word *bell = &g->head->member[rank].bell;
    atomic_fetch_add(&bell->value, 1);
    wake_sleepers(bell);
}

uint32_t lockstep_bell(Group *g) { return atomic_load(&g->head->member[g->rank].bell.value); }

/* Sleep until this rank's bell rings after it was `seen`, or some time has passed. */
void lockstep_await_bell(Group *g, uint32_t seen, int64_t ms) {
    Word *bell = &g->head->member[g->rank].bell;
    for (int spins = g->spins; spins > 0 && atomic_load(&bell->value) == seen; spins--) breathe();
    atomic_fetch_add(&bell->sleepers, 1);
    if (atomic_load(&bell->value) == seen) futex_wait(&bell->value, seen, ms);
    atomic_fetch_sub(&bell->sleepers, 1);
}

/* Write as much as there is room for; return the number of bytes. */
size_t lockstep_ring_write(Group *g, int to, const char *data, size_t bytes) {
    Ring *ring = ring_between(g, g->rank, to);
    size_t capacity = g->head->ring_bytes;
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed);
    size_t room = capacity - (size_t)(written - atomic_load_explicit(&ring->read, memory_order_acquire));
    if (bytes > room) bytes = room;
    if (bytes == 0) return 0;
    size_t at = written % capacity, until_end = capacity - at, first = bytes < until_end ? bytes : until_end;
    memcpy(ring->data + at, data, first);
    memcpy(ring->data, data + first, bytes - first);
    atomic_store_explicit(&ring->written, written + bytes, memory_order_release);
    lockstep_ring_bell(g, to);
    return bytes;
}

/* Read the available data, at most `bytes`; return the number of bytes. */
size_t lockstep_ring_read(Group *g, int from, char *data, size_t bytes) {
    Ring *ring = ring_between(g, from, g->rank);
    size_t capacity = g->head->ring_bytes;
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed);
    size_t there = (size_t)(atomic_load_explicit(&ring->written, memory_order_acquire) - read);
    if (bytes > there) bytes = there;
    if (bytes == 0) return 0;
    size_t at = read % capacity, until_end = capacity - at, first = bytes < until_end ? bytes : until_end;
    memcpy(data, ring->data + at, first);
    memcpy(data + first, ring->data, bytes - first);
    atomic_store_explicit(&ring->read, read + bytes, memory_order_release);
    lockstep_ring_bell(g, from);
    return bytes;
}

/* OK while `rank` may still send or receive, else DIED, BROKEN or WENT. */
int lockstep_peer_state(Group *g, int rank) {
    bool died;
    uint32_t state = state_of(g, rank, &died);
    return died ? DIED : state == FAILED ? BROKEN : state == LEFT ? WENT : OK;
}
