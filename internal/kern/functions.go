package kern

import (
	"unsafe"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/dl"
)

// Parameters of the functions below, so that users of this package need not import abi for them.
type (
	InfoParams            = abi.InfoParams
	DeviceOpenParams      = abi.DeviceOpenParams
	DeviceCloseParams     = abi.DeviceCloseParams
	MemAllocParams        = abi.MemAllocParams
	MemExportParams       = abi.MemExportParams
	MemImportParams       = abi.MemImportParams
	MemFreeParams         = abi.MemFreeParams
	HostRegisterParams    = abi.HostRegisterParams
	HostUnregisterParams  = abi.HostUnregisterParams
	HostWaitParams        = abi.HostWaitParams
	StreamCreateParams    = abi.StreamCreateParams
	StreamDestroyParams   = abi.StreamDestroyParams
	StreamQueryParams     = abi.StreamQueryParams
	EventCreateParams     = abi.EventCreateParams
	EventDestroyParams    = abi.EventDestroyParams
	EventRecordParams     = abi.EventRecordParams
	StreamWaitEventParams = abi.StreamWaitEventParams
	EventWaitParams       = abi.EventWaitParams
	StatsFlushParams      = abi.StatsFlushParams
	CopyParams            = abi.CopyParams
	FillParams            = abi.FillParams
	BlockSizesParams      = abi.BlockSizesParams
	LLLayoutParams        = abi.LLLayoutParams
	TeamCreateParams      = abi.TeamCreateParams
	TeamDestroyParams     = abi.TeamDestroyParams
	TeamSegmentParams     = abi.TeamSegmentParams
	LayoutParams          = abi.LayoutParams
	NotifyParams          = abi.NotifyParams
	DispatchParams        = abi.DispatchParams
	CombineParams         = abi.CombineParams
	LLDispatchParams      = abi.LLDispatchParams
	LLCombineParams       = abi.LLCombineParams
	CleanParams           = abi.CleanParams
	BarrierParams         = abi.BarrierParams
	MaskParams            = abi.MaskParams
	TransportOpenParams   = abi.TransportOpenParams
	TransportCloseParams  = abi.TransportCloseParams
	TransportPutParams    = abi.TransportPutParams
	TransportQuietParams  = abi.TransportQuietParams
	TransportQueryParams  = abi.TransportQueryParams
	TransportLoseParams   = abi.TransportLoseParams

	TransportUniqueIDParams = abi.TransportUniqueIDParams
	TransportAttachParams   = abi.TransportAttachParams
	TransportDetachParams   = abi.TransportDetachParams
	TransportAllocParams    = abi.TransportAllocParams
	TransportFreeParams     = abi.TransportFreeParams
)

// functions holds the address of each dk_* function.
type functions struct {
	info            uintptr
	deviceOpen      uintptr
	deviceClose     uintptr
	memAlloc        uintptr
	memExport       uintptr
	memImport       uintptr
	memFree         uintptr
	hostRegister    uintptr
	hostUnregister  uintptr
	hostWait        uintptr
	streamCreate    uintptr
	streamDestroy   uintptr
	streamQuery     uintptr
	eventCreate     uintptr
	eventDestroy    uintptr
	eventRecord     uintptr
	streamWaitEvent uintptr
	eventWait       uintptr
	copy            uintptr
	fill            uintptr
	blockSizes      uintptr
	llLayout        uintptr
	teamCreate      uintptr
	teamDestroy     uintptr
	teamSegment     uintptr
	statsFlush      uintptr
	layout          uintptr
	notify          uintptr
	dispatch        uintptr
	combine         uintptr
	llDispatch      uintptr
	llCombine       uintptr
	clean           uintptr
	barrier         uintptr
	mask            uintptr

	transport transport
	heap      transportHeap
}

