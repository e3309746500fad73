/* The collectives, as steps: publish data in the outbox, wait for the others' parts, read them.

   Every step has a number, the same on all ranks. Outboxes and results are doubled: step k uses half k % 2, which is
   free when every rank has finished step k - 2. The first step of every collective also compares the calls. */
#include <stdbool.h>
#include <string.h>

#include "_sync.h"

/* Up to this size, over all ranks, every rank sums everything itself: one wait instead of two. */
#define SMALL_BYTES ((size_t)1 << 18)
#define ARRIVED offsetof(Member, arrived)
#define REDUCED offsetof(Member, reduced)
#define DONE offsetof(Member, done)
#define TRY(expression)                  \
    do {                                 \
        int code_ = (expression);        \
        if (code_ != OK) return code_;   \
    } while (0)

static Member *me(Group *g) { return &g->head->member[g->rank]; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static void copy(void *to, const void *from, size_t bytes) {
    if (bytes > 0 && to != from) memcpy(to, from, bytes);
}

/* Begin step `step`: its half of the outbox is free on return. */
static int open_step(Group *g, uint32_t step, int64_t deadline_ms) { return await_all(g, DONE, step - 2, deadline_ms); }

static int begin(Group *g, const Call *call, int64_t deadline_ms) {
    TRY(open_step(g, g->step + 1, deadline_ms));
    /* Not every step reduces; a count that stayed the same for 2^31 steps would seem to be in the future. */
    atomic_store_explicit(&me(g)->reduced.value, g->step, memory_order_relaxed);
    g->step++;
    me(g)->call[g->step & 1] = *call;
    return OK;
}

/* Wait for the others' first step, and compare their calls. */
static int meet(Group *g, int64_t deadline_ms) {
    TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    const Call *mine = &me(g)->call[g->step & 1];
    for (int rank = 0; rank < g->size; rank++) {
        const Call *theirs = &g->head->member[rank].call[g->step & 1];
        if (theirs->kind != mine->kind || theirs->dtype != mine->dtype || theirs->op != mine->op ||
            theirs->root != mine->root || theirs->extent != mine->extent) {
            g->failed_rank = rank;
            return MISMATCH;
        }
    }
    return OK;
}

static bool all_in_place(const Group *g) {
    const Call *first = &g->head->member[0].call[g->step & 1];
    for (int rank = 0; rank < g->size; rank++) {
        const Call *call = &g->head->member[rank].call[g->step & 1];
        if (call->alloc < 0 || call->alloc != first->alloc || call->offset != first->offset) return false;
    }
    return true;
}

static bool any_in_place(const Group *g) {
    for (int rank = 0; rank < g->size; rank++)
        if (g->head->member[rank].call[g->step & 1].alloc >= 0) return true;
    return false;
}

/* Some tensors lie in shared memory and others do not: all ranks take the next step, with copies. */
static int begin_again(Group *g, int64_t deadline_ms) {
    announce(&me(g)->done, g->step);
    TRY(open_step(g, g->step + 1, deadline_ms));
    g->step++;
    return OK;
}

/* End an in-place collective: no rank may change its tensor before all have read the parts they need. */
static int part(Group *g, int64_t deadline_ms) {
    announce(&me(g)->reduced, g->step);
    TRY(await_all(g, REDUCED, g->step, deadline_ms));
    announce(&me(g)->done, g->step);
    return OK;
}

/* The elements that this rank reduces if all tensors lie in shared memory. */
typedef struct {
    size_t start, end;
} Slice;

static Slice own_slice(const Group *g, size_t count) {
    size_t length = ((count + (size_t)g->size - 1) / (size_t)g->size + 63) / 64 * 64;
    size_t start = least((size_t)g->rank * length, count);
    return (Slice){start, least(start + length, count)};
}

/* All tensors lie in shared memory: each rank reads its slice of all, and writes the sum into its own, or into all. */
static int reduce_in_place(Group *g, char *const *parts, Slice slice, size_t width, const Call *call, bool into_all,
                           Pieces *pieces, int64_t deadline_ms) {
    const void *sources[MAX_RANKS];
    char *own = parts[g->rank] + call->offset;
    /* In blocks, so that data from the pieces, or for the other ranks, is in the cache. */
    for (size_t at = slice.start, block = 65536 / width; at < slice.end; at += block) {
        size_t end = least(at + block, slice.end);
        for (int rank = 0; rank < g->size; rank++) sources[rank] = parts[rank] + call->offset + at * width;
        lockstep_fill(own, pieces, at, end, call->dtype);
        lockstep_reduce((char *)sources[g->rank], NULL, sources, g->size, end - at, call->dtype, call->op);
        for (int rank = 0; into_all && rank < g->size; rank++)
            copy((void *)sources[rank], sources[g->rank], (end - at) * width);
    }
    return part(g, deadline_ms);
}

/* Fill the parts of this rank's tensor that others read, so that they can begin; `slice` is filled while reducing. */
static void fill_for_others(char *data, Pieces *pieces, Slice slice, int dtype) {
    lockstep_fill(data, pieces, 0, slice.start, dtype);
    lockstep_fill(data, pieces, slice.end, SIZE_MAX, dtype);
}

typedef struct {
    size_t start, slice, end; /* elements of the whole, and of one rank's slice */
} Span;

static Span span_of(const Group *g, size_t index, size_t count, size_t width) {
    size_t whole = g->head->chunk_bytes / width / (size_t)g->size / 64 * 64;
    Span span = {.start = index * whole * (size_t)g->size, .slice = whole};
    span.end = least(span.start + whole * (size_t)g->size, count);
    size_t even = ((span.end - span.start + (size_t)g->size - 1) / (size_t)g->size + 63) / 64 * 64;
    span.slice = least(whole, even);
    return span;
}

static size_t slice_start(Span span, int rank) { return least(span.start + (size_t)rank * span.slice, span.end); }

static void publish_slices(Group *g, uint32_t step, const char *data, Span span, size_t width) {
    char *box = outbox(g, g->rank, step);
    for (int rank = 0; rank < g->size; rank++) {
        size_t start = slice_start(span, rank), end = slice_start(span, rank + 1);
        if (rank != g->rank) copy(box + (size_t)rank * span.slice * width, data + start * width, (end - start) * width);
    }
    announce(&me(g)->arrived, step);
}

static int reduce_step(Group *g, uint32_t step, char *data, Span span, size_t width, const Call *call,
                       int64_t deadline_ms) {
    bool wanted = call->root < 0 || call->root == g->rank;
    const void *sources[MAX_RANKS];
    size_t start = slice_start(span, g->rank), length = slice_start(span, g->rank + 1) - start;
    for (int rank = 0; rank < g->size; rank++)
        sources[rank] = rank == g->rank ? data + start * width
                                        : outbox(g, rank, step) + (size_t)g->rank * span.slice * width;
    lockstep_reduce(wanted ? data + start * width : NULL, results(g, g->rank, step), sources, g->size, length,
                    call->dtype, call->op);
    announce(&me(g)->reduced, step);
    TRY(await_all(g, REDUCED, step, deadline_ms));
    for (int rank = 0; wanted && rank < g->size; rank++) {
        size_t from = slice_start(span, rank), bytes = (slice_start(span, rank + 1) - from) * width;
        if (rank != g->rank) copy(data + from * width, results(g, rank, step), bytes);
    }
    announce(&me(g)->done, step);
    return OK;
}

static int reduce_small(Group *g, char *data, size_t count, const Call *call) {
    const void *sources[MAX_RANKS];
    for (int rank = 0; rank < g->size; rank++) sources[rank] = outbox(g, rank, g->step);
    if (call->root < 0 || call->root == g->rank)
        lockstep_reduce(data, NULL, sources, g->size, count, call->dtype, call->op);
    announce(&me(g)->done, g->step);
    return OK;
}

/* Wait until all ranks have begun the current call; TIMED_OUT after the time limit. */
int lockstep_have_all_begun(Group *g, int64_t timeout_ms) {
    return await_all(g, ARRIVED, g->step, deadline_after(timeout_ms));
}

/* `parts` are the ranks' shares of the allocation `alloc`, and `data` lies at `offset` in this rank's; or alloc < 0.
   `data` is first filled from `pieces`, if there are any. In two calls with the same arguments, BEGIN returns when the
   other ranks can read the data they need; REST waits for their data. */
int lockstep_all_reduce(Group *g, char *data, size_t count, int dtype, int op, int root, int64_t alloc, size_t offset,
                        char *const *parts, const char *const *pieces, const uint64_t *piece_counts, size_t num_pieces,
                        double factor, int32_t *nonfinite, int phase, int64_t timeout_ms) {
    int64_t deadline_ms = deadline_after(timeout_ms);
    size_t width = lockstep_element_bytes(dtype);
    Call call = {ALL_REDUCE, dtype, op, root, count, root < 0 ? alloc : -1, offset};
    Pieces own = {pieces, piece_counts, num_pieces, factor, nonfinite, 0, 0};
    bool small = count * width <= SMALL_BYTES / (size_t)g->size && count * width <= g->head->chunk_bytes;
    Slice slice = small || call.alloc < 0 ? (Slice){count, count} : own_slice(g, count);
    if (phase != REST) {
        TRY(begin(g, &call, deadline_ms));
        fill_for_others(data, &own, slice, dtype);
        if (small) copy(outbox(g, g->rank, g->step), data, count * width);
        if (small || call.alloc >= 0)
            announce(&me(g)->arrived, g->step);
        else
            publish_slices(g, g->step, data, span_of(g, 0, count, width), width);
        if (phase == BEGIN) return OK;
    }
    TRY(meet(g, deadline_ms));
    if (small) return reduce_small(g, data, count, &call);
    if (all_in_place(g)) return reduce_in_place(g, parts, slice, width, &call, true, &own, deadline_ms);
    lockstep_fill(data, &own, slice.start, slice.end, dtype);
    if (any_in_place(g)) {
        TRY(begin_again(g, deadline_ms));
        publish_slices(g, g->step, data, span_of(g, 0, count, width), width);
        TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    }
    for (size_t index = 0;; index++) {
        Span span = span_of(g, index, count, width), next = {0};
        bool last = span.end == count;
        if (!last) {
            next = span_of(g, index + 1, count, width);
            TRY(open_step(g, g->step + 1, deadline_ms));
            publish_slices(g, g->step + 1, data, next, width);
        }
        if (index > 0) TRY(await_all(g, ARRIVED, g->step, deadline_ms));
        TRY(reduce_step(g, g->step, data, span, width, &call, deadline_ms));
        if (last) return OK;
        g->step++;
    }
}

static void publish_parts(Group *g, char *const *inputs, const uint64_t *counts, size_t at, size_t room, size_t width) {
    char *box = outbox(g, g->rank, g->step);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && at < counts[rank])
            copy(box + (size_t)rank * room * width, inputs[rank] + at * width, least(room, counts[rank] - at) * width);
}

