package engine_test

import (
	"context"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/deepep-go/deepep/core/op"
	"github.com/deepep-go/deepep/internal/engine"
	"github.com/deepep-go/deepep/internal/plan"
)

// lines is a log that keeps its lines.
type lines struct{ all []string }

func (l *lines) Write(p []byte) (int, error) { l.all = append(l.all, string(p)); return len(p), nil }
func (l *lines) Sync() error                 { return nil }

// A library that chooses its own chunks, as on GPUs: sizes that a user chose are warned of once a process, and none of
// the library's own defaults is, whatever its number of ranks and kind of call.
func TestChunksWithoutEffectAreNamedOnce(t *testing.T) {
	engine.Warned.Clear()
	var log lines
	o := rigOptions(fakeLibrary(t, "libfake.so"), plan.Topology{Ranks: 1, Peers: 8})
	o.Log = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zapcore.EncoderConfig{MessageKey: "m"}), &log, zap.WarnLevel))
	use := func(configs ...op.Config) {
		t.Helper()
		b, err := engine.New(context.Background(), &alone{}, o)
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{Buffer: b, t: t}
		for _, c := range configs {
			r.must(r.layout(&engine.Call{Config: &c, Async: true}))
		}
		r.must(b.Destroy())
	}
	for ranks := 1; ranks <= 200; ranks++ {
		var both []op.Config
		for _, kind := range []int{plan.KindDispatch, plan.KindCombine} {
			c, err := plan.ConfigFor(kind, ranks)
			if err != nil {
				t.Fatal(err)
			}
			c.NumSMs = 64 // which counts
			both = append(both, op.Config(c))
		}
		if ranks%20 == 1 || ranks == 16 {
			use(append(both, op.Config(plan.DefaultConfig))...)
		}
		for _, c := range both {
			if (*plan.Config)(&c).NamesChunks() {
				t.Errorf("%d ranks: the default %+v looks chosen", ranks, c)
			}
		}
	}
	if len(log.all) != 0 {
		t.Fatalf("defaults were warned of: %q", log.all)
	}
	tuned := op.Config{NumSMs: 24, NVLSendChunk: 7, NVLRecvChunk: 256, RDMASendChunk: 6, RDMARecvChunk: 128}
	use(tuned, tuned)
	use(tuned)
	if len(log.all) != 1 || !strings.Contains(log.all[0], "chunk sizes 7, 256, 6, 132 have no effect with engine fake") {
		t.Errorf("%q", log.all)
	}
}
