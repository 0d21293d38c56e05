package main

/*
#include <stdlib.h>
#include <string.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"time"
	"unsafe"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
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

// copyString copies a string into a C array, cut to fit and ended by 0.
func copyString(to []C.char, text string) {
	n := min(len(text), len(to)-1)
	for i := range n {
		to[i] = C.char(text[i])
	}
	to[n] = 0
}

//export dpgo_engine_query
func dpgo_engine_query(name *C.char, info *C.deepep_engine_info) C.int32_t {
	return guard(func() error {
		found, err := core.QueryEngine(goString(name))
		if err != nil {
			return err
		}
		info.available, info.num_devices = flag(found.Available), C.int32_t(found.NumDevices)
		info.sm90_compiled = flag(found.SM90Compiled)
		copyString(info.name[:], found.Name)
		copyString(info.path[:], found.Path)
		copyString(info.build[:], found.Build)
		copyString(info.reason[:], found.Reason)
		return nil
	})
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// allGather calls the program's all-gather; nil for none.
func allGather(fn C.deepep_allgather_fn, user unsafe.Pointer) func(ctx context.Context, send, recv []byte) error {
	if fn == nil {
		return nil
	}
	return func(_ context.Context, send, recv []byte) error {
		code := C.dp_allgather(fn, unsafe.Pointer(unsafe.SliceData(send)), unsafe.Pointer(unsafe.SliceData(recv)), C.size_t(len(send)), user)
		if code != 0 {
			return status.Errorf(status.System, "the allgather callback returned %d", int32(code))
		}
		return nil
	}
}

// goString copies a C string; "" for NULL.
func goString(p *C.char) string {
	if p == nil {
		return ""
	}
	return C.GoString(p)
}

func milliseconds(n C.int64_t) time.Duration { return time.Duration(n) * time.Millisecond }

// timeout converts slice_ms. A negative value means no limit.
func timeout(ms C.int64_t) time.Duration {
	if ms < 0 {
		return -1
	}
	return milliseconds(ms)
}

func exchanger(ctx context.Context, o *C.deepep_group_options) (core.Exchanger, error) {
	rank, size, name := int(o.rank), int(o.size), goString(o.name)
	switch o.bootstrap {
	case C.DEEPEP_BOOTSTRAP_CALLBACK:
		return core.NewAllGather(rank, size, allGather(o.allgather, o.user)), nil
	case C.DEEPEP_BOOTSTRAP_TCP:
		return core.DialTCP(ctx, core.TCPOptions{Rank: rank, Size: size, Address: goString(o.address), Secret: name})
	case C.DEEPEP_BOOTSTRAP_FILE:
		return core.OpenFile(ctx, core.FileOptions{Rank: rank, Size: size, Dir: goString(o.directory), Name: name})
	}
	return nil, status.InvalidArg("bootstrap", int32(o.bootstrap), "DEEPEP_BOOTSTRAP_CALLBACK (0), _TCP (1), _FILE (2) or _JOIN (3)")
}

//export dpgo_group_create
func dpgo_group_create(o *C.deepep_group_options, out *C.uintptr_t) C.int32_t {
	return guard(func() error {
		settings, err := env.Current()
		if err != nil {
			return err
		}
		limit, err := settings.StartLimit(milliseconds(o.timeout_ms))
		if err != nil {
			return err
		}
		ctx, done := context.WithTimeout(context.Background(), limit)
		defer done()
		if o.bootstrap == C.DEEPEP_BOOTSTRAP_JOIN {
			group, err := core.JoinGroup(ctx, core.JoinOptions{
				Key: goString(o.name), Rank: int(o.rank), Engine: goString(o.engine), Device: int(o.device), Timeout: limit,
			})
			if err != nil {
				return err
			}
			*out = C.uintptr_t(handles.add(group))
			return nil
		}
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

func bufferOptions(o *C.deepep_buffer_options) core.BufferOptions {
	return core.BufferOptions{
		Engine: goString(o.engine), Device: int(o.device), NumNVLBytes: uint64(o.num_nvl_bytes), NumRDMABytes: uint64(o.num_rdma_bytes),
		LowLatency: o.low_latency_mode != 0, NumQPsPerRank: int(o.num_qps_per_rank),
		DisableNVLink: o.allow_nvlink_for_low_latency_mode == 0, AllowMNNVL: o.allow_mnnvl != 0, UseFabric: o.use_fabric != 0,
		Shrink: o.enable_shrink != 0, Preinitialize: o.preinitialize != 0, Background: o.background != 0,
		Timeout: milliseconds(o.timeout_ms), FirstTimeout: milliseconds(o.first_timeout_ms),
		Shape: core.Shape{
			NumTokens: int32(o.num_tokens), Hidden: int32(o.hidden), NumTopK: int32(o.num_topk), NumExperts: int32(o.num_experts),
		},
	}
}

//export dpgo_buffer_create
func dpgo_buffer_create(group C.uintptr_t, o *C.deepep_buffer_options, out *C.uintptr_t) C.int32_t {
	return guard(func() error {
		g, err := find[*core.Group](uintptr(group), "group")
		if err != nil {
			return err
		}
		b, err := g.NewBuffer(context.Background(), bufferOptions(o))
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

//export dpgo_await_frees
func dpgo_await_frees(limitMS C.int64_t) C.int32_t {
	return flag(engine.AwaitFrees(milliseconds(limitMS)))
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
		info.rdma_team_start, info.rdma_team_stride = C.int32_t(i.RDMATeam.Start), C.int32_t(i.RDMATeam.Stride)
		info.rdma_team_size = C.int32_t(i.RDMATeam.Size)
		info.nvl_rank, info.device = C.int32_t(i.NVLRank), C.int32_t(i.Device)
		info.num_device_sms, info.host_stream = C.int32_t(i.NumDeviceSMs), flag(i.HostStream)
		info.peer_rows, info.ready, info.ll_copies = flag(i.PeerRows), flag(i.Ready), flag(i.LLCopies)
		info.normal_copies, info.ll_on_stream = flag(i.NormalCopies), flag(i.LLOnStream)
		info.num_nvl_bytes, info.num_rdma_bytes = C.uint64_t(i.NVLBytes), C.uint64_t(i.RDMABytes)
		info.total_bytes = C.uint64_t(i.TotalBytes)
		info.control_bytes, info.wire_bytes = C.uint64_t(i.ControlBytes), C.uint64_t(i.WireBytes)
		info.row_segment_bytes = C.uint64_t(i.RowSegmentBytes)
		info.num_qp_peers, info.num_qps_per_peer, info.qp_depth = C.int32_t(i.QPPeers), C.int32_t(i.QPsPerPeer), C.int32_t(i.QPDepth)
		info.num_nics, info.num_qps_per_nic, info.num_qps = C.int32_t(i.NICs), C.int32_t(i.QPsPerNIC), C.int32_t(i.QPs)
		info.timeout_ms, info.first_timeout_ms = C.int64_t(i.Timeout.Milliseconds()), C.int64_t(i.FirstTimeout.Milliseconds())
		copyString(info.engine[:], i.Engine)
		copyString(info.device_name[:], i.DeviceName)
		*(*C.uintptr_t)(unsafe.Pointer(&info.comm_stream)) = C.uintptr_t(i.CommStream) // a number for Go, not a pointer
		return nil
	})
}

//export dpgo_buffer_wait_ready
func dpgo_buffer_wait_ready(id C.uintptr_t, ms C.int64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.WaitReady(timeout(ms)) })
}

//export dpgo_buffer_release
func dpgo_buffer_release(id C.uintptr_t, ms C.int64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.Release(timeout(ms)) })
}

//export dpgo_buffer_restore
func dpgo_buffer_restore(id C.uintptr_t, ms C.int64_t) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error { return b.Restore(timeout(ms)) })
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
	return withBuffer(id, func(b *core.Buffer) error {
		_, err := b.Warmup(*args[op.WarmupOptions](o))
		return err
	})
}

//export dpgo_buffer_startup_report
func dpgo_buffer_startup_report(id C.uintptr_t, r *C.deepep_startup_report) C.int32_t {
	return withBuffer(id, func(b *core.Buffer) error {
		report, err := b.StartupReport()
		*args[op.StartupReport](r) = report
		r.struct_size = C.uint32_t(unsafe.Sizeof(*r))
		return err
	})
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
