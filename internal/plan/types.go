package plan

import "github.com/deepep-go/deepep/internal/status"

// Type is an element type of include/deepep.h.
type Type int32

// Element types, numbered as in include/deepep.h.
const (
	Int32   Type = 0
	Int64   Type = 1
	BF16    Type = 2
	FP8     Type = 3 // e4m3
	Float32 Type = 4
	Uint8   Type = 5
)

var typeSizes = [...]int32{Int32: 4, Int64: 8, BF16: 2, FP8: 1, Float32: 4, Uint8: 1}

// Size is the bytes of one element; 0 for an unknown type.
func (t Type) Size() int32 {
	if t < 0 || int(t) >= len(typeSizes) {
		return 0
	}
	return typeSizes[t]
}

func checkIndexType(t Type) error {
	if t != Int32 && t != Int64 {
		return status.InvalidArg("index_type", int32(t), "0 (int32) or 1 (int64)")
	}
	return nil
}
