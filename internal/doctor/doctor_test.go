package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

func TestCompareNamesTheOddHost(t *testing.T) {
	var reports []*Report
	for i, name := range []string{"node-a", "node-b", "node-c"} {
		h := gpuHost("InfiniBand").file("proc/sys/kernel/hostname", name)
		if i == 2 {
			h.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
			h.nvml.Driver = "580.65.06"
			h.file("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\nRegistryDwords: \"\"\n")
			h.file(h.portFolder("mlx5_6")+"/rate", "200 Gb/sec (4X HDR)\n")
		}
		r, err := Run(context.Background(), h.root(), h.opt)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := json.NewEncoder(&b).Encode(r); err != nil {
			t.Fatal(err)
		}
		back, err := ReadReport(&b)
		if err != nil {
			t.Fatal(err)
		}
		reports = append(reports, back)
	}
	c := Compare(reports)
	var out bytes.Buffer
	if err := c.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	compareGolden(t, "compare.txt", out.Bytes())
	for _, d := range c.Differences {
		if !slices.Equal(d.Odd, []string{"node-c"}) {
			t.Errorf("%s: odd hosts %v", d.What, d.Odd)
		}
	}
	if same := Compare(reports[:2]); len(same.Differences) != 0 {
		t.Errorf("equal hosts differ: %+v", same.Differences)
	}
}

func TestReadReportRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "not a report",
		"[]":                             "not a report",
		`{"format": 99}`:                 "format 99",
		`{"lines": "x"}`:                 "not a report",
		`{"host": "only`:                 "not a report",
		strings.Repeat(" ", maxReport+2): "larger than",
	} {
		if _, err := ReadReport(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
}

// docs/doctor.md describes every check of the table.
func TestEveryCheckIsDescribed(t *testing.T) {
	page, err := os.ReadFile("../../docs/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	var described []string
	for line := range strings.Lines(string(page)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "### "); ok {
			described = append(described, strings.Trim(name, "`"))
		}
	}
	if !slices.Equal(described, Names()) {
		t.Errorf("docs/doctor.md describes\n%q, the checks are\n%q", described, Names())
	}
}

func TestParseFor(t *testing.T) {
	for _, ok := range []string{"", "intranode", "internode", "cpu"} {
		if f, err := ParseFor(ok); err != nil || string(f) != ok {
			t.Errorf("%q: %v %v", ok, f, err)
		}
	}
	if _, err := ParseFor("gpu"); err == nil || !strings.Contains(err.Error(), `"gpu"`) {
		t.Error(err)
	}
}

// A library call that hangs is a line of the report, and the report does not hang.
func TestHungLibrary(t *testing.T) {
	h := gpuHost("InfiniBand")
	root := h.root()
	release := make(chan struct{})
	defer close(release)
	root.NVML = func(context.Context) (*NVML, error) { <-release; return nil, errors.New("late") }
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := Run(ctx, root, h.opt); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if _, found := FirstFail(ctx, root, h.opt); found {
		t.Error("a FAIL after the deadline")
	}
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("took %v", d)
	}
}

func TestPanickingLibraryIsALine(t *testing.T) {
	h := gpuHost("InfiniBand")
	root := h.root()
	root.NVML = func(context.Context) (*NVML, error) { panic("bad table") }
	r, err := Run(context.Background(), root, h.opt)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(r.Lines, func(l Line) bool { return l.Check == "compute" })
	if l := r.Lines[i]; l.Status != NA || !strings.Contains(l.Read, "bad table") {
		t.Errorf("%s", l)
	}
}

func TestRealHost(t *testing.T) {
	r, err := Run(context.Background(), Host(), Options{PID: os.Getpid(), For: ForCPU})
	if err != nil {
		t.Fatal(err)
	}
	if r.Host == "" || len(r.Lines) < 7 {
		t.Errorf("%+v", r)
	}
	for _, l := range r.Lines {
		if strings.Contains(l.Read, "the check itself failed") {
			t.Errorf("%s", l)
		}
	}
}

// fatbinOf makes a section with one container of entries (kind, architecture).
func fatbinOf(list ...[2]int) []byte {
	var body []byte
	for _, e := range list {
		b := make([]byte, 64+16)
		binary.LittleEndian.PutUint16(b, uint16(e[0]))
		binary.LittleEndian.PutUint32(b[4:], 64)
		binary.LittleEndian.PutUint64(b[8:], 16)
		binary.LittleEndian.PutUint32(b[entryArchAt:], uint32(e[1]))
		body = append(body, b...)
	}
	head := make([]byte, fatbinHeader)
	binary.LittleEndian.PutUint32(head, fatbinMagic)
	binary.LittleEndian.PutUint16(head[4:], 1)
	binary.LittleEndian.PutUint16(head[6:], fatbinHeader)
	binary.LittleEndian.PutUint64(head[8:], uint64(len(body)))
	return append(head, body...)
}

