package abi

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

// mirrors names every struct of kernels.h that crosses the boundary.
var mirrors = map[string]any{
	"dk_failure": Failure{}, "dk_status": Status{}, "dk_counts": Counts{}, "dk_op_stats": OpStats{},
	"dk_trace_record": TraceRecord{}, "dk_stats_page": StatsPage{}, "dk_info_params": InfoParams{},
	"dk_device_open_params": DeviceOpenParams{}, "dk_device_close_params": DeviceCloseParams{},
	"dk_mem_alloc_params": MemAllocParams{}, "dk_mem_export_params": MemExportParams{},
	"dk_mem_import_params": MemImportParams{}, "dk_mem_free_params": MemFreeParams{},
	"dk_host_register_params": HostRegisterParams{}, "dk_host_unregister_params": HostUnregisterParams{},
	"dk_host_wait_params": HostWaitParams{}, "dk_stream_create_params": StreamCreateParams{},
	"dk_stream_destroy_params": StreamDestroyParams{}, "dk_stream_query_params": StreamQueryParams{},
	"dk_event_create_params": EventCreateParams{}, "dk_event_destroy_params": EventDestroyParams{},
	"dk_event_record_params": EventRecordParams{}, "dk_stream_wait_event_params": StreamWaitEventParams{},
	"dk_event_wait_params": EventWaitParams{}, "dk_copy_params": CopyParams{}, "dk_fill_params": FillParams{},
	"dk_block_sizes_params": BlockSizesParams{}, "dk_ll_layout_params": LLLayoutParams{},
	"dk_team_create_params": TeamCreateParams{}, "dk_team_destroy_params": TeamDestroyParams{},
	"dk_team_segment_params": TeamSegmentParams{},
	"dk_stats_flush_params":  StatsFlushParams{}, "dk_layout_params": LayoutParams{},
	"dk_notify_params": NotifyParams{}, "dk_dispatch_params": DispatchParams{}, "dk_combine_params": CombineParams{},
	"dk_ll_dispatch_params": LLDispatchParams{}, "dk_ll_combine_params": LLCombineParams{},
	"dk_transport_open_params": TransportOpenParams{}, "dk_transport_close_params": TransportCloseParams{},
	"dk_transport_put_params": TransportPutParams{}, "dk_transport_quiet_params": TransportQuietParams{},
	"dk_transport_query_params": TransportQueryParams{}, "dk_transport_lose_params": TransportLoseParams{},
	"dk_transport_unique_id_params": TransportUniqueIDParams{}, "dk_transport_attach_params": TransportAttachParams{},
	"dk_transport_detach_params": TransportDetachParams{}, "dk_transport_alloc_params": TransportAllocParams{},
	"dk_transport_free_params": TransportFreeParams{},
	"dk_clean_params":          CleanParams{}, "dk_barrier_params": BarrierParams{}, "dk_mask_params": MaskParams{},
}

// field is one named field: where it lies and how long it is.
type field struct {
	name         string
	offset, size uintptr
}

// layout is a struct's fields and total size.
type layout struct {
	fields []field
	size   uintptr
}

func TestLayoutsEqualTheGolden(t *testing.T) {
	want := readGolden(t)
	for name := range want {
		if _, ok := mirrors[name]; !ok {
			t.Errorf("%s has no mirror here", name)
		}
	}
	for name, value := range mirrors {
		c, ok := want[name]
		if !ok {
			t.Errorf("%s is not in the golden", name)
			continue
		}
		g := layout{size: reflect.TypeOf(value).Size()}
		flatten(reflect.TypeOf(value), 0, &g.fields)
		if diff := compare(g, c); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

// A widened or swapped field must be seen: the check is shown to fail.
func TestCompareSeesAWidenedField(t *testing.T) {
	type widened struct {
		Header
		Mem uint32
	}
	g := layout{size: reflect.TypeOf(widened{}).Size()}
	flatten(reflect.TypeOf(widened{}), 0, &g.fields)
	if compare(g, readGolden(t)["dk_mem_free_params"]) == "" {
		t.Error("a narrowed field passes")
	}
}

// flatten lists the named fields of a Go struct, those of embedded headers included.
func flatten(t reflect.Type, base uintptr, out *[]field) {
	for i := range t.NumField() {
		f := t.Field(i)
		switch {
		case f.Anonymous:
			flatten(f.Type, base+f.Offset, out)
		case f.Name != "_":
			*out = append(*out, field{strings.ToLower(f.Name), base + f.Offset, f.Type.Size()})
		}
	}
}

func compare(g, c layout) string {
	if g.size != c.size {
		return fmt.Sprintf("size %d here, %d in C", g.size, c.size)
	}
	if len(g.fields) != len(c.fields) {
		return fmt.Sprintf("%d fields here, %d in C", len(g.fields), len(c.fields))
	}
	for i, f := range g.fields {
		if h := c.fields[i]; f.offset != h.offset || f.size != h.size || !sameName(f.name, h.name) {
			return fmt.Sprintf("field %d: %+v here, %+v in C", i, f, h)
		}
	}
	return ""
}

// sameName compares the Go name in lower case with the C name, whose words are joined by underscores. "host" fields of C
// keep their prefix in Go as well.
func sameName(goName, cName string) bool { return goName == strings.ReplaceAll(cName, "_", "") }

// readGolden reads what a C compiler said of the header: a line "name size" for each struct, then "  field offset size"
// for each of its fields. Reserved fields and arrays without a length take no part.
func readGolden(t *testing.T) map[string]layout {
	t.Helper()
	text, err := os.ReadFile("../../kernels/abi/kernels.layout")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]layout{}
	var current string
	for line := range strings.Lines(string(text)) {
		var name string
		var a, b uintptr
		switch n, _ := fmt.Sscan(line, &name, &a, &b); {
		case n == 0:
		case !strings.HasPrefix(line, " ") && n == 2:
			current = name
			all[current] = layout{size: a}
		case n == 3 && strings.HasPrefix(name, "reserved") || n == 3 && b == 0:
		case n == 3:
			l := all[current]
			l.fields = append(l.fields, field{name, a, b})
			all[current] = l
		default:
			t.Fatalf("cannot read %q", line)
		}
	}
	return all
}
