package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// A job is a process that plays the rounds whose numbers it reads, and writes a line for each: the first line says which
// faults it cannot make. It has a mount namespace of its own, where /dev/shm can be filled.

// jobStart is a job's first line.
type jobStart struct {
	Missing map[string]string `json:"missing"` // faults, and why they cannot be made
	Error   string            `json:"error,omitempty"`
}

// roundResult is its line for a round.
type roundResult struct {
	Number  int                      `json:"number"`
	Text    string                   `json:"text"`
	Phase   string                   `json:"phase"`
	Fault   string                   `json:"fault"`
	Outcome string                   `json:"outcome"`
	Moves   bool                     `json:"moves,omitempty"` // the survivors' buffers went on in a smaller group
	Bad     []string                 `json:"bad,omitempty"`   // the promises that were broken
	Slowest map[string]time.Duration `json:"slowest,omitempty"`
	Took    time.Duration            `json:"took"`
}

// How the survivors met the fault.
const (
	outcomeNamed     = "named"     // their calls failed, and the errors name the victim
	outcomeMasked    = "masked"    // their calls went on without it
	outcomeUnnoticed = "unnoticed" // their calls went on with it
	outcomeBroken    = "broken"    // a promise was
)

// ownFolder is set to 1 in a job with a /dev/shm of its own.
const ownFolder = "DEEPEP_FAULTS_OWN_SHM"

func faultsJobCommand() *cobra.Command {
	var f faultsFlags
	cmd := &cobra.Command{
		Use: "faults-job", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.serve(cmd.InOrStdin(), cmd.OutOrStdout()) },
	}
	f.add(cmd.Flags())
	return cmd
}

// serve is a job's process.
func (f *faultsFlags) serve(in io.Reader, out io.Writer) (err error) {
	s := &faultSession{faultsFlags: f, missing: map[string]string{}}
	switch {
	case f.engine != "cpu":
		s.missing["full"] = "tried on the CPU engine alone"
	case os.Getenv(ownFolder) != "1":
		s.missing["full"] = "no mount namespace could be made"
	default:
		err = mountOwn()
	}
	if err == nil {
		err = s.open()
		defer s.close()
	}
	lines, start := json.NewEncoder(out), jobStart{Missing: s.missing}
	if err != nil {
		start.Error = err.Error()
	}
	if sent := lines.Encode(start); err != nil || sent != nil {
		return errors.Join(err, sent)
	}
	for numbers := bufio.NewScanner(in); numbers.Scan(); {
		number, err := strconv.Atoi(numbers.Text())
		if err != nil {
			return err
		}
		if err := lines.Encode(s.playNumber(number)); err != nil {
			return err
		}
	}
	return nil
}

func mountOwn() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=4m,mode=1777"); err != nil {
		return fmt.Errorf("/dev/shm: %w", err)
	}
	return nil
}

// run shares the rounds out among jobs.
func (f *faultsFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := f.check(); err != nil {
		return err
	}
	jobs := f.jobs
	if jobs == 0 {
		jobs = 1
		if f.engine == "cpu" {
			jobs = 2 * runtime.NumCPU() // a round mostly waits
		}
	}
	t := &faultsTotal{flags: f, out: stdout, began: time.Now(), next: f.first, jobs: min(jobs, f.rounds)}
	running, ctx := errgroup.WithContext(ctx)
	for range t.jobs {
		running.Go(func() error { return f.runJob(ctx, t, stderr) })
	}
	err := running.Wait()
	t.report()
	if f.markdown != "" {
		err = errors.Join(err, os.WriteFile(f.markdown, []byte(t.tables()), 0o644))
	}
	if err == nil && (t.failures > 0 || t.played < f.rounds) {
		return exitCode(exitProblems)
	}
	return err
}

// runJob starts a job and gives it a number after the other.
func (f *faultsFlags) runJob(ctx context.Context, t *faultsTotal, stderr io.Writer) error {
	cmd, in, lines, err := f.startJob(ctx, stderr)
	if err != nil {
		return err
	}
	defer func() {
		_ = in.Close() // it ends its ranks, then itself
		_ = cmd.Wait() // what it has to say is in its lines
	}()
	var start jobStart
	if err := lines.Decode(&start); err != nil {
		return fmt.Errorf("a job of rounds: %w", err)
	}
	if start.Error != "" {
		return errors.New(start.Error)
	}
	t.leaveOut(start.Missing)
	for number, ok := t.take(); ok && ctx.Err() == nil; number, ok = t.take() {
		if _, err := fmt.Fprintln(in, number); err != nil {
			return err
		}
		var r roundResult
		if err := lines.Decode(&r); err != nil {
			return fmt.Errorf("round %d: its job: %w", number, err)
		}
		t.add(&r)
	}
	return nil
}

// startJob makes a job's process, in a mount namespace of its own where the system allows that.
func (f *faultsFlags) startJob(ctx context.Context, stderr io.Writer) (cmd *exec.Cmd, in io.WriteCloser, lines *json.Decoder, err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, nil, nil, err
	}
	own := f.engine == "cpu" && f.wants("full")
	for {
		cmd = exec.CommandContext(ctx, exe, f.jobArgs()...)
		cmd.Stderr = stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if own {
			ownNamespace(cmd)
		}
		if in, err = cmd.StdinPipe(); err != nil {
			return nil, nil, nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, nil, nil, err
		}
		if err = cmd.Start(); err == nil {
			return cmd, in, json.NewDecoder(out), nil
		}
		if !own {
			return nil, nil, nil, err
		}
		own = false
	}
}

// jobArgs is a job's command line: the flags of add.
func (f *faultsFlags) jobArgs() []string {
	return []string{
		"faults-job", "--ranks", strconv.Itoa(f.ranks), "--ranks-per-node", strconv.Itoa(f.perNode), "--seed", strconv.FormatUint(f.seed, 10),
		"--engine", f.engine, "--phases", strings.Join(f.phases, ","), "--faults", strings.Join(f.faults, ","),
	}
}

// ownNamespace lets a process begin in a mount namespace of its own.
func ownNamespace(cmd *exec.Cmd) {
	cmd.Env = append(os.Environ(), ownFolder+"=1")
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
}
