// Package structs compares Go mirrors of C structs with what a C compiler said of them, for tests. Both sides are texts
// of one form: a line with the size, then "field offset size" for each field, its name in lower case without
// underscores.
package structs

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// Layout is the text of a Go struct. Fields of embedded structs count as its own; fields named _ are left out.
func Layout(s reflect.Type) string {
	text := fmt.Sprintf("%d\n", s.Size())
	fields(s, 0, &text)
	return text
}

func fields(s reflect.Type, base uintptr, text *string) {
	for i := range s.NumField() {
		switch f := s.Field(i); {
		case f.Anonymous:
			fields(f.Type, base+f.Offset, text)
		case f.Name != "_":
			*text += fmt.Sprintf("%s %d %d\n", strings.ToLower(f.Name), base+f.Offset, f.Type.Size())
		}
	}
}

// Golden reads a golden file of the layouts of a header: a line "name size" for each struct, then "  field offset size"
// for each of its fields. Reserved fields, arrays without a length and the fields in unnamed are left out.
func Golden(t *testing.T, path string, unnamed ...string) map[string]string {
	t.Helper()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all, current := map[string]string{}, ""
	for line := range strings.Lines(string(file)) {
		var name string
		var a, b uintptr
		switch n, _ := fmt.Sscan(line, &name, &a, &b); {
		case n == 0:
		case !strings.HasPrefix(line, " ") && n == 2:
			current = name
			all[current] = fmt.Sprintf("%d\n", a)
		case n == 3 && (b == 0 || strings.HasPrefix(name, "reserved") || slices.Contains(unnamed, name)):
		case n == 3:
			all[current] += fmt.Sprintf("%s %d %d\n", strings.ReplaceAll(name, "_", ""), a, b)
		default:
			t.Fatalf("cannot read %q", line)
		}
	}
	return all
}
