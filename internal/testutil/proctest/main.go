package proctest

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main is a package's TestMain. In a child it plays the role; else it runs the tests and fails if they leave a
// goroutine running, except when fuzzing, whose workers may still be ending.
func Main(m *testing.M, roles map[string]func(*Child) error) {
	playRole(roles)
	flag.Parse()
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m)
}
