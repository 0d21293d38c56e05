package proctest

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main is a package's TestMain: it plays the role in a child, and otherwise runs the tests and fails if they leave a
// goroutine behind. Fuzzing is let off that last check, since its own machinery may still be winding down.
func Main(m *testing.M, roles map[string]func(*Child) error) {
	playRole(roles)
	flag.Parse()
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}
