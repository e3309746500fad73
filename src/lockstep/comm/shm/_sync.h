/* The functions for waiting that the collectives use. */
#ifndef LOCKSTEP_SYNC_H
#define LOCKSTEP_SYNC_H

#include "_shm.h"

int64_t deadline_after(int64_t timeout_ms);
char *outbox(const Group *g, int rank, uint32_t step);
char *results(const Group *g, int rank, uint32_t step);
void announce(Word *word, uint32_t value);
int await_all(Group *g, size_t word_at, uint32_t target, int64_t deadline_ms);

#endif
