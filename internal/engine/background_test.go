package engine

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func TestInBackgroundTurnsPanicsIntoErrors(t *testing.T) {
	o := <-inBackground("the test", func() (int, error) { panic("planted") })
	if !errors.Is(o.err, status.ErrInternal) || !strings.Contains(o.err.Error(), "panic in the test: planted") {
		t.Errorf("%v", o.err)
	}
}