func TestFatbinArchs(t *testing.T) {
	data := slices.Concat(fatbinOf([2]int{kindCubin, 90}, [2]int{kindPTX, 90}), make([]byte, 24), fatbinOf([2]int{kindCubin, 80}, [2]int{kindCubin, 90}))
	cubins, ptx := fatbinArchs(data)
	if !slices.Equal(cubins, []int{80, 90}) || !slices.Equal(ptx, []int{90}) {
		t.Errorf("cubins %v, ptx %v", cubins, ptx)
	}
	k := KernelLibrary{Cubins: cubins, PTX: ptx}
	for cc, want := range map[[2]int]bool{{8, 0}: true, {8, 6}: true, {7, 5}: false, {9, 0}: true, {10, 0}: true} {
		if k.has(cc[0], cc[1]) != want {
			t.Errorf("has(%v) is not %v", cc, want)
		}
	}
	if (KernelLibrary{Cubins: []int{86}}).has(8, 0) {
		t.Error("sm_86 code does not run on 8.0")
	}
	if _, err := InspectKernels(fstest.MapFS{"a.so": {Data: []byte("text")}}, "a.so"); err == nil {
		t.Error("a text file passed for a library")
	}
}

func FuzzFatbin(f *testing.F) {
	f.Add(fatbinOf([2]int{kindCubin, 90}, [2]int{kindPTX, 120}))
	f.Add(fatbinOf()[:9])
	f.Fuzz(func(_ *testing.T, b []byte) { fatbinArchs(b) })
}

func FuzzACS(f *testing.F) {
	f.Add([]byte(acsConfig(4)))
	f.Fuzz(func(_ *testing.T, b []byte) { acsRedirects(b) })
}

func FuzzReadReport(f *testing.F) {
	f.Add([]byte(`{"format":1,"host":"a","lines":[{"check":"gpu","status":"OK","read":"8","facts":{"count":"8"}}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ReadReport(bytes.NewReader(b))
		if err != nil {
			return
		}
		if err := Compare([]*Report{r, {Format: Format}}).WriteText(&bytes.Buffer{}); err != nil {
			t.Error(err)
		}
	})
}

// FuzzHostFiles replaces every parsed file by arbitrary text.
func FuzzHostFiles(f *testing.F) {
	seen := map[string]bool{}
	files := gpuHost("Ethernet").files
	for _, name := range slices.Sorted(maps.Keys(files)) {
		kind := path.Base(name) // one file of each kind
		if file := files[name]; file.Mode == 0 && len(file.Data) < 200 && !seen[kind] {
			seen[kind] = true
			f.Add(name, string(file.Data))
		}
	}
	f.Fuzz(func(t *testing.T, name, text string) {
		h := gpuHost("Ethernet").setenv("NVSHMEM_IB_GID_INDEX="+text, "NVSHMEM_QP_DEPTH="+text, "NVSHMEM_HCA_LIST="+text)
		if h.files[name] != nil {
			h.file(name, text)
		}
		r, err := Run(context.Background(), h.root(), h.opt)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range r.Lines {
			if strings.Contains(l.Read, "the check itself failed") {
				t.Errorf("%s", l)
			}
		}
	})
}

func TestVersions(t *testing.T) {
	for _, c := range []struct {
		a, b string
		less bool
	}{{"3.2.5", "3.3.9", true}, {"3.4.5-1", "3.3.9", false}, {"580.95.05", "580", false}, {"12", "13", true}, {"3.10", "3.9", false}} {
		a, okA := parseVersion(c.a)
		b, okB := parseVersion(c.b)
		if !okA || !okB || a.less(b) != c.less {
			t.Errorf("%s < %s is not %v", c.a, c.b, c.less)
		}
	}
	if _, ok := parseVersion("unknown"); ok {
		t.Error("a version without numbers")
	}
	if n := countCPUs("0-3,8,10-11"); n != 7 {
		t.Errorf("%d CPUs", n)
	}
	names := []string{"mlx5_10", "mlx5_2", "mlx5_1"}
	if sortNatural(names); !slices.Equal(names, []string{"mlx5_1", "mlx5_2", "mlx5_10"}) {
		t.Error(names)
	}
}

// markedVersion finds a version text that crosses the border of two reads.
func TestMarkAcrossPieces(t *testing.T) {
	for shift := range 20 {
		text := strings.Repeat("x", 1<<20+64-shift) + "NVSHMEM v3.4.5\x00" + strings.Repeat("y", 100)
		e := newExam(context.Background(), Root{FS: fstest.MapFS{"a.so": {Data: []byte(text)}}}, Options{})
		if v := e.markedVersion("a.so", "NVSHMEM v"); v != "3.4.5" {
			t.Fatalf("shift %d: %q", shift, v)
		}
	}
}
