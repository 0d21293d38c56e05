package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/core"
	"github.com/deepep-go/deepep/internal/doctor"
	"github.com/deepep-go/deepep/internal/doctor/libs"
	"github.com/deepep-go/deepep/internal/plan"
)

type doctorFlags struct {
	use      string
	root     string
	pid      int
	json     bool
	compare  bool
	problems bool
	shape    shape
	planned  bool
}

func doctorCommand() *cobra.Command {
	var f doctorFlags
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine this host and say what to mend, or compare reports of several hosts",
		Long: `Prints a line for everything looked at, and for each problem its cause, the file
and the exact fix. Exit status: 0 no FAIL, 1 a FAIL (with --compare: a
difference), 2 the command could not be carried out.

Without --for everything is looked at, and hardware that is not there is N/A;
with --for, hardware that this use cannot do without is a FAIL. The flags of
"deepep plan" measure the host against a planned shape.`,
		Example: `  deepep doctor --for internode
  deepep doctor --json > $(hostname).json
  deepep doctor --compare node-a.json node-b.json
  deepep doctor --pid 4242 --for intranode
  deepep doctor --ranks 16 --experts 256 --max-tokens 128`,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.planned = slices.ContainsFunc(shapeFlags, cmd.Flags().Changed)
			if f.compare {
				return compareReports(cmd.OutOrStdout(), args, f.json)
			}
			if len(args) > 0 {
				return fmt.Errorf("doctor: %q is not expected; files go with --compare", args[0])
			}
			return f.examine(cmd)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.use, "for", "", "limit to a use: intranode, internode or cpu")
	flags.BoolVar(&f.json, "json", false, "print JSON")
	flags.BoolVar(&f.compare, "compare", false, "compare the reports (--json) named as arguments")
	flags.BoolVarP(&f.problems, "problems", "q", false, "print problems only")
	flags.IntVar(&f.pid, "pid", 0, "examine the limits, environment and libraries of this process")
	flags.StringVar(&f.root, "root", "", "read files below this folder instead of /, and ask no library")
	f.shape.register(flags)
	return cmd
}

func (f *doctorFlags) examine(cmd *cobra.Command) error {
	use, err := doctor.ParseFor(f.use)
	if err != nil {
		return err
	}
	if f.pid < 0 {
		return fmt.Errorf("pid: %d; allowed is the number of a process", f.pid)
	}
	host := libs.Host()
	if f.root != "" {
		if st, err := os.Stat(f.root); err != nil || !st.IsDir() {
			return fmt.Errorf("root: %s is not a folder", f.root)
		}
		host = doctor.Root{FS: os.DirFS(f.root)}
	}
	opt := doctor.Options{For: use, Version: version, PID: f.pid}
	if f.pid > 0 && host.FS != nil {
		if _, err := os.Stat(fmt.Sprintf("%s/proc/%d", f.root, f.pid)); err != nil {
			return fmt.Errorf("pid: no process %d", f.pid)
		}
	}
	if f.planned {
		f.shape.engine = map[doctor.For]string{doctor.ForCPU: core.EngineCPU, doctor.ForIntranode: core.EngineCUDA, doctor.ForInternode: core.EngineCUDA}[use]
		p, err := f.shape.plan()
		if err != nil {
			return err
		}
		opt.Topology = plan.Topology{Ranks: p.Ranks, Peers: p.NumNVLPeers}
		opt.Ranks, opt.Plan = cmp.Or(f.shape.onHost, p.NumNVLPeers), p.forDoctor(use, f.shape.nics)
	}
	opt.Kernels, opt.NVSHMEM = installedKernels(f.root)
	opt.Searched = true
	report, err := doctor.Run(cmd.Context(), host, opt)
	if err != nil {
		return err
	}
	if err := f.print(cmd.OutOrStdout(), report); err != nil {
		return err
	}
	if report.Status == doctor.Fail {
		return exitCode(exitProblems)
	}
	return nil
}

func (f *doctorFlags) print(w io.Writer, report *doctor.Report) error {
	switch {
	case f.json && f.problems:
		return printJSON(w, report.OnlyProblems())
	case f.json:
		return printJSON(w, report)
	}
	return report.WriteText(w, f.problems, paintStatus)
}

func paintStatus(s doctor.Status, word string) string {
	switch s {
	case doctor.OK:
		return text.FgGreen.Sprint(word)
	case doctor.Warn:
		return text.FgYellow.Sprint(word)
	case doctor.Fail:
		return text.Colors{text.FgRed, text.Bold}.Sprint(word)
	}
	return text.FgHiBlack.Sprint(word)
}

func compareReports(w io.Writer, files []string, asJSON bool) error {
	if len(files) < 2 {
		return errors.New("compare: name at least two files that `deepep doctor --json` wrote")
	}
	reports := make([]*doctor.Report, len(files))
	for i, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("compare: %w", err)
		}
		reports[i], err = doctor.ReadReport(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("compare: %s: %w", name, err)
		}
	}
	c := doctor.Compare(reports)
	var err error
	if asJSON {
		err = printJSON(w, c)
	} else {
		err = c.WriteText(w)
	}
	if err == nil && len(c.Differences) > 0 {
		return exitCode(exitProblems)
	}
	return err
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
