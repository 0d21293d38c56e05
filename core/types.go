package core

import (
	"unsafe"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/status"
)

// Version of the library, as include/deepep.h has it.
const (
	VersionMajor = op.VersionMajor
	VersionMinor = op.VersionMinor
	VersionPatch = op.VersionPatch
)

// Arguments and results of operations; package op has the shapes and types.
type (
	Call           = engine.Call
	Handle         = op.Handle
	LayoutArgs     = op.LayoutArgs
	NotifyArgs     = op.NotifyArgs
	DispatchArgs   = op.DispatchArgs
	CombineArgs    = op.CombineArgs
	LLDispatchArgs = op.LLDispatchArgs
	LLCombineArgs  = op.LLCombineArgs
	Event          = engine.Event
	Segment        = engine.Segment
	Info           = engine.Info
	OpStats        = engine.OpStats
	WarmupOptions  = op.WarmupOptions
	Config         = op.Config
	Type           = op.Type
	Phase          = op.Phase
	Flags          = op.Flags
	Operation      = op.Operation
	Error          = status.Error
	Code           = status.Code
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
