package dl

import (
	"slices"
	"testing"
	"unsafe"
)

func TestCallArgs(t *testing.T) {
	so := build(t, t.TempDir(), "libargs.so", `
		static const char *words[] = {"one", "two"};
		long sum(int a, unsigned b, int *out) { *out = a + (int)b; return 5; }
		const char **list(void) { return words; }`)
	l, err := Open(so)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sum, err := l.Symbol("sum")
	if err != nil {
		t.Fatal(err)
	}
	out := new(int32)
	if r := CallArgs(sum, int32(-2), uint32(44), unsafe.Pointer(out)); r != 5 || *out != 42 {
		t.Errorf("returned %d, wrote %d", r, *out)
	}
	list, err := l.Symbol("list")
	if err != nil {
		t.Fatal(err)
	}
	address := CallArgs(list)
	var got []string
	for _, w := range Words(address, 2) {
		got = append(got, CString(w))
	}
	if !slices.Equal(got, []string{"one", "two"}) || CString(0) != "" {
		t.Errorf("%q", got)
	}
}
