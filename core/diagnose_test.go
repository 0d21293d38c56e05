package core

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
)

// alone makes a group of one rank.
func alone(t *testing.T) *Group {
	t.Helper()
	g, err := NewGroup(context.Background(), GroupOptions{Exchanger: NewLocal(1)[0]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// An error of construction carries the doctor's first FAIL and keeps its kind.
func TestConstructionAsksTheDoctor(t *testing.T) {
	if _, err := os.Stat("/proc/driver/nvidia"); err == nil {
		t.Skip("needs a host without an NVIDIA driver")
	}
	_, err := alone(t).NewBuffer(context.Background(), BufferOptions{Engine: EngineCUDA, Device: -1, NumNVLBytes: 1 << 20})
	if err == nil {
		t.Fatal("a CUDA buffer without a GPU")
	}
	if status.CodeOf(err) == status.Internal || !strings.Contains(err.Error(), "deepep doctor says: FAIL gpu") || !strings.Contains(err.Error(), "fix:") {
		t.Errorf("%v: %v", status.CodeOf(err), err)
	}
}

// So does the error of a buffer that is made in the background, which is how Python makes all of them.
func TestConstructionInTheBackgroundAsksTheDoctor(t *testing.T) {
	b, err := alone(t).NewBuffer(context.Background(), BufferOptions{Engine: EngineCPU, NumNVLBytes: 1 << 46, Background: true})
	if err != nil {
		t.Fatal(err)
	}
	err = b.WaitReady(-1)
	if !errors.Is(err, ErrOutOfMemory) || strings.Count(err.Error(), "FAIL memory") != 1 {
		t.Errorf("%v", err)
	}
	if err := b.Destroy(); err != nil {
		t.Error(err)
	}
}

func TestMemoryThatDoesNotFitIsNamed(t *testing.T) {
	g := alone(t)
	err := g.diagnosed(status.Errorf(status.OutOfMemory, "allocating"), &BufferOptions{Engine: EngineCPU, NumNVLBytes: 1 << 60})
	if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "FAIL memory") {
		t.Errorf("%v", err)
	}
	for _, code := range []status.Code{status.InvalidArgument, status.Mismatch, status.PeerDead, status.Timeout} {
		plain := status.Errorf(code, "as it was")
		if got := g.diagnosed(plain, &BufferOptions{Engine: EngineCUDA}); got != plain {
			t.Errorf("the doctor examined the host for %v", got)
		}
	}
}
