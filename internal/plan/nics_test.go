package plan

import (
	"reflect"
	"testing"
)

func TestParseNICs(t *testing.T) {
	for _, c := range []struct {
		text    string
		mapping bool
		want    NICList
		ok      bool
	}{
		{"mlx5_0", false, NICList{NICs: []NIC{{Name: "mlx5_0"}}}, true},
		{"mlx5_0:1, mlx5_bond-1", false, NICList{NICs: []NIC{{Name: "mlx5_0", Port: 1}, {Name: "mlx5_bond-1"}}}, true},
		{"^mlx5_0", false, NICList{NICs: []NIC{{Name: "mlx5_0"}}, Except: true}, true},
		{"mlx5_0:1:2,mlx5_0:2:2", true, NICList{NICs: []NIC{{"mlx5_0", 1, 2}, {"mlx5_0", 2, 2}}}, true},
		{"mlx5_0:1:2", false, NICList{NICs: []NIC{{"mlx5_0", 1, 2}}}, true},
		{"^mlx5_0:1:2", true, NICList{}, false}, {"mlx5_0:1", true, NICList{}, false}, {"", false, NICList{}, false}, {"mlx5_0,", false, NICList{}, false},
		{"mlx5_0:0", false, NICList{}, false}, {"mlx5_0:-1", false, NICList{}, false}, {"mlx5_0:1:1:1", false, NICList{}, false}, {"a b", false, NICList{}, false},
	} {
		if got, ok := ParseNICs(c.text, c.mapping); ok != c.ok || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q, mapping %t: %+v, %t", c.text, c.mapping, got, ok)
		}
	}
}
