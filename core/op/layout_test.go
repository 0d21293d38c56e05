package op

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

// mirrors are the structs of deepep.h that this package has.
var mirrors = map[string]any{
	"deepep_config": Config{}, "deepep_warmup_options": WarmupOptions{}, "deepep_layout": LayoutArgs{}, "deepep_handle": Handle{},
	"deepep_notify": NotifyArgs{}, "deepep_dispatch_args": DispatchArgs{}, "deepep_combine_args": CombineArgs{},
	"deepep_ll_dispatch_args": LLDispatchArgs{}, "deepep_ll_combine_args": LLCombineArgs{},
}

// The C API hands these structs to Go as they lie in C's memory: every field must be where the C compiler put it.
func TestLayoutsEqualTheGolden(t *testing.T) {
	golden := readGolden(t)
	for name, value := range mirrors {
		if got, want := layout(reflect.TypeOf(value)), golden[name]; got != want {
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
	if layout(reflect.TypeFor[narrowed]()) == readGolden(t)["deepep_config"] {
		t.Error("a narrowed field passes")
	}
}

// layout lists size and fields of a struct in the form of the golden file; fields without a name take no part.
func layout(s reflect.Type) string {
	text := fmt.Sprintf("%d\n", s.Size())
	for i := range s.NumField() {
		if f := s.Field(i); f.Name != "_" {
			text += fmt.Sprintf("%s %d %d\n", strings.ToLower(f.Name), f.Offset, f.Type.Size())
		}
	}
	return text
}

// readGolden reads what a C compiler said of deepep.h, less the fields that Go leaves without a name.
func readGolden(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../include/deepep.layout")
	if err != nil {
		t.Fatal(err)
	}
	all, current := map[string]string{}, ""
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		switch {
		case !strings.HasPrefix(line, " "):
			current = words[0]
			all[current] = words[1] + "\n"
		case words[0] == "struct_size", words[0] == "magic", words[0] == "version", strings.HasPrefix(words[0], "reserved"):
		default:
			all[current] += strings.ReplaceAll(words[0], "_", "") + " " + words[1] + " " + words[2] + "\n"
		}
	}
	return all
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
