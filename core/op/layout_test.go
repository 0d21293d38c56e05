package op

import (
	"reflect"
	"testing"

	"github.com/deepep-go/deepep/internal/testutil/structs"
)

// mirrors are the structs of deepep.h that this package has.
var mirrors = map[string]any{
	"deepep_config": Config{}, "deepep_warmup_options": WarmupOptions{}, "deepep_layout": LayoutArgs{}, "deepep_handle": Handle{},
	"deepep_notify": NotifyArgs{}, "deepep_dispatch_args": DispatchArgs{}, "deepep_combine_args": CombineArgs{},
	"deepep_ll_dispatch_args": LLDispatchArgs{}, "deepep_ll_combine_args": LLCombineArgs{},
	"deepep_balance_args": BalanceArgs{},
}

// golden is what a C compiler said of deepep.h, less the fields that Go leaves without a name.
func golden(t *testing.T) map[string]string {
	return structs.Golden(t, "../../include/deepep.layout", "struct_size", "magic", "version")
}

// The C API hands these structs to Go as they lie in C's memory: every field must be where the C compiler put it.
func TestLayoutsEqualTheGolden(t *testing.T) {
	want := golden(t)
	for name, value := range mirrors {
		if got, want := structs.Layout(reflect.TypeOf(value)), want[name]; got != want {
			t.Errorf("%s\nin Go:\n%s\nin C:\n%s", name, got, want)
		}
	}
}

// A narrowed field must be seen: the check is shown to fail.
func TestLayoutSeesANarrowedField(t *testing.T) {
	type narrowed struct {
		NumSMs                                                   int16
		NVLSendChunk, NVLRecvChunk, RDMASendChunk, RDMARecvChunk int32
	}
	if structs.Layout(reflect.TypeFor[narrowed]()) == golden(t)["deepep_config"] {
		t.Error("a narrowed field passes")
	}
}

func TestOperationsHaveNames(t *testing.T) {
	for number, want := range map[Operation]string{OpNone: "none", OpLLDispatch: "low_latency_dispatch", OpMask: "mask", NumOps: "operation 10"} {
		if got := number.String(); got != want {
			t.Errorf("operation %d: %q, want %q", uint32(number), got, want)
		}
	}
	if len(operationNames) != NumOps {
		t.Errorf("%d names of %d operations", len(operationNames), NumOps)
	}
}

func TestTypeSizes(t *testing.T) {
	for kind, want := range map[Type]int32{Int32: 4, Int64: 8, BF16: 2, FP8: 1, Float32: 4, Uint8: 1, -1: 0, 6: 0} {
		if got := kind.Size(); got != want {
			t.Errorf("type %d: %d bytes, want %d", kind, got, want)
		}
	}
}

// The second step has the shape of the first.
func TestDispatchOfANotify(t *testing.T) {
	n := NotifyArgs{NumTokens: 1, NumTopK: 2, NumExperts: 3, NumWorstTokens: 4, XType: FP8, NumScales: 5, Hidden: 6, Handle: &Handle{}}
	want := DispatchArgs{Token: 7, NumTokens: 1, NumTopK: 2, NumExperts: 3, NumWorstTokens: 4, XType: FP8, NumScales: 5, Hidden: 6, Handle: n.Handle}
	if got := n.Dispatch(7); got != want {
		t.Errorf("got %+v", got)
	}
}
