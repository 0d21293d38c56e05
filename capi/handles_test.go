package main

import (
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

func TestHandlesAreNeverUsedTwice(t *testing.T) {
	var table = table{all: map[uintptr]any{}}
	first := table.add(1)
	if table.take(first) != 1 || table.take(first) != nil {
		t.Fatal("an object can be taken once")
	}
	if table.add(2) == first {
		t.Fatal("a number was used again")
	}
}

func TestGuardTurnsPanicsIntoErrors(t *testing.T) {
	code := guard(func() error { panic("planted") })
	if status.Code(code) != status.Internal {
		t.Fatalf("got %d", code)
	}
}
