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

// Child is the side of the pipes that a role sees.
type Child struct {
	args map[string]string
	in   *bufio.Scanner
}

// playRole returns at once in a test's own process. In a child it plays the role and ends the process.
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
		c.Say("error %v", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Arg gives an argument of Start.
func (c *Child) Arg(name string) string { return c.args[name] }

// Say sends a line to the parent.
func (c *Child) Say(format string, args ...any) {
	fmt.Fprintf(os.Stdout, format+"\n", args...)
}

// Hear waits for a line of the parent. Where the parent is gone the process ends: nobody is left to be tested for.
func (c *Child) Hear() string {
	if !c.in.Scan() {
		os.Exit(3)
	}
	return c.in.Text()
}

// forkedLife bounds a forked child that no test killed.
const forkedLife = 60

// Fork makes a copy of this process that keeps every descriptor and mapping and does nothing, as a data loader's worker
// does that outlives its parent. It ends when it is killed, or by itself after a minute. The copy has only the calling
// thread, so that it may make raw system calls and nothing else.
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
