package bootstrap

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/status"
	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

func entries(t *testing.T, dir string) string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

func runFile(t *testing.T, dir string, n int) []error {
	t.Helper()
	return each(n, func(r int) error {
		ctx := proctest.Context(t)
		ex, err := OpenFile(ctx, FileOptions{Rank: r, Size: n, Dir: dir, Name: "g"})
		if err != nil {
			return err
		}
		defer ex.Close()
		all, err := ex.AllGather(ctx, []byte{byte(r)})
		for i := range all {
			if all[i][0] != byte(i) {
				t.Errorf("blob of rank %d is %d", i, all[i][0])
			}
		}
		return err
	})
}

func TestFileLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		noErrors(t, runFile(t, dir, 3))
		if left := entries(t, dir); left != "" {
			t.Fatalf("left behind: %s", left)
		}
	}
}

// The next run of a name ignores the files of earlier ranks, which were killed in every stage.
func TestFileSurvivesEarlierRuns(t *testing.T) {
	dir := t.TempDir()
	for _, stage := range []string{"joining", "going", "gathered"} {
		var procs []*proctest.Proc
		for _, r := range []string{"0", "1", "2"} {
			if stage == "joining" && r == "2" {
				continue // does not start: the others are killed while they wait for it
			}
			p := proctest.Start(t, "file", map[string]string{"rank": r, "dir": dir, "stage": stage}, nil)
			procs = append(procs, p)
		}
		for _, p := range procs {
			p.Expect("here")
		}
		if stage == "joining" {
			proctest.Eventually(t, proctest.Limit, "rank 1 has joined", func() bool {
				joined, _ := filepath.Glob(filepath.Join(dir, "g.run-*", "join-1"))
				return len(joined) == 1
			})
		}
		for _, p := range procs {
			p.Kill()
		}
		if entries(t, dir) == "" {
			t.Fatal("the earlier run left nothing: this test tests nothing")
		}
		noErrors(t, runFile(t, dir, 3))
		if left := entries(t, dir); left != "" {
			t.Fatalf("left behind after %s: %s", stage, left)
		}
	}
}

// fileRole joins a file group and waits until it is killed.
func fileRole(c *proctest.Child) error {
	ctx := contextOfChild()
	rank := int(c.Arg("rank")[0] - '0')
	if c.Arg("stage") == "joining" {
		c.Send("here")
	}
	ex, err := OpenFile(ctx, FileOptions{Rank: rank, Size: 3, Dir: c.Arg("dir"), Name: "g"})
	if err != nil {
		return err
	}
	if c.Arg("stage") == "gathered" {
		if _, err := ex.AllGather(ctx, []byte{99}); err != nil {
			return err
		}
	}
	c.Send("here")
	c.Receive()
	return nil
}

// joinFiles counts the ranks that have joined a run of this name.
func joinFiles(dir, name string) int {
	joined, _ := filepath.Glob(filepath.Join(dir, name+".run-*", "join-*"))
	return len(joined)
}

func TestFileSizeMismatch(t *testing.T) {
	dir := t.TempDir()
	errs := each(2, func(r int) error {
		_, err := OpenFile(proctest.Context(t), FileOptions{Rank: r, Size: 2 + r, Dir: dir, Name: "g"})
		return err
	})
	for _, err := range errs {
		wantError(t, err, status.Mismatch, "rank 0 has 2, rank 1 has 3")
	}
	// A rank beyond rank 0's size gets the reason at its timeout.
	group := make(chan []error, 1)
	go func() { group <- runFile(t, dir, 1) }()
	noErrors(t, <-group)
	over := endsWhen(t, func() bool { return joinFiles(dir, "h") == 1 })
	leader := make(chan error, 1)
	go func() {
		_, err := OpenFile(over, FileOptions{Rank: 0, Size: 2, Dir: dir, Name: "h"})
		leader <- err
	}()
	_, err := OpenFile(over, FileOptions{Rank: 2, Size: 3, Dir: dir, Name: "h"})
	wantError(t, err, status.Mismatch, "rank 0 has 2, rank 2 has 3")
	wantError(t, <-leader, status.Timeout, "rank 1")
}

func TestFileForeignContent(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "g"), []byte("shopping list"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := OpenFile(proctest.Context(t), FileOptions{Rank: 1, Size: 2, Dir: dir, Name: "g"})
	wantError(t, err, status.Mismatch, "shopping list", filepath.Join(dir, "g"))
	os.Remove(filepath.Join(dir, "g"))
	if err := os.Symlink("/etc/hostname", filepath.Join(dir, "g")); err != nil {
		t.Fatal(err)
	}
	_, err = OpenFile(proctest.Context(t), FileOptions{Rank: 1, Size: 2, Dir: dir, Name: "g"})
	wantError(t, err, status.System, "symbolic links")
}

func TestDecision(t *testing.T) {
	for name, c := range map[string]struct {
		d    decision
		want error
	}{
		"mine":              {decision{Nonces: []string{"a", "b"}}, nil},
		"another process":   {decision{Nonces: []string{"a", "c"}}, errNotForUs},
		"other size":        {decision{Nonces: []string{"a", "b", "c"}}, errNotForUs},
		"nothing":           {decision{}, errNotForUs},
		"refusal":           {decision{Nonces: []string{"a", "b"}, Refusal: "no"}, status.ErrMismatch},
		"refusal of others": {decision{Nonces: []string{"a", ""}, Refusal: "no"}, errNotForUs},
	} {
		if got := c.d.verdict(1, 2, "b"); !errors.Is(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func FuzzParseStamp(f *testing.F) {
	f.Add(stamp{freshNonce(), 4}.encode())
	f.Add([]byte("0123 4"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseStamp(b)
		if err != nil {
			return
		}
		if s.size < 1 || s.size > maxRanks || strings.ContainsAny(s.nonce, "/. ") || len(s.nonce) != 32 {
			t.Errorf("%q gave %+v", b, s)
		}
	})
}

// Other users of a shared folder neither see who joins nor what the ranks say.
func TestFileKeepsOtherUsersOut(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o1777); err != nil {
		t.Fatal(err)
	}
	noErrors(t, each(2, func(r int) error {
		ex, err := OpenFile(proctest.Context(t), FileOptions{Rank: r, Size: 2, Dir: dir, Name: "g"})
		if err != nil {
			return err
		}
		defer ex.Close()
		if _, err := ex.AllGather(proctest.Context(t), []byte{byte(r)}); err != nil {
			return err
		}
		runs, _ := filepath.Glob(filepath.Join(dir, "g.run-*"))
		for _, path := range append(runs, filepath.Join(dir, "g")) {
			st, err := os.Stat(path)
			if errors.Is(err, os.ErrNotExist) {
				continue // the other rank has closed
			}
			if err != nil {
				return err
			}
			if st.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v", path, st.Mode())
			}
		}
		return nil
	}))
}