/* Rank r gets the reduction of every rank's inputs[r], which has counts[r] elements. With alloc >= 0 the inputs lie one
   after the other at `offset` in the ranks' shares of that allocation, `parts`, and the output is this rank's input.
   inputs[0] is first filled from `pieces`, if there are any; the inputs then lie back to back. See lockstep_all_reduce
   for `phase`. */
int lockstep_reduce_scatter(Group *g, char *const *inputs, const uint64_t *counts, char *output, int dtype, int op,
                            int64_t alloc, size_t offset, char *const *parts, const char *const *pieces,
                            const uint64_t *piece_counts, size_t num_pieces, double factor, int32_t *nonfinite,
                            int phase, int64_t timeout_ms) {
    int64_t deadline_ms = deadline_after(timeout_ms);
    size_t width = lockstep_element_bytes(dtype), longest = 0, total = 0;
    for (int rank = 0; rank < g->size; rank++) {
        longest = counts[rank] > longest ? counts[rank] : longest;
        total = total * 31 + counts[rank];
    }
    size_t room = g->head->chunk_bytes / width / (size_t)g->size / 64 * 64;
    Call call = {REDUCE_SCATTER, dtype, op, -1, total, alloc, offset};
    Pieces own = {pieces, piece_counts, num_pieces, factor, nonfinite, 0, 0};
    size_t start = alloc < 0 ? 0 : (size_t)(output - inputs[0]) / width;
    Slice slice = {start, alloc < 0 ? 0 : start + counts[g->rank]};
    const void *sources[MAX_RANKS];
    if (phase != REST) {
        TRY(begin(g, &call, deadline_ms));
        fill_for_others(inputs[0], &own, slice, dtype);
        if (alloc < 0) publish_parts(g, inputs, counts, 0, room, width);
        announce(&me(g)->arrived, g->step);
        if (phase == BEGIN) return OK;
    }
    TRY(meet(g, deadline_ms));
    if (all_in_place(g)) return reduce_in_place(g, parts, slice, width, &call, false, &own, deadline_ms);
    lockstep_fill(inputs[0], &own, slice.start, slice.end, dtype);
    if (any_in_place(g)) {
        TRY(begin_again(g, deadline_ms));
        publish_parts(g, inputs, counts, 0, room, width);
        announce(&me(g)->arrived, g->step);
        TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    }
    for (size_t at = 0;;) {
        if (at < counts[g->rank]) {
            for (int rank = 0; rank < g->size; rank++)
                sources[rank] = rank == g->rank ? inputs[rank] + at * width
                                                : outbox(g, rank, g->step) + (size_t)g->rank * room * width;
            lockstep_reduce(output + at * width, NULL, sources, g->size, least(room, counts[g->rank] - at), dtype, op);
        }
        announce(&me(g)->done, g->step);
        at += room;
        if (at >= longest) return OK;
        TRY(open_step(g, g->step + 1, deadline_ms));
        g->step++;
        publish_parts(g, inputs, counts, at, room, width);
        announce(&me(g)->arrived, g->step);
        TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    }
}

