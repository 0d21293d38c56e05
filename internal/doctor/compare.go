package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Difference is a fact or verdict that is not equal on all hosts.
type Difference struct {
	What   string   `json:"what"`          // check, subject and fact
	Values []string `json:"values"`        // by host, in the order of the reports; "-": absent
	Odd    []string `json:"odd,omitempty"` // hosts that differ from the most common value
}

// Comparison is the result of Compare.
type Comparison struct {
	Hosts       []string     `json:"hosts"`
	Differences []Difference `json:"differences"`
}

const absent = "-"

// Compare returns the facts and verdicts that differ among the reports. Facts that identify a host (addresses,
// identifiers) are not compared.
func Compare(reports []*Report) Comparison {
	c := Comparison{Hosts: make([]string, len(reports)), Differences: []Difference{}}
	var order []string
	table := map[string][]string{}
	put := func(i int, what, value string) {
		row, ok := table[what]
		if !ok {
			row = slices.Repeat([]string{absent}, len(reports))
			order = append(order, what)
		}
		row[i] = value
		table[what] = row
	}
	for i, r := range reports {
		c.Hosts[i] = r.Host
		put(i, "kernel", r.Kernel)
		put(i, "library", r.Version)
		for _, l := range r.Lines {
			put(i, l.Name(), string(l.Status))
			for _, fact := range sortedKeys(l.Facts) {
				put(i, l.Name()+" "+fact, orDash(l.Facts[fact]))
			}
		}
	}
	for _, what := range order {
		row := table[what]
		if !slices.ContainsFunc(row, func(v string) bool { return v != row[0] }) {
			continue
		}
		c.Differences = append(c.Differences, Difference{What: what, Values: row, Odd: odd(c.Hosts, row)})
	}
	return c
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// odd names the hosts that differ from the value of more than half of the hosts.
func odd(hosts, row []string) []string {
	count := map[string]int{}
	for _, v := range row {
		count[v]++
	}
	for _, v := range row {
		if 2*count[v] <= len(row) {
			continue
		}
		var names []string
		for i, w := range row {
			if w != v {
				names = append(names, hosts[i])
			}
		}
		return names
	}
	return nil
}

// WriteText prints the comparison: a line for each difference, a column for each host.
func (c Comparison) WriteText(w io.Writer) error {
	rows := [][]string{append([]string{""}, c.Hosts...)}
	for _, d := range c.Differences {
		row := append([]string{d.What}, d.Values...)
		if len(d.Odd) > 0 {
			row = append(row, "← "+strings.Join(d.Odd, ", "))
		}
		rows = append(rows, row)
	}
	widths := make([]int, len(c.Hosts)+1)
	for _, row := range rows {
		for i := range widths {
			widths[i] = max(widths[i], len(row[i]))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		line := ""
		for i, cell := range row {
			if i < len(widths) {
				cell = fmt.Sprintf("%-*s", widths[i], cell)
			}
			line += cell + "  "
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	if len(c.Differences) == 0 {
		b.WriteString("no difference\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// maxReport bounds the file of a report; a full one of 8 GPUs is 20 KiB.
const maxReport = 16 << 20

// ReadReport reads a report that `deepep doctor --json` wrote.
func ReadReport(r io.Reader) (*Report, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxReport+1))
	if err != nil {
		return nil, fmt.Errorf("doctor: reading a report: %w", err)
	}
	if len(b) > maxReport {
		return nil, fmt.Errorf("doctor: report is larger than %s", bytesText(maxReport))
	}
	var report Report
	if err := json.Unmarshal(b, &report); err != nil {
		return nil, fmt.Errorf("doctor: not a report of `deepep doctor --json`: %w", err)
	}
	if report.Format != Format {
		return nil, fmt.Errorf("doctor: report has format %d, this program reads %d", report.Format, Format)
	}
	return &report, nil
}
