package main

// #include "shim.h"
import "C"

import (
	"context"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

//export dpgo_buffer_join_key
func dpgo_buffer_join_key(id C.uintptr_t, key *C.char, bytes C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		text, err := b.JoinKey()
		copyString(unsafe.Slice(key, min(bytes, C.DEEPEP_JOIN_KEY_BYTES)), text)
		return err
	})
}

//export dpgo_buffer_pending_joins
func dpgo_buffer_pending_joins(id C.uintptr_t, agreed, capacity C.int32_t, ranks, count *C.int32_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		joins, err := b.PendingJoins()
		if agreed != 0 && err == nil {
			joins, err = b.AgreedJoins(context.Background())
		}
		if err != nil {
			return err
		}
		copyRanks(joins, capacity, ranks, count)
		return nil
	})
}

// copyRanks gives as many ranks as the caller has room for, and their number.
func copyRanks(from []int, capacity C.int32_t, ranks, count *C.int32_t) {
	*count = C.int32_t(len(from))
	for i, rank := range from[:min(len(from), max(0, int(capacity)))] {
		unsafe.Slice(ranks, capacity)[i] = C.int32_t(rank)
	}
}

//export dpgo_buffer_lost_ranks
func dpgo_buffer_lost_ranks(id C.uintptr_t, capacity C.int32_t, ranks, count *C.int32_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		lost, err := b.LostRanks()
		copyRanks(lost, capacity, ranks, count)
		return err
	})
}

//export dpgo_buffer_regroup
func dpgo_buffer_regroup(id C.uintptr_t, o *C.deepep_regroup_options) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		if o.num_members < 1 || o.num_members > plan.MaxRanks {
			return status.InvalidArg("num_members", int32(o.num_members), "1 or more, at most the largest group")
		}
		r := core.RegroupOptions{Renumber: o.renumber != 0, Timeout: milliseconds(o.timeout_ms)}
		for _, rank := range unsafe.Slice(o.members, o.num_members) {
			r.Members = append(r.Members, int(rank))
		}
		return b.Regroup(context.Background(), r)
	})
}
