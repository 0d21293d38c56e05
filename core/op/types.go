package op

import "strconv"

// Type is the type of a tensor's elements.
type Type int32

var typeSizes = [...]int32{Int32: 4, Int64: 8, BF16: 2, FP8: 1, Float32: 4, Uint8: 1}

// Size is the bytes of one element; 0 for an unknown type.
func (t Type) Size() int32 {
	if t < 0 || int(t) >= len(typeSizes) {
		return 0
	}
	return typeSizes[t]
}

var typeNames = [...]string{Int32: "int32", Int64: "int64", BF16: "BF16", FP8: "FP8 (e4m3)", Float32: "float32", Uint8: "uint8"}

// String is the type's name: "BF16".
func (t Type) String() string {
	if t < 0 || int(t) >= len(typeNames) {
		return "type " + strconv.Itoa(int(t))
	}
	return typeNames[t]
}

// Routing is what a handle keeps of the routing, and with it the order of received rows.
type Routing int32

// Phase says which halves of a low-latency call are issued.
type Phase int32

// FP4 is the way in which a low-latency dispatch makes rows of FP4; 0: none.
type FP4 int32

// Flags of a low-latency call are added up.
type Flags int32

// Shape is the shape of a rank's calls. 0: not known.
type Shape struct {
	NumTokens  int32 // T; in low-latency mode also B
	Hidden     int32 // H
	NumTopK    int32 // K
	NumExperts int32 // E
}

// Or returns the shape with what is not known taken from other.
func (s Shape) Or(other Shape) Shape {
	fill := func(size *int32, with int32) {
		if *size == 0 {
			*size = with
		}
	}
	fill(&s.NumTokens, other.NumTokens)
	fill(&s.Hidden, other.Hidden)
	fill(&s.NumTopK, other.NumTopK)
	fill(&s.NumExperts, other.NumExperts)
	return s
}

// Complete reports whether all of the shape is known.
func (s Shape) Complete() bool {
	return s.NumTokens != 0 && s.Hidden != 0 && s.NumTopK != 0 && s.NumExperts != 0
}

// WarmupPart says which part of a warm-up a call is.
type WarmupPart int32

// StartPhase is the index of a StartupReport's arrays: when the work was done.
type StartPhase int32

// ShapeFrom says how a warm-up knew its shape.
type ShapeFrom int32

// Operation is an operation of a buffer, as statistics and errors name it.
type Operation uint32

// String is the operation's name: "low_latency_dispatch".
func (o Operation) String() string {
	if int(o) < len(operationNames) {
		return operationNames[o]
	}
	return "operation " + strconv.Itoa(int(o))
}

// Dispatch is the second step to this notify: the arguments of Buffer.Dispatch with the notify's shape and handle, and with
// the token that it returned. The tensors are left to the caller.
func (a *NotifyArgs) Dispatch(token uint64) DispatchArgs {
	return DispatchArgs{
		Token: token, XType: a.XType, NumScales: a.NumScales, Hidden: a.Hidden, NumTokens: a.NumTokens, NumTopK: a.NumTopK,
		NumExperts: a.NumExperts, NumWorstTokens: a.NumWorstTokens, Handle: a.Handle,
	}
}

// Bool is a truth value as the structs' fields have it: 1 or 0.
func Bool(b bool) int32 {
	if b {
		return 1
	}
	return 0
}
