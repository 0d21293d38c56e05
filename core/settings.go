package core

import (
	"os"
	"sync/atomic"

	"github.com/deepep-go/deepep/internal/env"
)

var getenv atomic.Pointer[func(string) string]

// SetGetenv sets where DEEPEP_* settings are read from: nil is os.Getenv. A C or Python process sets its own getenv,
// since Go keeps a copy of the environment from the process's start.
func SetGetenv(get func(name string) string) {
	if get == nil {
		getenv.Store(nil)
		return
	}
	getenv.Store(&get)
}

// settings reads the environment as it is now.
func settings() (env.Settings, error) {
	get := os.Getenv
	if own := getenv.Load(); own != nil {
		get = *own
	}
	return env.Load(get)
}
