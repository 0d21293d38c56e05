package status

import (
	"errors"
	"testing"
)

func TestKeepTakesTheFirstError(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	var err error
	for _, next := range []error{nil, first, nil, second} {
		Keep(&err, next)
	}
	if err != first {
		t.Errorf("kept %v", err)
	}
}
