package env_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/env"
)

// What NVSHMEM is told, and how many NICs it then gives a rank: one without a setting, whatever the host has.
func TestSettingsOfNICs(t *testing.T) {
	both := []string{"NVSHMEM_IBGDA_ENABLE_MULTI_PORT=1", "NVSHMEM_ENABLE_MULTI_PORT=1"}
	for _, c := range []struct {
		what   string
		vars   map[string]string
		ofRank int
		lines  []string
		warns  string // of the contradictions
	}{
		{"nothing", nil, 1, nil, ""},
		{"two a rank", map[string]string{"DEEPEP_NUM_NICS": "2"}, 2, both, ""},
		{"one a rank", map[string]string{"DEEPEP_NUM_NICS": "1"}, 1, nil, ""},
		{"its share", map[string]string{"NVSHMEM_IBGDA_ENABLE_MULTI_PORT": "1"}, 0, nil, ""},
		{"its share, newer name", map[string]string{"NVSHMEM_ENABLE_MULTI_PORT": "yes"}, 0, nil, ""},
		{"two, and dealt out", map[string]string{"DEEPEP_NUM_NICS": "2", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}, 1, nil, "NVSHMEM_ENABLE_NIC_PE_MAPPING"},
		{"two, and one alone", map[string]string{"DEEPEP_NUM_NICS": "2", "NVSHMEM_IBGDA_ENABLE_MULTI_PORT": "0"}, 1, nil, "NVSHMEM_IBGDA_ENABLE_MULTI_PORT"},
		{"named", map[string]string{"DEEPEP_NICS": "mlx5_0:1,mlx5_1"}, 1, []string{"NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1"}, ""},
		{"mapped", map[string]string{"DEEPEP_NIC_MAPPING": "mlx5_0:1:2"}, 1,
			[]string{"NVSHMEM_HCA_PE_MAPPING=mlx5_0:1:2", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1"}, ""},
		{"named and mapped", map[string]string{"DEEPEP_NICS": "mlx5_0", "NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:2"}, 1,
			[]string{"NVSHMEM_HCA_LIST=mlx5_0", "NVSHMEM_HCA_PE_MAPPING=mlx5_0:1:2", "NVSHMEM_ENABLE_NIC_PE_MAPPING=1"}, "ignores the mapping"},
		{"marked", map[string]string{"DEEPEP_SERVICE_LEVEL": "3", "DEEPEP_TRAFFIC_CLASS": "106"}, 1, []string{"NVSHMEM_IB_SL=3", "NVSHMEM_IB_TRAFFIC_CLASS=106"}, ""},
		{"marked by V2's name", map[string]string{"EP_OVERRIDE_RDMA_SL": "7"}, 1, []string{"NVSHMEM_IB_SL=7"}, ""},
	} {
		s, err := env.Load(from(c.vars))
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		n := s.RDMA.NICs
		if n.OfRank() != c.ofRank || !slices.Equal(n.Lines(), c.lines) {
			t.Errorf("%s: %d NICs a rank, %q; want %d, %q", c.what, n.OfRank(), n.Lines(), c.ofRank, c.lines)
		}
		found := n.Contradictions()
		if len(found) > 1 || (len(found) == 1) != (c.warns != "") || c.warns != "" && !strings.Contains(found[0].Cause, c.warns) {
			t.Errorf("%s: %+v, want one with %q", c.what, found, c.warns)
		}
	}
}

// NVSHMEM would read its own variable, and the plan would show the other.
func TestSettingsOfNICsThatDisagreeAreRefused(t *testing.T) {
	for first, second := range map[string]string{
		"DEEPEP_SERVICE_LEVEL": "NVSHMEM_IB_SL", "NVSHMEM_IB_SL": "EP_OVERRIDE_RDMA_SL", "DEEPEP_TRAFFIC_CLASS": "NVSHMEM_IB_TRAFFIC_CLASS",
	} {
		_, err := env.Load(from(map[string]string{first: "1", second: "2"}))
		if want := "variable " + second + `: got "2", allowed "1", which ` + first + " says, or not set"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	_, err := env.Load(from(map[string]string{"DEEPEP_NICS": "mlx5_0", "NVSHMEM_HCA_LIST": "mlx5_1"}))
	if err == nil || !strings.Contains(err.Error(), `variable NVSHMEM_HCA_LIST: got "mlx5_1", allowed "mlx5_0", which DEEPEP_NICS says`) {
		t.Error(err)
	}
}
