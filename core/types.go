package core

import (
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
	Call           = engine.Call
	Handle         = engine.Handle
	LayoutArgs     = engine.LayoutArgs
	NotifyArgs     = engine.NotifyArgs
	DispatchArgs   = engine.DispatchArgs
	CombineArgs    = engine.CombineArgs
	LLDispatchArgs = engine.LLDispatchArgs
	LLCombineArgs  = engine.LLCombineArgs
	Rows           = plan.Rows
	Event          = engine.Event
	Segment        = engine.Segment
	Info           = engine.Info
	OpStats        = engine.OpStats
	WarmupOptions  = engine.WarmupOptions
	Config         = plan.Config
	Type           = plan.Type
	Error          = status.Error
	Code           = status.Code
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

// Kinds of errors, for errors.Is.
var (
	ErrInvalidArgument = status.ErrInvalidArgument
	ErrInvalidState    = status.ErrInvalidState
	ErrUnsupported     = status.ErrUnsupported
	ErrOutOfMemory     = status.ErrOutOfMemory
	ErrSystem          = status.ErrSystem
	ErrTimeout         = status.ErrTimeout
	ErrPeerDead        = status.ErrPeerDead
	ErrMismatch        = status.ErrMismatch
	ErrAborted         = status.ErrAborted
	ErrNotFound        = status.ErrNotFound
	ErrVersion         = status.ErrVersion
	ErrFork            = status.ErrFork
	ErrInterrupted     = status.ErrInterrupted
	ErrDevice          = status.ErrDevice
	ErrInternal        = status.ErrInternal
)

// CodeOf is the kind of an error as a number; 0 for nil.
func CodeOf(err error) Code { return status.CodeOf(err) }

// Errorf makes an error of a kind, for the layers above.
func Errorf(code Code, format string, args ...any) error { return status.Errorf(code, format, args...) }

// InvalidArg makes the error of an argument check: which argument, what came, what is allowed.
func InvalidArg(name string, given any, allowed string) error {
	return status.InvalidArg(name, given, allowed)
}

// escape is never set. It makes the compiler keep what AddressOf is given on the heap, whose objects do not move.
var (
	escape bool
	sink   unsafe.Pointer
)

// AddressOf is the address of a slice's first element, 0 for an empty one: for plain memory and the CPU engine. The slice
// must be kept alive (runtime.KeepAlive) until the call's event is done.
func AddressOf[T any](s []T) uintptr {
	if len(s) == 0 {
		return 0
	}
	p := unsafe.Pointer(unsafe.SliceData(s))
	if escape {
		sink = p
	}
	return uintptr(p)
}
