// copies.h - copies that lanes begin and wait for later. They take effect at some time in between.
#pragma once
#include "emulate.h"

namespace emulate {

// By one lane. Groups are waited for by the number of newer ones that may be under way still.
void copy_word(void *shared, const void *global);
void commit_words();
void wait_for_words(int pending);

void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier);
void bulk_store(void *global, const void *shared, uint32_t bytes);
void commit_bulk();
void wait_for_bulk(int pending, bool read_alone);

void init_barrier(uint64_t *word, uint32_t arrivals);
void arrive_expecting(uint64_t *word, uint32_t bytes);
bool try_barrier(const uint64_t *word, uint32_t parity);

// For blocks.cpp: some of the block's copies take effect; a lane ends, which none that uses shared memory may outlive.
void copy_some(Block *own);
void end_copies(Lane *lane);

}  // namespace emulate
