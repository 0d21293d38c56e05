package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/monitor"
)

// pagesFlags select the pages to read.
type pagesFlags struct {
	folder string
	group  string
}

func (p *pagesFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.folder, "folder", "", "folder of statistics pages (default: the usual ones of this user)")
	cmd.Flags().StringVar(&p.group, "group", "", "only groups whose name has this prefix")
}

// list reads the pages. A folder that cannot be read is a line on stderr, unless no folder can be read.
func (p *pagesFlags) list(stderr io.Writer) ([]monitor.Entry, error) {
	var dirs []string
	if p.folder != "" {
		if _, err := os.Stat(p.folder); err != nil {
			return nil, fmt.Errorf("folder: %w", err)
		}
		dirs = []string{p.folder}
	}
	entries, err := monitor.List(dirs...)
	if err != nil && len(entries) == 0 {
		return nil, err
	}
	if err != nil {
		fmt.Fprintf(stderr, "deepep: %v\n", err)
	}
	return entries, nil
}

type topFlags struct {
	pages    pagesFlags
	interval time.Duration
	once     bool
	json     bool
	since    bool
}

func topCommand() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:   "top",
		Short: "All buffers of this host, live: rates, latencies, and who waits for whom",
		Long: `Shows every buffer of this user on this host (root: of all users). Rates and
percentiles are those of the last interval; with --total, and with --once, those
since the buffer was made. The table of waits has a row for each rank that waits
and a column for each rank it waits for: a slow rank is a tall column.
Ctrl-C ends it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.interval < 100*time.Millisecond {
				return fmt.Errorf("interval: %v; allowed is 100ms or more", f.interval)
			}
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.pages.register(cmd)
	flags := cmd.Flags()
	flags.DurationVarP(&f.interval, "interval", "i", time.Second, "time between two looks")
	flags.BoolVar(&f.once, "once", false, "print one look and end")
	flags.BoolVar(&f.json, "json", false, "print JSON, one object a look")
	flags.BoolVar(&f.since, "total", false, "count since the buffers were made, not since the last look")
	return cmd
}

func (f *topFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	var before []monitor.Entry
	for {
		now := time.Now()
		entries, err := f.pages.list(stderr)
		if err != nil {
			return err
		}
		h := look(entries, before)
		h.choose(f.pages.group)
		if err := f.show(stdout, h, now); err != nil || f.once {
			return err
		}
		if !f.since {
			before = entries
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(f.interval):
		}
	}
}

// Terminal controls: cursor home and clear to the end, with which a redraw does not flicker.
const (
	cursorHome  = "\x1b[H"
	clearBelow  = "\x1b[J"
	clearScreen = "\x1b[2J"
)

func (f *topFlags) show(w io.Writer, h hostView, now time.Time) error {
	if f.json {
		return printJSON(w, h.report(now))
	}
	screen := h.render(now, monotonic(), terminalWidth(w))
	if !f.once && isTerminal(w) {
		screen = cursorHome + clearScreen + screen + clearBelow
	}
	_, err := io.WriteString(w, screen)
	return err
}

// monotonic is the clock of the start times in pages.
func monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0
	}
	return uint64(t.Nano())
}
