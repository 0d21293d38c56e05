package proctest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	roleVariable = "DEEPEP_TEST_ROLE"
	argsVariable = "DEEPEP_TEST_ARGS"
)

// Child is the child's end of the pipes.
type Child struct {
	args map[string]string
	in   *bufio.Scanner
}

// playRole runs the role and ends the process in a child. In the test's process it returns at once.
func playRole(roles map[string]func(*Child) error) {
	name := os.Getenv(roleVariable)
	if name == "" {
		return
	}
	c := &Child{in: bufio.NewScanner(os.Stdin)}
	err := json.Unmarshal([]byte(os.Getenv(argsVariable)), &c.args)
	if role := roles[name]; err == nil && role != nil {
		err = role(c)
	} else if err == nil {
		err = fmt.Errorf("no role %q", name)
	}
	if err != nil {
		c.Send("error %v", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Arg returns an argument of Start.
func (c *Child) Arg(name string) string { return c.args[name] }

// Send sends a line to the parent.
func (c *Child) Send(format string, args ...any) {
	fmt.Fprintf(os.Stdout, format+"\n", args...)
}

// Receive waits for a line of the parent. If the parent has ended, this process ends too.
func (c *Child) Receive() string {
	if !c.in.Scan() {
		os.Exit(3)
	}
	return c.in.Text()
}

// forkedLife is how many seconds a forked child lives that no test kills.
const forkedLife = 60

// Fork makes a copy of this process that keeps every descriptor and mapping and sleeps, like a data loader's worker
// that outlives its parent. The copy ends when it is killed, or after a minute. It has only the calling thread, and may
// therefore make raw system calls alone.
func Fork() (pid int, err error) {
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	life := unix.Timespec{Sec: forkedLife}
	r, errno := rawFork(&life)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}
