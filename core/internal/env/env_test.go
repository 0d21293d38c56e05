package env_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/deepep-go/deepep/core/internal/env"
	"github.com/deepep-go/deepep/core/internal/status"
)

func from(vars map[string]string) func(string) string {
	return func(n string) string { return vars[n] }
}

func TestDefaults(t *testing.T) {
	got, err := env.Load(from(nil))
	want := env.Settings{
		Engine: "auto", Timeout: 100 * time.Second, FirstTimeout: 300 * time.Second, LogLevel: "warn",
		MaxNVLPeers: 8, Heartbeat: 100 * time.Millisecond, Stats: true, ISA: "auto",
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestEverySettingIsRead(t *testing.T) {
	got, err := env.Load(from(map[string]string{
		"DEEPEP_ENGINE": "CPU", "DEEPEP_KERNELS": "/opt/k", "DEEPEP_TIMEOUT_MS": "1500", "DEEPEP_FIRST_TIMEOUT_MS": " 2500\n",
		"DEEPEP_LOG": "Debug:/tmp/a:b.log", "DEEPEP_NUM_MAX_NVL_PEERS": "4", "NUM_MAX_NVL_PEERS": "2", "DEEPEP_INTERFACE": "ib0",
		"DEEPEP_HEARTBEAT_MS": "20", "DEEPEP_STATS": "off", "DEEPEP_ISA": "avx2",
	}))
	want := env.Settings{
		Engine: "cpu", Kernels: "/opt/k", Timeout: 1500 * time.Millisecond, FirstTimeout: 2500 * time.Millisecond,
		LogLevel: "debug", LogPath: "/tmp/a:b.log", MaxNVLPeers: 4, Interface: "ib0", Heartbeat: 20 * time.Millisecond,
		Stats: false, ISA: "avx2",
	}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestOldNameOfNVLPeers(t *testing.T) {
	got, err := env.Load(from(map[string]string{"NUM_MAX_NVL_PEERS": "2"}))
	if err != nil || got.MaxNVLPeers != 2 {
		t.Errorf("got %d, %v", got.MaxNVLPeers, err)
	}
	_, err = env.Load(from(map[string]string{"NUM_MAX_NVL_PEERS": "two"}))
	if err == nil || !strings.HasPrefix(err.Error(), "variable NUM_MAX_NVL_PEERS: ") {
		t.Errorf("the error must name the variable that was set: %v", err)
	}
}

func TestBadValuesNameVariableValueAllowed(t *testing.T) {
	for _, c := range []struct{ name, value, allowed string }{
		{"DEEPEP_ENGINE", "tpu", "auto, cpu, cuda"},
		{"DEEPEP_KERNELS", "a\x00b", "a path of at most 4095 bytes without NUL"},
		{"DEEPEP_TIMEOUT_MS", "0", "a whole number from 1 to 604800000"},
		{"DEEPEP_FIRST_TIMEOUT_MS", "1e3", "a whole number from 1 to 604800000"},
		{"DEEPEP_LOG", "loud", "debug, info, warn, error, off, each with an optional :path after it"},
		{"DEEPEP_NUM_MAX_NVL_PEERS", "0", "a whole number from 1 to 1024"},
		{"DEEPEP_INTERFACE", "eth 0", "the name or address of a network interface"},
		{"DEEPEP_HEARTBEAT_MS", "5", "a whole number from 10 to 1000"},
		{"DEEPEP_STATS", "maybe", "on, off"},
		{"DEEPEP_ISA", "sse9", "auto, baseline, avx2, avx512"},
	} {
		_, err := env.Load(from(map[string]string{c.name: c.value}))
		if !errors.Is(err, status.ErrInvalidArgument) {
			t.Errorf("%s=%q: %v", c.name, c.value, err)
			continue
		}
		shown := strings.ReplaceAll(c.value, "\x00", `\x00`)
		if want := "variable " + c.name + `: got "` + shown + `", allowed ` + c.allowed; err.Error() != want {
			t.Errorf("text %q\nwant %q", err, want)
		}
	}
}

func TestAllBadValuesAtOnce(t *testing.T) {
	_, err := env.Load(from(map[string]string{"DEEPEP_ISA": "x", "DEEPEP_ENGINE": strings.Repeat("ä", 500)}))
	if err == nil || !strings.Contains(err.Error(), "DEEPEP_ISA") || !strings.Contains(err.Error(), "DEEPEP_ENGINE") {
		t.Fatalf("both must be named: %v", err)
	}
	if len(err.Error()) > 400 || !strings.Contains(err.Error(), "ä…") {
		t.Errorf("a long value must be clipped on a character: %d bytes", len(err.Error()))
	}
}

// FuzzLoad: whatever one variable holds, Load answers with settings inside their limits or with an error that names it.
func FuzzLoad(f *testing.F) {
	names := []string{
		"DEEPEP_ENGINE", "DEEPEP_KERNELS", "DEEPEP_TIMEOUT_MS", "DEEPEP_FIRST_TIMEOUT_MS", "DEEPEP_LOG", "DEEPEP_NUM_MAX_NVL_PEERS",
		"NUM_MAX_NVL_PEERS", "DEEPEP_INTERFACE", "DEEPEP_HEARTBEAT_MS", "DEEPEP_STATS", "DEEPEP_ISA",
	}
	for i, v := range []string{"cpu", "/x", "100", "+7", "info:/tmp/x", "8", "9", "eth0", "99", "on", "0", "avx512", "\xff:", "-0"} {
		f.Add(i, v)
	}
	f.Fuzz(func(t *testing.T, which int, value string) {
		name := names[int(uint(which)%uint(len(names)))]
		s, err := env.Load(from(map[string]string{name: value}))
		if err != nil {
			if !errors.Is(err, status.ErrInvalidArgument) || !strings.Contains(err.Error(), name) {
				t.Fatalf("%s=%q: %v", name, value, err)
			}
			return
		}
		if s.Timeout < time.Millisecond || s.FirstTimeout < time.Millisecond || s.Heartbeat < 10*time.Millisecond ||
			s.Heartbeat > time.Second || s.MaxNVLPeers < 1 || s.Engine == "" || s.ISA == "" || s.LogLevel == "" {
			t.Fatalf("%s=%q accepted as %+v", name, value, s)
		}
	})
}
