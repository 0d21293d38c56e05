// Command example shows expert parallelism in Go: ranks dispatch their tokens to the experts' ranks, the "experts"
// multiply them, and combine returns the sums; then the same with few tokens in low-latency mode, where ranks compute
// between sending and receiving. The program checks the sums.
//
//	go run ./core/example              4 processes
//	go run ./core/example -goroutines  4 goroutines of one process
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/deepep-go/deepep/core"
)

func main() {
	ranks := flag.Int("ranks", 4, "number of ranks")
	goroutines := flag.Bool("goroutines", false, "ranks are goroutines of this process")
	rank := flag.Int("rank", -1, "this process's rank; set by the first process for the others")
	folder := flag.String("folder", "", "where the processes meet; set likewise")
	flag.Parse()
	var err error
	switch {
	case *rank >= 0:
		err = joinAndRun(*rank, *ranks, *folder)
	case *goroutines:
		err = runGoroutines(*ranks)
	default:
		err = runProcesses(*ranks)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "example:", err)
		os.Exit(1)
	}
}

// runGoroutines runs every rank in a goroutine.
func runGoroutines(ranks int) error {
	exchangers := core.NewLocal(ranks)
	var all errgroup.Group
	for rank := range ranks {
		all.Go(func() error { return runRank(exchangers[rank]) })
	}
	return all.Wait()
}

// runProcesses starts this program once for every rank.
func runProcesses(ranks int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "deepep-example")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	var all errgroup.Group
	for rank := range ranks {
		all.Go(func() error {
			child := exec.Command(self, "-ranks", strconv.Itoa(ranks), "-rank", strconv.Itoa(rank), "-folder", folder)
			child.Stdout, child.Stderr = os.Stdout, os.Stderr
			return child.Run()
		})
	}
	return all.Wait()
}

// joinAndRun runs one rank in this process. The ranks meet in a folder.
func joinAndRun(rank, ranks int, folder string) error {
	exchanger, err := core.OpenFile(context.Background(), core.FileOptions{Rank: rank, Size: ranks, Dir: folder, Name: "example"})
	if err != nil {
		return err
	}
	return runRank(exchanger)
}
