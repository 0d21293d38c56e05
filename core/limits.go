package core

import (
	"time"

	"github.com/deepep-go/deepep/internal/status"
)

// StartLimit is how long the start of a group may take: what is given, or for 0 the environment's time for first calls.
func StartLimit(given time.Duration) (time.Duration, error) {
	if given < 0 {
		return 0, status.InvalidArg("timeout", given, "0 (the default) or more")
	}
	if given > 0 {
		return given, nil
	}
	s, err := settings()
	return s.FirstTimeout, err
}
