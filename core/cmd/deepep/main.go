package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/core"
)

// version is that of the library that the program is made of, whoever has built it.
var version = fmt.Sprintf("%d.%d.%d", core.VersionMajor, core.VersionMinor, core.VersionPatch)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// versionCommand prints only the version, for scripts.
func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), version) },
	}
}

// exitCode ends the program with a status and no message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Exit statuses.
const (
	exitProblems = 1 // the command found problems
	exitUsage    = 2 // the command could not run
)

// run executes a command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	forced := os.Getenv("CLICOLOR_FORCE") != "" && os.Getenv("CLICOLOR_FORCE") != "0"
	if forced || isTerminal(stdout) && os.Getenv("NO_COLOR") == "" {
		text.EnableColors()
	} else {
		text.DisableColors()
	}
	root := &cobra.Command{
		Use:           "deepep",
		Short:         "Examine a host for expert parallelism, and watch it at work",
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(doctorCommand(), topCommand(), metricsCommand(), traceCommand(), planCommand(), benchCommand(), benchRankCommand(), benchConstructRankCommand(), faultsCommand(), faultsRankCommand(), faultsJobCommand(), simCommand(), versionCommand())
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var code exitCode
	switch {
	case err == nil, errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.Is(err, syscall.EPIPE): // the reader, a pager or head, has closed the pipe
		return 0
	}
	fmt.Fprintf(stderr, "deepep: %v\n", err)
	return exitUsage
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// terminalWidth is the number of columns to fill; 0 for no limit.
func terminalWidth(w io.Writer) int {
	f, ok := w.(*os.File)
	if !ok {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
