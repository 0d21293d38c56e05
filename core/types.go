package core

import (
	"runtime"
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/status"
)

// Version of the library, as include/deepep.h has it.
const (
	VersionMajor = op.VersionMajor
	VersionMinor = op.VersionMinor
	VersionPatch = op.VersionPatch
)

// Arguments and results of operations. Package op documents their fields, with shapes and element types.
type (
	Handle         = op.Handle
	LayoutArgs     = op.LayoutArgs
	NotifyArgs     = op.NotifyArgs
	DispatchArgs   = op.DispatchArgs
	CombineArgs    = op.CombineArgs
	BalanceArgs    = op.BalanceArgs
	LLDispatchArgs = op.LLDispatchArgs
	LLCombineArgs  = op.LLCombineArgs
	Info           = op.Info
	OpStats        = op.OpStats
	WarmupOptions  = op.WarmupOptions
	StartupReport  = op.StartupReport
	Shape          = op.Shape
	Config         = op.Config
	Type           = op.Type
	Phase          = op.Phase
	Flags          = op.Flags
	FP4            = op.FP4
	Operation      = op.Operation
)

// Element types, numbered as in include/deepep.h.
const (
	Int32   = op.Int32
	Int64   = op.Int64
	BF16    = op.BF16
	FP8     = op.FP8
	Float32 = op.Float32
	Uint8   = op.Uint8
)

// What a handle keeps of the routing.
const (
	RoutingNone     = op.RoutingNone
	RoutingPlain    = op.RoutingPlain
	RoutingExpanded = op.RoutingExpanded
)

// Phases and flags of low-latency calls.
const (
	Send     = op.Send
	Recv     = op.Recv
	SendRecv = op.SendRecv

	LLRoundScale = op.LLRoundScale
	LLUE8M0      = op.LLUE8M0
	LLLogFMT     = op.LLLogFMT
	LLZeroCopy   = op.LLZeroCopy
	LLUnreduced  = op.LLUnreduced
)

// Parts of a warm-up, indices of a StartupReport's arrays, and how a warm-up knew its shape.
const (
	WarmupWhole = op.WarmupWhole
	WarmupBegin = op.WarmupBegin
	WarmupEnd   = op.WarmupEnd

	StartConstruction = op.StartConstruction
	StartWarmup       = op.StartWarmup
	StartFirstCalls   = op.StartFirstCalls

	ShapeNone    = op.ShapeNone
	ShapeGiven   = op.ShapeGiven
	ShapeOptions = op.ShapeOptions
	ShapeHint    = op.ShapeHint
	ShapeRegion  = op.ShapeRegion
)

// Operations, for Stats.
const (
	OpLayout     = op.OpLayout
	OpNotify     = op.OpNotify
	OpDispatch   = op.OpDispatch
	OpCombine    = op.OpCombine
	OpLLDispatch = op.OpLLDispatch
	OpLLCombine  = op.OpLLCombine
	OpClean      = op.OpClean
	OpBarrier    = op.OpBarrier
	OpMask       = op.OpMask
	NumOps       = op.NumOps
)

// Kinds of errors, for errors.Is. The text of an error names ranks, arguments and values; C and Python have the same
// kinds.
var (
	ErrInvalidArgument error = status.ErrInvalidArgument // an argument is outside what is allowed; nothing was done
	ErrInvalidState    error = status.ErrInvalidState    // the call does not fit earlier ones: destroyed, or a step is missing
	ErrUnsupported     error = status.ErrUnsupported     // this build, engine or machine cannot do it
	ErrOutOfMemory     error = status.ErrOutOfMemory     // host or device memory
	ErrSystem          error = status.ErrSystem          // the operating system refused
	ErrTimeout         error = status.ErrTimeout         // a peer is alive but late
	ErrPeerDead        error = status.ErrPeerDead        // a peer's process has ended, or it left the group
	ErrMismatch        error = status.ErrMismatch        // ranks disagree on an argument that must be equal
	ErrAborted         error = status.ErrAborted         // an earlier operation of the buffer failed
	ErrNotFound        error = status.ErrNotFound        // a library or one of its functions
	ErrVersion         error = status.ErrVersion         // parts of different versions
	ErrFork            error = status.ErrFork            // used in a forked child
	ErrInterrupted     error = status.ErrInterrupted     // a wait's slice is over; wait again
	ErrDevice          error = status.ErrDevice          // the device reported an error of its own
	ErrInternal        error = status.ErrInternal        // a bug in this library
)

// AddressOf pins the memory of a slice and returns the address of its first element, 0 for an empty slice. The memory
// stays where it is, and alive, until p.Unpin, which comes after the call's event is done:
//
//	var pin runtime.Pinner
//	defer pin.Unpin()
//	args := core.DispatchArgs{X: core.AddressOf(&pin, x)}
//
// It is for plain memory and the CPU engine.
func AddressOf[T any](p *runtime.Pinner, s []T) uintptr {
	if len(s) == 0 {
		return 0
	}
	first := unsafe.SliceData(s)
	p.Pin(first)
	return uintptr(unsafe.Pointer(first))
}
