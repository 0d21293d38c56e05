package abi

import (
	"reflect"
	"testing"

	"github.com/deepep-go/deepep/internal/testutil/structs"
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
	"dk_event_wait_params": EventWaitParams{}, "dk_copy_params": CopyParams{}, "dk_fill_params": FillParams{}, "dk_balance_params": BalanceParams{},
	"dk_block_sizes_params": BlockSizesParams{}, "dk_ll_layout_params": LLLayoutParams{},
	"dk_team_create_params": TeamCreateParams{}, "dk_team_destroy_params": TeamDestroyParams{},
	"dk_team_segment_params": TeamSegmentParams{}, "dk_team_release_params": TeamReleaseParams{},
	"dk_team_restore_params": TeamRestoreParams{}, "dk_mem_release_params": MemReleaseParams{},
	"dk_mem_restore_params": MemRestoreParams{},
	"dk_stats_flush_params": StatsFlushParams{}, "dk_layout_params": LayoutParams{},
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

func golden(t *testing.T) map[string]string {
	return structs.Golden(t, "../../kernels/abi/kernels.layout")
}

func TestLayoutsEqualTheGolden(t *testing.T) {
	want := golden(t)
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
		if g := structs.Layout(reflect.TypeOf(value)); g != c {
			t.Errorf("%s\nin Go:\n%s\nin C:\n%s", name, g, c)
		}
	}
}

// A widened or swapped field must be seen: the check is shown to fail.
func TestCompareSeesAWidenedField(t *testing.T) {
	type widened struct {
		Header
		Mem uint32
	}
	if structs.Layout(reflect.TypeFor[widened]()) == golden(t)["dk_mem_free_params"] {
		t.Error("a narrowed field passes")
	}
}