// symbols names every function and the place of its address.
func (f *functions) symbols() map[string]*uintptr {
	return map[string]*uintptr{
		"dk_info":              &f.info,
		"dk_device_open":       &f.deviceOpen,
		"dk_device_close":      &f.deviceClose,
		"dk_mem_alloc":         &f.memAlloc,
		"dk_mem_export":        &f.memExport,
		"dk_mem_import":        &f.memImport,
		"dk_mem_free":          &f.memFree,
		"dk_host_register":     &f.hostRegister,
		"dk_host_unregister":   &f.hostUnregister,
		"dk_host_wait":         &f.hostWait,
		"dk_stream_create":     &f.streamCreate,
		"dk_stream_destroy":    &f.streamDestroy,
		"dk_stream_query":      &f.streamQuery,
		"dk_event_create":      &f.eventCreate,
		"dk_event_destroy":     &f.eventDestroy,
		"dk_event_record":      &f.eventRecord,
		"dk_stream_wait_event": &f.streamWaitEvent,
		"dk_event_wait":        &f.eventWait,
		"dk_copy":              &f.copy,
		"dk_fill":              &f.fill,
		"dk_block_sizes":       &f.blockSizes,
		"dk_ll_layout":         &f.llLayout,
		"dk_team_create":       &f.teamCreate,
		"dk_team_destroy":      &f.teamDestroy,
		"dk_team_segment":      &f.teamSegment,
		"dk_stats_flush":       &f.statsFlush,
		"dk_layout":            &f.layout,
		"dk_notify":            &f.notify,
		"dk_dispatch":          &f.dispatch,
		"dk_combine":           &f.combine,
		"dk_ll_dispatch":       &f.llDispatch,
		"dk_ll_combine":        &f.llCombine,
		"dk_clean":             &f.clean,
		"dk_barrier":           &f.barrier,
		"dk_mask":              &f.mask,
	}
}

// int32_t dk_info(dk_info_params *p);
func (l *Library) Info(p *InfoParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.info, unsafe.Pointer(p))
}

// int32_t dk_device_open(dk_device_open_params *p);
func (l *Library) DeviceOpen(p *DeviceOpenParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.deviceOpen, unsafe.Pointer(p))
}

// int32_t dk_device_close(dk_device_close_params *p);
func (l *Library) DeviceClose(p *DeviceCloseParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.deviceClose, unsafe.Pointer(p))
}

// int32_t dk_mem_alloc(dk_mem_alloc_params *p);
func (l *Library) MemAlloc(p *MemAllocParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.memAlloc, unsafe.Pointer(p))
}

// int32_t dk_mem_export(dk_mem_export_params *p);
func (l *Library) MemExport(p *MemExportParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.memExport, unsafe.Pointer(p))
}

// int32_t dk_mem_import(dk_mem_import_params *p);
func (l *Library) MemImport(p *MemImportParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.memImport, unsafe.Pointer(p))
}

// int32_t dk_mem_free(dk_mem_free_params *p);
func (l *Library) MemFree(p *MemFreeParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.memFree, unsafe.Pointer(p))
}

// int32_t dk_host_register(dk_host_register_params *p);
func (l *Library) HostRegister(p *HostRegisterParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.hostRegister, unsafe.Pointer(p))
}

// int32_t dk_host_unregister(dk_host_unregister_params *p);
func (l *Library) HostUnregister(p *HostUnregisterParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.hostUnregister, unsafe.Pointer(p))
}

// int32_t dk_host_wait(dk_host_wait_params *p);
func (l *Library) HostWait(p *HostWaitParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.hostWait, unsafe.Pointer(p))
}

// int32_t dk_stream_create(dk_stream_create_params *p);
func (l *Library) StreamCreate(p *StreamCreateParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.streamCreate, unsafe.Pointer(p))
}

// int32_t dk_stream_destroy(dk_stream_destroy_params *p);
func (l *Library) StreamDestroy(p *StreamDestroyParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.streamDestroy, unsafe.Pointer(p))
}

// int32_t dk_stream_query(dk_stream_query_params *p);
func (l *Library) StreamQuery(p *StreamQueryParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.streamQuery, unsafe.Pointer(p))
}

