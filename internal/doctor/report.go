package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Status is the verdict of one line.
type Status string

// The four verdicts. N/A means that the host lacks the subject of the check, or that the check could not read it; the
// line says which.
const (
	OK   Status = "OK"
	Warn Status = "WARN"
	Fail Status = "FAIL"
	NA   Status = "N/A"
)

// For limits a report to one use. With the zero value all checks run, and missing hardware is N/A; with a use, missing
// hardware that the use needs is a FAIL.
type For string

// The uses.
const (
	ForAny       For = ""
	ForIntranode For = "intranode"
	ForInternode For = "internode"
	ForCPU       For = "cpu"
)

// ParseFor parses the name of a use; the empty name is ForAny.
func ParseFor(name string) (For, error) {
	switch f := For(name); f {
	case ForAny, ForIntranode, ForInternode, ForCPU:
		return f, nil
	}
	return ForAny, fmt.Errorf("for: %q is not a use; allowed are intranode, internode and cpu", name)
}

// Line is the outcome of one check on one subject.
type Line struct {
	Check   string            `json:"check"`             // stable name, as in docs/doctor.md
	Subject string            `json:"subject,omitempty"` // the device, port or copy; empty for the host
	Status  Status            `json:"status"`
	Read    string            `json:"read"`            // the value that the check has read
	File    string            `json:"file,omitempty"`  // the file of the value, or the one to edit
	Cause   string            `json:"cause,omitempty"` // problems only
	Fix     string            `json:"fix,omitempty"`   // problems only
	Facts   map[string]string `json:"facts,omitempty"` // values that should be equal on all hosts
}

// Name is the check with its subject.
func (l Line) Name() string {
	if l.Subject == "" {
		return l.Check
	}
	return l.Check + " " + l.Subject
}

// String is one line of text for an error message.
func (l Line) String() string {
	s := fmt.Sprintf("%s %s: %s", l.Status, l.Name(), l.Read)
	if l.Cause != "" {
		s += "; cause: " + l.Cause
	}
	if l.File != "" {
		s += " (" + l.File + ")"
	}
	if l.Fix != "" {
		s += "; fix: " + l.Fix
	}
	return s
}

// Format is the version of the JSON form. It increases when a field changes its meaning.
const Format = 1

// Report is the result of examining one host.
type Report struct {
	Format  int    `json:"format"`
	Version string `json:"version"` // of this library
	Host    string `json:"host"`
	Kernel  string `json:"kernel"`
	For     For    `json:"for"`
	Status  Status `json:"status"` // the worst of the lines
	Lines   []Line `json:"lines"`
}

// Worst is the worst verdict of the lines: FAIL, then WARN, then OK.
func (r *Report) Worst() Status {
	worst := OK
	for _, l := range r.Lines {
		if l.Status == Fail {
			return Fail
		}
		if l.Status == Warn {
			worst = Warn
		}
	}
	return worst
}

// Count returns how many lines have the verdict s.
func (r *Report) Count(s Status) int {
	n := 0
	for _, l := range r.Lines {
		if l.Status == s {
			n++
		}
	}
	return n
}

// WriteText prints the report as text: a line for each finding and, after a problem, its cause, file and fix, unwrapped
// so that a fix can be copied. With problems only those lines; the last line counts all. paint colours a verdict; nil
// leaves it plain.
func (r *Report) WriteText(w io.Writer, problems bool, paint func(Status, string) string) error {
	if paint == nil {
		paint = func(_ Status, s string) string { return s }
	}
	shown := r.Lines
	if problems {
		shown = r.problems()
	}
	width := 0
	for _, l := range shown {
		width = max(width, len(l.Name()))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "host %s, kernel %s%s\n", orDash(r.Host), orDash(r.Kernel), describeFor(r.For))
	for _, l := range shown {
		fmt.Fprintf(&b, "%s %-*s  %s\n", paint(l.Status, fmt.Sprintf("%-4s", l.Status)), width, l.Name(), l.Read)
		if l.Status != Fail && l.Status != Warn {
			continue
		}
		for _, part := range [][2]string{{"cause", l.Cause}, {"file", l.File}, {"fix", l.Fix}} {
			if part[1] != "" {
				fmt.Fprintf(&b, "     %-5s  %s\n", part[0], part[1])
			}
		}
	}
	fmt.Fprintf(&b, "%d OK, %d WARN, %d FAIL, %d N/A\n", r.Count(OK), r.Count(Warn), r.Count(Fail), r.Count(NA))
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) problems() []Line {
	return slices.DeleteFunc(slices.Clone(r.Lines), func(l Line) bool { return l.Status != Fail && l.Status != Warn })
}

// OnlyProblems is the report without the lines of checks that found none.
func (r *Report) OnlyProblems() *Report {
	less := *r
	less.Lines = r.problems()
	return &less
}

func describeFor(f For) string {
	if f == ForAny {
		return ""
	}
	return ", for " + string(f)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
