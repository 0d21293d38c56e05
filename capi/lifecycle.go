package main

/*
#include <stdlib.h>
#include <string.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"encoding/binary"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
)

//export dpgo_set_log_callback
func dpgo_set_log_callback(fn C.deepep_log_fn, user unsafe.Pointer) C.int32_t {
	return guard(func() error {
		if fn == nil {
			core.SetLog(nil)
			return nil
		}
		core.SetLog(func(level int, message string) {
			text := C.CString(message)
			C.dp_log(fn, C.int32_t(level), text, user)
			C.free(unsafe.Pointer(text))
		})
		return nil
	})
}

// put copies a string into a C array, cut to fit and ended by 0.
func put(to []C.char, text string) {
	n := min(len(text), len(to)-1)
	for i := range n {
		to[i] = C.char(text[i])
	}
	to[n] = 0
}

//export dpgo_engine_query
func dpgo_engine_query(name *C.char, info *C.deepep_engine_info) C.int32_t {
	return guard(func() error {
		found, err := core.QueryEngine(C.GoString(name))
		if err != nil {
			return err
		}
		info.available, info.num_devices = flag(found.Available), C.int32_t(found.NumDevices)
		info.sm90_compiled = flag(found.SM90Compiled)
		put(info.name[:], found.Name)
		put(info.path[:], found.Path)
		put(info.build[:], found.Build)
		put(info.reason[:], found.Reason)
		return nil
	})
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// gatherBytes is what each rank gives to the caller's all-gather: a length and a blob, padded so that all are equal.
const gatherBytes = 4096

func gather(fn C.deepep_allgather_fn, user unsafe.Pointer, size int) func(context.Context, []byte) ([][]byte, error) {
	return func(_ context.Context, blob []byte) ([][]byte, error) {
		if len(blob) > gatherBytes-4 {
			return nil, core.Errorf(core.CodeOf(core.ErrInternal), "%d bytes do not fit the first exchange", len(blob))
		}
		send, recv := (*[gatherBytes]byte)(C.calloc(1, gatherBytes)), C.calloc(C.size_t(size), gatherBytes)
		defer C.free(unsafe.Pointer(send))
		defer C.free(recv)
		binary.LittleEndian.PutUint32(send[:], uint32(len(blob)))
		copy(send[4:], blob)
		if code := C.dp_allgather(fn, unsafe.Pointer(send), recv, gatherBytes, user); code != 0 {
			return nil, core.Errorf(core.CodeOf(core.ErrSystem), "the allgather callback returned %d", int32(code))
		}
		all := unsafe.Slice((*byte)(recv), size*gatherBytes)
		blobs := make([][]byte, size)
		for rank := range blobs {
			part := all[rank*gatherBytes : (rank+1)*gatherBytes]
			n := binary.LittleEndian.Uint32(part)
			if n > gatherBytes-4 {
				return nil, core.Errorf(core.CodeOf(core.ErrMismatch), "the allgather callback gave something else than rank %d sent", rank)
			}
			blobs[rank] = append([]byte(nil), part[4:4+n]...)
		}
		return blobs, nil
	}
}

func text(p *C.char, otherwise string) string {
	if p == nil {
		return otherwise
	}
	return C.GoString(p)
}

func milliseconds(n C.int64_t) time.Duration { return time.Duration(n) * time.Millisecond }

// slice is a waiting call's patience: less than 0 for ever.
func slice(ms C.int64_t) time.Duration {
	if ms < 0 {
		return -1
	}
	return milliseconds(ms)
}

func exchanger(ctx context.Context, o *C.deepep_group_options) (core.Exchanger, error) {
	rank, size, name := int(o.rank), int(o.size), text(o.name, "default")
	if size < 1 {
		return nil, core.InvalidArg("size", size, "1 or more")
	}
	if rank < 0 || rank >= size {
		return nil, core.InvalidArg("rank", rank, "0 or more, less than size")
	}
	switch o.bootstrap {
	case C.DEEPEP_BOOTSTRAP_CALLBACK:
		if o.allgather == nil {
			return nil, core.InvalidArg("allgather", "NULL", "a function, since bootstrap is DEEPEP_BOOTSTRAP_CALLBACK")
		}
		return core.NewCallback(rank, size, gather(o.allgather, o.user, size)), nil
	case C.DEEPEP_BOOTSTRAP_TCP:
		address := text(o.address, "")
		if address == "" {
			address = getenv("MASTER_ADDR") + ":" + getenv("MASTER_PORT")
		}
		if address == ":" {
			return nil, core.InvalidArg("address", "NULL", "\"host:port\" of rank 0, or MASTER_ADDR and MASTER_PORT set")
		}
		return core.DialTCP(ctx, core.TCPOptions{Rank: rank, Size: size, Address: address, Secret: name})
	case C.DEEPEP_BOOTSTRAP_FILE:
		if o.directory == nil {
			return nil, core.InvalidArg("directory", "NULL", "a folder that all ranks see")
		}
		return core.OpenFile(ctx, core.FileOptions{Rank: rank, Size: size, Dir: C.GoString(o.directory), Name: name})
	}
	return nil, core.InvalidArg("bootstrap", int32(o.bootstrap), "DEEPEP_BOOTSTRAP_CALLBACK (0), _TCP (1) or _FILE (2)")
}

//export dpgo_group_create
func dpgo_group_create(o *C.deepep_group_options, out *C.uintptr_t) C.int32_t {
	return guard(func() error {
		limit, err := core.StartLimit(milliseconds(o.timeout_ms))
		if err != nil {
			return err
		}
		ctx, done := context.WithTimeout(context.Background(), limit)
		defer done()
		ex, err := exchanger(ctx, o)
		if err != nil {
			return err
		}
		group, err := core.NewGroup(ctx, core.GroupOptions{
			Exchanger: ex, NumNVLPeers: int(o.num_nvl_peers), Background: o.background != 0, Timeout: limit,
		})
		if err != nil {
			return err
		}
		*out = C.uintptr_t(handles.add(group))
		return nil
	})
}

//export dpgo_group_destroy
func dpgo_group_destroy(id C.uintptr_t) C.int32_t {
	return guard(func() error { return release[*core.Group](uintptr(id), "group") })
}

//export dpgo_buffer_create
func dpgo_buffer_create(group C.uintptr_t, o *C.deepep_buffer_options, out *C.uintptr_t) C.int32_t {
	return guard(func() error {
		g, err := find[*core.Group](uintptr(group), "group")
		if err != nil {
			return err
		}
		b, err := g.NewBuffer(context.Background(), core.BufferOptions{
			Engine: text(o.engine, ""), Device: int(o.device), NumNVLBytes: uint64(o.num_nvl_bytes), NumRDMABytes: uint64(o.num_rdma_bytes),
			LowLatency: o.low_latency_mode != 0, NumQPsPerRank: int(o.num_qps_per_rank),
			DisableNVLink: o.allow_nvlink_for_low_latency_mode == 0, AllowMNNVL: o.allow_mnnvl != 0, UseFabric: o.use_fabric != 0,
			Shrink: o.enable_shrink != 0, Preinitialize: o.preinitialize != 0, Background: o.background != 0,
			Timeout: milliseconds(o.timeout_ms), FirstTimeout: milliseconds(o.first_timeout_ms),
		})
		if err != nil {
			return err
		}
		*out = C.uintptr_t(handles.add(b))
		return nil
	})
}

//export dpgo_buffer_destroy
func dpgo_buffer_destroy(id C.uintptr_t) C.int32_t {
	return guard(func() error { return release[*core.Buffer](uintptr(id), "buffer") })
}

//export dpgo_buffer_info_get
func dpgo_buffer_info_get(id C.uintptr_t, info *C.deepep_buffer_info) C.int32_t {
	return guard(func() error {
		b, err := buffer(uintptr(id))
		if err != nil {
			return err
		}
		i := b.Info()
		info.rank, info.size, info.num_nvl_peers = C.int32_t(i.Rank), C.int32_t(i.Size), C.int32_t(i.NumNVLPeers)
		info.rdma_rank, info.num_rdma_ranks = C.int32_t(i.RDMARank), C.int32_t(i.NumRDMARanks)
		info.nvl_rank, info.device = C.int32_t(i.NVLRank), C.int32_t(i.Device)
		info.num_device_sms, info.host_stream = C.int32_t(i.NumDeviceSMs), flag(i.HostStream)
		info.peer_rows, info.ready = flag(i.PeerRows), flag(i.Ready)
		info.num_nvl_bytes, info.num_rdma_bytes = C.uint64_t(i.NVLBytes), C.uint64_t(i.RDMABytes)
		info.total_bytes = C.uint64_t(i.TotalBytes)
		put(info.engine[:], i.Engine)
		put(info.device_name[:], i.DeviceName)
		*(*C.uintptr_t)(unsafe.Pointer(&info.comm_stream)) = C.uintptr_t(i.CommStream) // a number for Go, not a pointer
		return nil
	})
}

//export dpgo_buffer_wait_ready
func dpgo_buffer_wait_ready(id C.uintptr_t, ms C.int64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.WaitReady(slice(ms)) })
}

//export dpgo_buffer_check
func dpgo_buffer_check(id C.uintptr_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.Check() })
}

//export dpgo_buffer_region
func dpgo_buffer_region(id C.uintptr_t, rdma C.int32_t, address, bytes *C.uint64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		a, n, err := b.Region(rdma != 0)
		*address, *bytes = C.uint64_t(a), C.uint64_t(n)
		return err
	})
}

//export dpgo_buffer_warmup
func dpgo_buffer_warmup(id C.uintptr_t, o *C.deepep_warmup_options) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.Warmup(*args[op.WarmupOptions](o)) })
}

func withBuffer(id C.uintptr_t, f func(*core.Buffer) error) C.int32_t {
	return guard(func() error {
		b, err := buffer(uintptr(id))
		if err != nil {
			return err
		}
		return f(b)
	})
}