// int32_t dk_event_create(dk_event_create_params *p);
func (l *Library) EventCreate(p *EventCreateParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.eventCreate, unsafe.Pointer(p))
}

// int32_t dk_event_destroy(dk_event_destroy_params *p);
func (l *Library) EventDestroy(p *EventDestroyParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.eventDestroy, unsafe.Pointer(p))
}

// int32_t dk_event_record(dk_event_record_params *p);
func (l *Library) EventRecord(p *EventRecordParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.eventRecord, unsafe.Pointer(p))
}

// int32_t dk_stream_wait_event(dk_stream_wait_event_params *p);
func (l *Library) StreamWaitEvent(p *StreamWaitEventParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.streamWaitEvent, unsafe.Pointer(p))
}

// int32_t dk_event_wait(dk_event_wait_params *p);
func (l *Library) EventWait(p *EventWaitParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.eventWait, unsafe.Pointer(p))
}

// int32_t dk_copy(dk_copy_params *p);
func (l *Library) Copy(p *CopyParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.copy, unsafe.Pointer(p))
}

// int32_t dk_fill(dk_fill_params *p);
func (l *Library) Fill(p *FillParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.fill, unsafe.Pointer(p))
}

// int32_t dk_block_sizes(dk_block_sizes_params *p);
func (l *Library) BlockSizes(p *BlockSizesParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.blockSizes, unsafe.Pointer(p))
}

// int32_t dk_ll_layout(dk_ll_layout_params *p);
func (l *Library) LLLayout(p *LLLayoutParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.llLayout, unsafe.Pointer(p))
}

// int32_t dk_team_create(dk_team_create_params *p);
func (l *Library) TeamCreate(p *TeamCreateParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.teamCreate, unsafe.Pointer(p))
}

// int32_t dk_team_destroy(dk_team_destroy_params *p);
func (l *Library) TeamDestroy(p *TeamDestroyParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.teamDestroy, unsafe.Pointer(p))
}

// int32_t dk_team_segment(dk_team_segment_params *p);
func (l *Library) TeamSegment(p *TeamSegmentParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.teamSegment, unsafe.Pointer(p))
}

// int32_t dk_stats_flush(dk_stats_flush_params *p);
func (l *Library) StatsFlush(p *StatsFlushParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.statsFlush, unsafe.Pointer(p))
}

// int32_t dk_layout(dk_layout_params *p);
func (l *Library) Layout(p *LayoutParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.layout, unsafe.Pointer(p))
}

// int32_t dk_notify(dk_notify_params *p);
func (l *Library) Notify(p *NotifyParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.notify, unsafe.Pointer(p))
}

// int32_t dk_dispatch(dk_dispatch_params *p);
func (l *Library) Dispatch(p *DispatchParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.dispatch, unsafe.Pointer(p))
}

// int32_t dk_combine(dk_combine_params *p);
func (l *Library) Combine(p *CombineParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.combine, unsafe.Pointer(p))
}

// int32_t dk_ll_dispatch(dk_ll_dispatch_params *p);
func (l *Library) LLDispatch(p *LLDispatchParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.llDispatch, unsafe.Pointer(p))
}

// int32_t dk_ll_combine(dk_ll_combine_params *p);
func (l *Library) LLCombine(p *LLCombineParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.llCombine, unsafe.Pointer(p))
}

// int32_t dk_clean(dk_clean_params *p);
func (l *Library) Clean(p *CleanParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.clean, unsafe.Pointer(p))
}

// int32_t dk_barrier(dk_barrier_params *p);
func (l *Library) Barrier(p *BarrierParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.barrier, unsafe.Pointer(p))
}

// int32_t dk_mask(dk_mask_params *p);
func (l *Library) Mask(p *MaskParams) int32 {
	p.Size = uint32(unsafe.Sizeof(*p))
	return dl.Call(l.fn.mask, unsafe.Pointer(p))
}
