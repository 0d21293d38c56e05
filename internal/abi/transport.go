package abi

// TransportOpenParams is dk_transport_open_params.
type TransportOpenParams struct {
	Header
	Device     uint64
	Rank       int32
	NumRanks   int32
	NumQPs     int32
	QPDepth    int32
	NumPeers   int32
	Flags      uint32
	HostPeers  uint64
	HostBlocks uint64
	BlockBytes uint64
	Seed       uint64
	Transport  uint64
}

// TransportCloseParams is dk_transport_close_params.
type TransportCloseParams struct {
	Header
	Transport uint64
}

// TransportPutParams is dk_transport_put_params.
type TransportPutParams struct {
	Header
	Transport    uint64
	Stream       uint64
	Peer         int32
	QP           int32
	DstOffset    uint64
	Src          uint64
	Bytes        uint64
	SignalOffset uint64
	SignalValue  uint64
	SignalOp     uint32
	Flags        uint32
	TimeoutNS    uint64
}

// TransportQuietParams is dk_transport_quiet_params.
type TransportQuietParams struct {
	Header
	Transport uint64
	Stream    uint64
	Peer      int32
	QP        int32
	TimeoutNS uint64
}

// TransportQueryParams is dk_transport_query_params.
type TransportQueryParams struct {
	Header
	Transport uint64
	Peer      int32
	QP        int32
	Posted    uint64
	Completed uint64
	Bytes     uint64
	MaxQueued uint64
	Created   int32
	Lost      int32
}

// TransportLoseParams is dk_transport_lose_params.
type TransportLoseParams struct {
	Header
	Transport uint64
	Peer      int32
	_         int32
}

// TransportIDBytes is DK_TRANSPORT_ID_BYTES.
const TransportIDBytes = 128

// TransportUniqueIDParams is dk_transport_unique_id_params.
type TransportUniqueIDParams struct {
	Header
	NumRanks    int32
	NumNVLPeers int32
	NumQPs      int32
	QPDepth     int32
	ID          [TransportIDBytes]byte
	Reason      [512]byte
}

// TransportAttachParams is dk_transport_attach_params.
type TransportAttachParams struct {
	Header
	Device      uint64
	Rank        int32
	NumRanks    int32
	NumNVLPeers int32
	NumQPs      int32
	QPDepth     int32
	_           int32
	ID          [TransportIDBytes]byte
	Attachment  uint64
	Version     [64]byte
	Reason      [512]byte
}

// TransportDetachParams is dk_transport_detach_params.
type TransportDetachParams struct {
	Header
	Attachment uint64
}

// TransportAllocParams is dk_transport_alloc_params.
type TransportAllocParams struct {
	Header
	Attachment     uint64
	Bytes          uint64
	HostPeerBlocks uint64
	Mem            uint64
	Address        uint64
	OutBytes       uint64
}

// TransportFreeParams is dk_transport_free_params.
type TransportFreeParams struct {
	Header
	Mem uint64
}