static void publish_sends(Group *g, const char *const *sends, const uint64_t *bytes, int same, size_t at, size_t room) {
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank || at >= bytes[rank]) continue;
        char *to = outbox(g, g->rank, g->step) + (same ? 0 : (size_t)rank * room);
        copy(to, sends[rank] + at, least(room, bytes[rank] - at));
        if (same) return;
    }
}

/* Compare the bytes that others send with those that this rank expects; `longest` becomes the largest message. */
static int compare_sizes(Group *g, const uint64_t *receive_bytes, size_t *longest) {
    for (int from = 0; from < g->size; from++) {
        const uint64_t *sizes = g->head->member[from].sizes[g->step & 1];
        if (sizes[g->rank] != receive_bytes[from]) {
            g->failed_rank = from;
            return MISMATCH;
        }
        for (int to = 0; to < g->size; to++) *longest = to != from && sizes[to] > *longest ? sizes[to] : *longest;
    }
    return OK;
}

/* Every rank sends `send_bytes[r]` bytes at `sends[r]` to rank r; with `same`, they are the same bytes for all. With
   alloc >= 0, which needs `same`, received data lies back to back at `offset` in this rank's share of that allocation,
   and the data to send is already in its place there. */
int lockstep_exchange(Group *g, int kind, int root, int same, const char *const *sends, const uint64_t *send_bytes,
                      char *const *receives, const uint64_t *receive_bytes, int64_t alloc, size_t offset,
                      char *const *parts, int64_t timeout_ms) {
    int64_t deadline_ms = deadline_after(timeout_ms);
    size_t room = same ? g->head->chunk_bytes : g->head->chunk_bytes / (size_t)g->size / 64 * 64, longest = 0;
    Call call = {kind, 0, 0, root, 0, alloc, offset};
    TRY(begin(g, &call, deadline_ms));
    memcpy(me(g)->sizes[g->step & 1], send_bytes, (size_t)g->size * sizeof *send_bytes);
    if (alloc < 0) publish_sends(g, sends, send_bytes, same, 0, room);
    announce(&me(g)->arrived, g->step);
    TRY(meet(g, deadline_ms));
    TRY(compare_sizes(g, receive_bytes, &longest));
    if (all_in_place(g)) {
        for (int rank = 0; rank < g->size; rank++)
            if (rank != g->rank)
                copy(receives[rank], parts[rank] + (receives[rank] - parts[g->rank]), receive_bytes[rank]);
        return part(g, deadline_ms);
    }
    if (any_in_place(g)) {
        TRY(begin_again(g, deadline_ms));
        publish_sends(g, sends, send_bytes, same, 0, room);
        announce(&me(g)->arrived, g->step);
        TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    }
    copy(receives[g->rank], sends[g->rank], receive_bytes[g->rank]);
    for (size_t at = 0;;) {
        for (int rank = 0; rank < g->size; rank++)
            if (rank != g->rank && at < receive_bytes[rank])
                copy(receives[rank] + at, outbox(g, rank, g->step) + (same ? 0 : (size_t)g->rank * room),
                     least(room, receive_bytes[rank] - at));
        announce(&me(g)->done, g->step);
        at += room;
        if (at >= longest) return OK;
        TRY(open_step(g, g->step + 1, deadline_ms));
        g->step++;
        publish_sends(g, sends, send_bytes, same, at, room);
        announce(&me(g)->arrived, g->step);
        TRY(await_all(g, ARRIVED, g->step, deadline_ms));
    }
}
