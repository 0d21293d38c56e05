package abi

// Header begins every parameter struct: its size in the caller's eyes, and the device's own error number on return.
type Header struct {
	Size        uint32
	DeviceError int32
}

// InfoParams is dk_info_params.
type InfoParams struct {
	Header
	ABIVersion uint32
	Caps       uint32
	NumDevices int32
	_          uint32
	Kind       [16]byte
	Build      [64]byte
	Reason     [256]byte

	MaxLLTopK         int32
	MaxLLTokens       int32
	MaxLLLocalExperts int32
	_                 int32
}

// DeviceOpenParams is dk_device_open_params.
type DeviceOpenParams struct {
	Header
	Ordinal    int32
	ISA        uint32
	Device     uint64
	OutOrdinal int32
	NumSMs     int32
	CCMajor    int32
	CCMinor    int32
	TotalBytes uint64
	FreeBytes  uint64
	UUID       [16]byte
	Name       [64]byte
	ISAName    [32]byte
}

// DeviceCloseParams is dk_device_close_params.
type DeviceCloseParams struct {
	Header
	Device uint64
}

// MemAllocParams is dk_mem_alloc_params.
type MemAllocParams struct {
	Header
	Device   uint64
	Bytes    uint64
	Mem      uint64
	Address  uint64
	OutBytes uint64
}

// MemExportParams is dk_mem_export_params.
type MemExportParams struct {
	Header
	Mem  uint64
	Kind uint32
	FD   int32
	Blob [64]uint8
}

// MemImportParams is dk_mem_import_params.
type MemImportParams struct {
	Header
	Device  uint64
	Bytes   uint64
	Kind    uint32
	FD      int32
	Blob    [64]uint8
	Mem     uint64
	Address uint64
}

// MemFreeParams is dk_mem_free_params.
type MemFreeParams struct {
	Header
	Mem uint64
}

// HostRegisterParams is dk_host_register_params.
type HostRegisterParams struct {
	Header
	Device  uint64
	Host    uint64
	Bytes   uint64
	Address uint64
}

// HostUnregisterParams is dk_host_unregister_params.
type HostUnregisterParams struct {
	Header
	Device uint64
	Host   uint64
}

// HostWaitParams is dk_host_wait_params.
type HostWaitParams struct {
	Header
	Device     uint64
	HostWord   uint64
	AtLeast    uint64
	HostStatus uint64
	TimeoutNS  uint64
}

// StreamCreateParams is dk_stream_create_params.
type StreamCreateParams struct {
	Header
	Device       uint64
	HighPriority int32
	_            int32
	Stream       uint64
}

// StreamDestroyParams is dk_stream_destroy_params.
type StreamDestroyParams struct {
	Header
	Device uint64
	Stream uint64
}

// StreamQueryParams is dk_stream_query_params.
type StreamQueryParams struct {
	Header
	Device    uint64
	Stream    uint64
	Capturing int32
	Idle      int32
}

// EventCreateParams is dk_event_create_params.
type EventCreateParams struct {
	Header
	Device uint64
	Event  uint64
}

// EventDestroyParams is dk_event_destroy_params.
type EventDestroyParams struct {
	Header
	Device uint64
	Event  uint64
}

// EventRecordParams is dk_event_record_params.
type EventRecordParams struct {
	Header
	Device uint64
	Event  uint64
	Stream uint64
}

// StreamWaitEventParams is dk_stream_wait_event_params.
type StreamWaitEventParams struct {
	Header
	Device uint64
	Stream uint64
	Event  uint64
}

// EventWaitParams is dk_event_wait_params.
type EventWaitParams struct {
	Header
	Device    uint64
	Event     uint64
	TimeoutNS uint64
}

// CopyParams is dk_copy_params.
type CopyParams struct {
	Header
	Device uint64
	Stream uint64
	Dst    uint64
	Src    uint64
	Bytes  uint64
}

// FillParams is dk_fill_params.
type FillParams struct {
	Header
	Device uint64
	Stream uint64
	Dst    uint64
	Bytes  uint64
	Value  uint32
	_      uint32
}
