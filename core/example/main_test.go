package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/core"
)

// The program as a user runs it, in both forms.
func TestExample(t *testing.T) {
	info, err := core.QueryEngine(core.EngineCPU)
	if err != nil {
		t.Fatal(err)
	}
	if !info.Available {
		t.Skipf("needs the CPU kernel library (make kernels): %s", info.Reason)
	}
	program := filepath.Join(t.TempDir(), "example")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, args := range [][]string{{"-ranks", "4"}, {"-ranks", "3", "-goroutines"}} {
		out, err := exec.Command(program, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		for _, part := range []string{"rank 2: sent 64 tokens", "rank 2: low latency", "low_latency_combine"} {
			if !strings.Contains(string(out), part) {
				t.Errorf("%v: %q is not in\n%s", args, part, out)
			}
		}
	}
}

// The program's own check is shown to fail.
func TestCheckSeesAWrongSum(t *testing.T) {
	in := route(0, 2)
	sums := make([]uint16, len(in.X))
	for token := range tokens {
		var factor float32
		for k := range topK {
			if e := in.TopKIdx[token*topK+k]; e >= 0 {
				factor += in.TopKWeights[token*topK+k] * expertFactor(int(e))
			}
		}
		copy(sums[token*hidden:], in.X[token*hidden:(token+1)*hidden])
		scale(sums[token*hidden:(token+1)*hidden], factor)
	}
	if err := check(in, sums); err != nil {
		t.Error(err)
	}
	sums[5*hidden+7] = core.ToBF16(1000)
	if err := check(in, sums); err == nil || !strings.Contains(err.Error(), "token 5, channel 7") {
		t.Errorf("a spoilt sum: %v", err)
	}
}
