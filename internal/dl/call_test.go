//go:build !deepep_fastcall && !race

package dl

import (
	"os/exec"
	"testing"
)

// The package's tests pass with the build tag that replaces SyscallN by runtime.cgocall. Under the race detector this would be
// the same run as without.
func TestFastCall(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("needs the go command to build the package with a tag")
	}
	if out, err := exec.Command(goTool, "test", "-tags", "deepep_fastcall", ".").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
