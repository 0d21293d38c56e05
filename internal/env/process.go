package env

import (
	"os"
	"sync/atomic"
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

var source atomic.Pointer[func(string) string]

// SetSource sets the function through which Current reads variables; nil is os.Getenv. A C or Python process sets C's
// getenv, since Go keeps a copy of the environment from the start of the process.
func SetSource(get func(name string) string) {
	if get == nil {
		source.Store(nil)
		return
	}
	source.Store(&get)
}

// Get reads one variable of the process; "" if it is not set.
func Get(name string) string {
	if get := source.Load(); get != nil {
		return (*get)(name)
	}
	return os.Getenv(name)
}

// Current loads the settings from the environment as it is now.
func Current() (Settings, error) { return Load(Get) }

// StartLimit is how long the start of a group may take: what the caller gives, or for 0 the time for first calls.
func (s *Settings) StartLimit(given time.Duration) (time.Duration, error) {
	switch {
	case given < 0:
		return 0, status.InvalidArg("timeout", given, "0 (the default) or more")
	case given > 0:
		return given, nil
	}
	return s.FirstTimeout, nil
}
