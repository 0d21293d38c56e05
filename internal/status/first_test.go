package status_test

import (
	"errors"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func TestKeepStoresTheFirstError(t *testing.T) {
	var err error
	first := errors.New("first")
	status.Keep(&err, nil)
	if err != nil {
		t.Fatal(err)
	}
	status.Keep(&err, first)
	status.Keep(&err, errors.New("second"))
	if err != first {
		t.Errorf("kept %v", err)
	}
}
