package libs

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/deepep-go/deepep/internal/doctor"
)

// fakes are libraries with the real interfaces, for a host with two GPUs and one NIC.
var fakes = map[string]string{
	"libnvidia-ml.so.1": `
#include <string.h>
#include <stdint.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; };
struct fabric { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; };
struct memory { unsigned long long total, free, used; };
static char handles[2];
int nvmlInit_v2(void) { return FAIL_INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int c) { return c == 18 ? "Driver/library version mismatch" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { strncpy(v, "580.95.05", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = &handles[i]; return 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { strncpy(b, "NVIDIA H800", n); return 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) { strncpy(b, h == handles ? "GPU-a" : "GPU-b", n); return 0; }
int nvmlDeviceGetPciInfo_v3(void *h, struct pci *p) { strcpy(p->bus_id, h == handles ? "00000000:1B:00.0" : "00000000:3B:00.0"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, struct memory *m) { m->total = 80ull << 30; m->free = 70ull << 30; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *then) { if (h == handles) return 3; *now = 1; return 0; }
int nvmlDeviceGetGpuFabricInfo(void *h, struct fabric *f) { memset(f, 0, sizeof *f); f->state = 3; f->uuid[2] = h != handles; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int index, unsigned *s) { *s = index == 2 ? 0 : 5; return 0; }
`,
	"libcuda.so.1": `
#include <string.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetPCIBusId(char *b, int n, int d) { strncpy(b, d ? "0000:3B:00.0" : "0000:1B:00.0", n); return 0; }
int cuGetErrorName(int c, const char **s) { *s = "CUDA_ERROR_INVALID_VALUE"; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  switch (a) { case 16: *v = 132; return 0; case 75: *v = 9; return 0; case 76: *v = 0; return 0; case 116: case 124: *v = 1; return 0; }
  return 1;
}
int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a < b; return 0; }
`,
	"libibverbs.so.1": `
#include <stdint.h>
#include <stddef.h>
#include <string.h>
struct attr { char fw[64]; uint64_t a, b, c, d; uint32_t e, f, g; int max_qp, max_qp_wr; };
static char devices[2]; static void *list[3] = {&devices[0], &devices[1], 0};
void **ibv_get_device_list(int *n) { *n = 2; return list; }
void ibv_free_device_list(void **l) {}
const char *ibv_get_device_name(void *d) { return d == devices ? "mlx5_0" : "mlx5_1"; }
void *ibv_open_device(void *d) { return d == devices ? d : NULL; }
int ibv_close_device(void *c) { return 0; }
int ibv_query_device(void *c, struct attr *a) { strcpy(a->fw, "28.39"); a->max_qp = 131072; a->max_qp_wr = 32768; return 0; }
`,
}

const inChild = "DEEPEP_TEST_FAKE_LIBRARIES"

// withFakes runs the test again in a process whose loader finds the fakes first.
func withFakes(t *testing.T, flags ...string) {
	t.Helper()
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to make shared libraries")
	}
	dir := t.TempDir()
	for name, source := range fakes {
		c := filepath.Join(dir, name+".c")
		if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		args := append([]string{"-shared", "-fPIC", "-o", filepath.Join(dir, name), c}, flags...)
		if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, inChild+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestLibrariesAnswer(t *testing.T) {
	if os.Getenv(inChild) == "" {
		withFakes(t, "-DFAIL_INIT=0")
		return
	}
	ctx := context.Background()
	nvml, err := NVML(ctx)
	if err != nil {
		t.Fatal(err)
	}
	gpu := doctor.NVMLGPU{Bus: "0000:1b:00.0", Name: "NVIDIA H800", UUID: "GPU-a", Major: 9, MemoryTotal: 80 << 30, MemoryFree: 70 << 30, Fabric: doctor.FabricCompleted}
	second := gpu
	second.Bus, second.UUID, second.MIG, second.Cluster = "0000:3b:00.0", "GPU-b", true, true
	both := [][]bool{{true, true}, {true, true}}
	if want := (&doctor.NVML{Driver: "580.95.05", GPUs: []doctor.NVMLGPU{gpu, second}, NVLink: both}); !reflect.DeepEqual(nvml, want) {
		t.Errorf("NVML\n got %+v\nwant %+v", nvml, want)
	}
	cuda, err := CUDA(ctx)
	if err != nil {
		t.Fatal(err)
	}
	a := doctor.CUDAGPU{Bus: "0000:1b:00.0", Major: 9, SMs: 132, DMABuf: true, GPURDMA: true}
	b := a
	b.Bus = "0000:3b:00.0"
	if want := (&doctor.CUDA{Version: 13000, GPUs: []doctor.CUDAGPU{a, b}, Peer: [][]bool{{true, true}, {false, true}}}); !reflect.DeepEqual(cuda, want) {
		t.Errorf("CUDA\n got %+v\nwant %+v", cuda, want)
	}
	verbs, err := Verbs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if want := []doctor.VerbsDevice{{Name: "mlx5_0", MaxQP: 131072, MaxQPWR: 32768}, {Name: "mlx5_1", Err: "ibv_open_device failed"}}; !reflect.DeepEqual(verbs.Devices, want) {
		t.Errorf("verbs\n got %+v\nwant %+v", verbs.Devices, want)
	}
}

func TestFirstFail(t *testing.T) {
	ctx := context.Background()
	if s := FirstFail(ctx, doctor.Options{For: doctor.ForCPU, StartMethod: "spawn"}); strings.Contains(s, "gpu") {
		t.Errorf("for the CPU: %s", s)
	}
	few := doctor.Options{For: doctor.ForCPU, Plan: doctor.Plan{HostBytes: 1 << 60}}
	if s := FirstFail(ctx, few); !strings.HasPrefix(s, "deepep doctor says: FAIL ") || !strings.Contains(s, "; fix: ") {
		t.Errorf("1 EiB a rank: %q", s)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if s := FirstFail(ended, few); s != "" {
		t.Errorf("after its time: %q", s)
	}
}

func TestMismatchIsNamed(t *testing.T) {
	if os.Getenv(inChild) == "" {
		withFakes(t, "-DFAIL_INIT=18")
		return
	}
	if _, err := NVML(context.Background()); err == nil || !strings.Contains(err.Error(), "nvmlInit_v2: Driver/library version mismatch (18)") {
		t.Error(err)
	}
}

// On any host, a query succeeds or its error names the missing library.
func TestAbsentLibrariesAreErrors(t *testing.T) {
	ctx := context.Background()
	for name, ask := range map[string]func() error{
		"libnvidia-ml.so": func() error { _, err := NVML(ctx); return err },
		"libibverbs.so":   func() error { _, err := Verbs(ctx); return err },
	} {
		if err := ask(); err != nil && !strings.Contains(err.Error(), name) && !strings.Contains(err.Error(), "nvml") && !strings.Contains(err.Error(), "ibv_") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := open("libdeepep-test-absent.so"); err == nil || !strings.Contains(err.Error(), "libdeepep-test-absent.so") {
		t.Error(err)
	}
	if Host().CUDA == nil || Quiet().CUDA != nil || Quiet().NVML == nil {
		t.Error("Host asks all libraries, Quiet only NVML")
	}
	if got := sysfsBus("00000000:1B:00.0"); got != "0000:1b:00.0" {
		t.Error(got)
	}
}
