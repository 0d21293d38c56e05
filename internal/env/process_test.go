package env_test

import (
	"errors"
	"testing"
	"time"

	"github.com/deepep-go/deepep/internal/env"
	"github.com/deepep-go/deepep/internal/status"
)

func TestCurrentReadsThroughTheSource(t *testing.T) {
	env.SetSource(func(name string) string { return map[string]string{"DEEPEP_FIRST_TIMEOUT_MS": "7000"}[name] })
	defer env.SetSource(nil)
	s, err := env.Current()
	if err != nil || s.FirstTimeout != 7*time.Second {
		t.Errorf("%v, %v", s.FirstTimeout, err)
	}
	for given, want := range map[time.Duration]time.Duration{0: 7 * time.Second, time.Minute: time.Minute} {
		if got, err := s.StartLimit(given); got != want || err != nil {
			t.Errorf("StartLimit(%v) = %v, %v", given, got, err)
		}
	}
	if _, err := s.StartLimit(-1); !errors.Is(err, status.ErrInvalidArgument) {
		t.Errorf("a negative limit: %v", err)
	}
	env.SetSource(nil)
	t.Setenv("DEEPEP_FIRST_TIMEOUT_MS", "8000")
	if s, err = env.Current(); err != nil || s.FirstTimeout != 8*time.Second {
		t.Errorf("os.Getenv: %v, %v", s.FirstTimeout, err)
	}
}
