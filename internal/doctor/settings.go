package doctor

import (
	"fmt"
	"strings"

	"github.com/deepep-go/deepep/internal/env"
)

// otherSettings are variables that the Python package reads instead of env.
var otherSettings = []string{"DEEPEP_LIBRARY"}

// checkSettings parses this library's variables as the constructor does, and finds names that the library does not
// read.
func checkSettings(e *exam) {
	known := map[string]bool{}
	for _, name := range otherSettings {
		known[name] = true
	}
	s, err := env.Load(func(name string) string {
		known[name] = true
		v, _ := e.root.env(name)
		return v
	})
	if err != nil {
		e.fail(Line{Read: err.Error(), File: "environment", Cause: "construction refuses a setting that it cannot read",
			Fix: "give it one of the allowed values, or unset it (docs/environment.md)"})
		return
	}
	set := 0
	for _, kv := range e.root.Environ {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "DEEPEP_") || strings.HasPrefix(name, "DEEPEP_TEST_") {
			continue
		}
		set++
		if known[name] {
			continue
		}
		// Without its value: what the library does not read may be a secret of another program.
		e.warn(Line{Subject: name, Read: name + " is set", File: "environment",
			Cause: "this library reads no variable of this name", Fix: "did you mean " + nearestName(name, known) + "? Else unset it"})
	}
	e.ok(Line{Read: fmt.Sprintf("engine %s, longest wait %v, %s set", s.Engine, s.Timeout, plural(set, "DEEPEP variable")), File: "environment",
		Facts: map[string]string{"engine": s.Engine, "timeout": s.Timeout.String()}})
}

// nearestName is the known name with the smallest edit distance, among equals the first by the alphabet.
func nearestName(name string, known map[string]bool) string {
	best, at := "", 1<<30
	for k := range known {
		if d := edits(name, k); d < at || d == at && k < best {
			best, at = k, d
		}
	}
	return best
}

// edits is the edit distance of a and b.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
