package core

import (
	"runtime"
	"unsafe"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
	"github.com/deepep-go/deepep/internal/status"
)

// Version of the library, as include/deepep.h has it; a test compares them.
const (
	VersionMajor = 0
	VersionMinor = 1
	VersionPatch = 0
)

// Arguments and results of operations; see the types' own fields for shapes.
type (
	Handle         = engine.Handle
	LayoutArgs     = engine.LayoutArgs
	NotifyArgs     = engine.NotifyArgs
	DispatchArgs   = engine.DispatchArgs
	CombineArgs    = engine.CombineArgs
	LLDispatchArgs = engine.LLDispatchArgs
	LLCombineArgs  = engine.LLCombineArgs
	Rows           = plan.Rows
	Info           = engine.Info
	OpStats        = engine.OpStats
	WarmupOptions  = engine.WarmupOptions
	Config         = plan.Config
	Type           = plan.Type
)

// Element types, numbered as in include/deepep.h.
const (
	Int32   = plan.Int32
	Int64   = plan.Int64
	BF16    = plan.BF16
	FP8     = plan.FP8
	Float32 = plan.Float32
	Uint8   = plan.Uint8
)

// Phases and flags of low-latency calls.
const (
	Send     = abi.PhaseSend
	Recv     = abi.PhaseRecv
	SendRecv = abi.PhaseBoth

	LLRoundScale = plan.LLRoundScale
	LLUE8M0      = plan.LLUE8M0
	LLLogFMT     = plan.LLLogFMT
	LLZeroCopy   = plan.LLZeroCopy
	LLUnreduced  = plan.LLUnreduced
)

// Operations, for Stats.
const (
	OpLayout     = abi.OpLayout
	OpNotify     = abi.OpNotify
	OpDispatch   = abi.OpDispatch
	OpCombine    = abi.OpCombine
	OpLLDispatch = abi.OpLLDispatch
	OpLLCombine  = abi.OpLLCombine
	OpClean      = abi.OpClean
	OpBarrier    = abi.OpBarrier
	OpMask       = abi.OpMask
	NumOps       = abi.NumOps
)

// OpName names an operation as people read it.
func OpName(op uint32) string { return engine.OpName(op) }

// Kinds of errors, for errors.Is. The text of an error names ranks, arguments and values; C and Python have the same kinds.
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

// AddressOf pins the memory of a slice and returns the address of its first element, 0 for an empty slice. The memory stays where
// it is, and alive, until p.Unpin, which comes after the call's event is done:
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
