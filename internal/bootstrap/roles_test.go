package bootstrap

import (
	"context"

	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// roles of the child processes of these tests.
var roles = map[string]func(*proctest.Child) error{
	"file":    fileRole,
	"sleeper": sleeperRole,
	"join":    joinRole,
	"dial":    dialRole,
	"crowd":   crowdRole,
}

// contextOfChild ends with the process, which ends with its test.
func contextOfChild() context.Context { return context.Background() }
