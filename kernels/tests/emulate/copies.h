// copies.h - copies that lanes issue and wait for later. They take effect at any time in between.
#pragma once
#include "emulate.h"

namespace emulate {

// By one lane. A wait for groups has the number of newer groups that may still be in flight.
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

// For blocks.cpp: lets some of the block's copies take effect; ends a lane, whose copies must not outlive it.
void copy_some(Block *own);
void end_copies(Lane *lane);

}  // namespace emulate
