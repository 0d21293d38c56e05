package core

import (
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/env"
)

// LogFunc receives log lines instead of DEEPEP_LOG's file. level: 0 debug, 1 info, 2 warn, 3 error.
type LogFunc func(level int, message string)

var (
	logTo  atomic.Pointer[LogFunc]
	logMu  sync.Mutex
	logged = map[string]*zap.Logger{} // by level and path
)

// SetLog sets the function that receives the log lines of all groups; nil: DEEPEP_LOG's file again. f is called from
// any goroutine.
func SetLog(f LogFunc) {
	if f == nil {
		logTo.Store(nil)
		return
	}
	logTo.Store(&f)
}

var levels = map[string]zapcore.Level{
	env.LogDebug: zapcore.DebugLevel, env.LogInfo: zapcore.InfoLevel, env.LogWarn: zapcore.WarnLevel,
	env.LogError: zapcore.ErrorLevel, env.LogOff: zapcore.FatalLevel,
}

// logger returns the logger for these settings. If the file cannot be opened, lines go to standard error.
func logger(s env.Settings) *zap.Logger {
	logMu.Lock()
	defer logMu.Unlock()
	key := s.LogLevel + "\x00" + s.LogPath
	if l := logged[key]; l != nil {
		return l
	}
	sink := openSink(s.LogPath)
	config := zap.NewProductionEncoderConfig()
	config.EncodeTime = zapcore.ISO8601TimeEncoder
	config.EncodeLevel = zapcore.LowercaseLevelEncoder
	core := zapcore.NewCore(zapcore.NewConsoleEncoder(config), sink, levels[s.LogLevel])
	l := zap.New(&divert{core}).Named("deepep")
	logged[key] = l
	return l
}

// descriptor is a file descriptor of this package. A write of Go's os.File to a closed standard error ends the process;
// a write of this one only loses the line. So does one after something else in the process has closed the descriptor:
// its number may be that of a connection by then.
type descriptor struct {
	fd       int // -1: there is none
	dev, ino uint64
}

func newDescriptor(fd int) descriptor {
	dev, ino := fileOf(fd)
	return descriptor{fd: fd, dev: dev, ino: ino}
}

// fileOf says which file a descriptor is of; zeros: of none.
func fileOf(fd int) (dev, ino uint64) {
	var s unix.Stat_t
	if unix.Fstat(fd, &s) != nil {
		return 0, 0
	}
	return s.Dev, s.Ino
}

func openSink(path string) zapcore.WriteSyncer {
	if path != "" {
		if fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_APPEND|unix.O_CLOEXEC, 0o644); err == nil {
			return zapcore.Lock(newDescriptor(fd))
		}
	}
	fd, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		fd = -1 // standard error is closed
	}
	return zapcore.Lock(newDescriptor(fd))
}

func (s descriptor) Write(p []byte) (int, error) {
	if dev, ino := fileOf(s.fd); s.ino == 0 || dev != s.dev || ino != s.ino {
		return len(p), nil
	}
	for rest := p; len(rest) > 0; {
		n, err := unix.Write(s.fd, rest)
		if err != nil && err != unix.EINTR {
			break
		}
		rest = rest[max(n, 0):]
	}
	return len(p), nil
}

func (s descriptor) Sync() error { return nil }

// divert sends lines to the LogFunc, if one is set.
type divert struct{ zapcore.Core }

func (d *divert) With(fields []zapcore.Field) zapcore.Core { return &divert{d.Core.With(fields)} }

// Enabled lets every line through to a LogFunc, which filters by itself.
func (d *divert) Enabled(l zapcore.Level) bool { return logTo.Load() != nil || d.Core.Enabled(l) }

func (d *divert) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if d.Enabled(e.Level) {
		return c.AddCore(e, d)
	}
	return c
}

func (d *divert) Write(e zapcore.Entry, fields []zapcore.Field) error {
	f := logTo.Load()
	if f == nil {
		return d.Core.Write(e, fields)
	}
	(*f)(int(min(max(e.Level, zapcore.DebugLevel), zapcore.ErrorLevel)-zapcore.DebugLevel), e.Message)
	return nil
}
