package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/deepep-go/deepep/internal/abi"
	"github.com/deepep-go/deepep/internal/dl"
	"github.com/deepep-go/deepep/internal/kern"
	"github.com/deepep-go/deepep/internal/status"
)

func open(t *testing.T) *Device {
	t.Helper()
	lib, err := kern.Load(dl.Query{File: "libdeepep_cpu.so"})
	if errors.Is(err, status.ErrNotFound) {
		t.Skipf("needs the CPU kernel library (make kernels): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(lib, -1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func word(address uint64) *uint64 { return (*uint64)(*(*unsafe.Pointer)(unsafe.Pointer(&address))) }

// meet is an exchange among goroutines: each gets all blobs and duplicates of the descriptors.
type meet struct {
	sync.WaitGroup
	all [][]byte
	fds [][]int
}

func newMeet(n int) *meet {
	m := &meet{all: make([][]byte, n), fds: make([][]int, n)}
	m.Add(n)
	return m
}

func (m *meet) exchange(rank int) Exchange {
	return func(_ context.Context, blob []byte, fds []int) ([]Message, error) {
		m.all[rank] = blob
		for _, fd := range fds { // the caller closes its own
			m.fds[rank] = append(m.fds[rank], must(unix.Dup(fd)))
		}
		m.Done()
		m.Wait()
		out := make([]Message, len(m.all))
		for r := range out {
			out[r].Blob = append([]byte(nil), m.all[r]...)
			for _, fd := range m.fds[r] {
				out[r].FDs = append(out[r].FDs, must(unix.Dup(fd)))
			}
		}
		return out, nil
	}
}

func (m *meet) close() {
	for _, fds := range m.fds {
		closeAll(fds)
	}
}

func must(fd int, err error) int {
	if err != nil {
		panic(err)
	}
	return fd
}

func TestSharedMemoryOutlivesItsOwner(t *testing.T) {
	d := open(t)
	m := newMeet(2)
	var shared [2]*Symmetric
	var failures [2]error
	var both sync.WaitGroup
	for rank := range 2 {
		both.Go(func() {
			shared[rank], failures[rank] = d.Share(context.Background(), rank, 8192, []bool{true, true}, m.exchange(rank))
		})
	}
	both.Wait()
	m.close()
	if err := errors.Join(failures[:]...); err != nil {
		t.Fatal(err)
	}
	*word(shared[1].Local.Address + 4096) = 0x1234
	if got := *word(shared[0].Addresses[1] + 4096); got != 0x1234 || shared[0].Addresses[0] != shared[0].Local.Address {
		t.Errorf("rank 0 reads %#x", got)
	}
	if err := shared[1].Release(); err != nil {
		t.Error(err)
	}
	*word(shared[0].Addresses[1]) = 1 // its owner has freed it, the mapping is still there
	if err := errors.Join(shared[0].Release(), d.Release()); err != nil {
		t.Error(err)
	}
}

func TestShareTellsWhoFailed(t *testing.T) {
	d := open(t)
	defer d.Release()
	answer := func(change func(all []Message)) error {
		places := Places{Mapped: []bool{true, true}, Describe: func(rank int) string { return fmt.Sprintf("rank %d (there)", rank) }}
		_, err := d.ShareAmong(context.Background(), places, 4096, func(_ context.Context, blob []byte, fds []int) ([]Message, error) {
			all := []Message{{Blob: blob}, {Blob: append([]byte(nil), blob...), FDs: []int{must(unix.Dup(fds[0]))}}}
			change(all)
			return all, nil
		})
		return err
	}
	for name, c := range map[string]struct {
		change func(all []Message)
		want   *status.Error
		part   string
	}{
		"no memory there": {func(all []Message) {
			all[1].Blob = append(append([]byte{0, 0, 0, 0, 4}, make([]byte, offerHead-5)...), "all gone"...)
		}, status.ErrOutOfMemory, "rank 1 (there) failed: all gone"},
		"less there":    {func(all []Message) { all[1].Blob[9] = 1 }, status.ErrMismatch, "rank 1 (there) offers 256 bytes"},
		"no descriptor": {func(all []Message) { closeAll(all[1].FDs); all[1].FDs = nil }, status.ErrInternal, "rank 1 (there) sent 0 descriptors"},
		"cut short":     {func(all []Message) { all[1].Blob = all[1].Blob[:5] }, status.ErrInternal, "rank 1 (there) offered its memory in 5 bytes"},
	} {
		if err := answer(c.change); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := answer(func([]Message) {}); err != nil {
		t.Errorf("nothing changed: %v", err)
	}
}

// replace gives a descriptor's number to another file, as happens when something else in the process closes it and opens
// that one.
func replace(t *testing.T, fd int, by string) {
	t.Helper()
	other := must(unix.Open(by, unix.O_RDONLY|unix.O_CLOEXEC, 0))
	defer unix.Close(other)
	if err := unix.Dup3(other, fd, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
}

// A descriptor that came from another rank is another file's when it is mapped: that memory must not be used.
func TestMemoryOfAnotherDescriptorIsRefused(t *testing.T) {
	d := open(t)
	defer d.Release()
	other, err := d.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Release()
	p := &abi.MemExportParams{Mem: other.mem, FD: -1}
	if err := kern.Error("dk_mem_export", d.Lib.MemExport(p), p.DeviceError); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(int(p.FD))
	wrong := func(_ context.Context, blob []byte, fds []int) ([]Message, error) {
		return []Message{{Blob: blob}, {Blob: append([]byte(nil), blob...), FDs: []int{must(unix.Dup(int(p.FD)))}}}, nil
	}
	check := func(err error) {
		t.Helper()
		if !errors.Is(err, status.ErrSystem) || !strings.Contains(err.Error(), "of rank 1") || !strings.Contains(err.Error(), "its descriptor is another file's") {
			t.Errorf("got %v", err)
		}
	}
	_, err = d.Share(context.Background(), 0, 4096, []bool{true, true}, wrong)
	check(err)
	s, err := d.Share(context.Background(), 0, 4096, []bool{true, true}, func(_ context.Context, blob []byte, fds []int) ([]Message, error) {
		return []Message{{Blob: blob}, {Blob: append([]byte(nil), blob...), FDs: []int{must(unix.Dup(fds[0]))}}}, nil
	})
	if err == nil {
		err = s.GiveBack()
	}
	if err != nil {
		t.Fatal(err)
	}
	check(s.Again(context.Background(), wrong))
	if err := s.Release(); err != nil {
		t.Error(err)
	}
}

// Memory whose descriptor something else has closed is not offered to others as if it were the file of that number, which
// stays open when the memory ends.
func TestMemoryWithoutItsDescriptor(t *testing.T) {
	d := open(t)
	defer d.Release()
	before := memfds(t)
	m, err := d.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	for number := range memfds(t) {
		if !before[number] {
			fd = number
		}
	}
	if fd < 64 { // the runtime writes to the number of its eventfd whatever has it
		t.Fatalf("the memory's descriptor is %d", fd)
	}
	replace(t, fd, "/dev/null")
	defer unix.Close(fd)
	p := &abi.MemExportParams{Mem: m.mem, FD: -1}
	if err := kern.Error("dk_mem_export", d.Lib.MemExport(p), p.DeviceError); !errors.Is(err, status.ErrSystem) {
		t.Errorf("got %v", err)
	}
	if err := m.Release(); err != nil {
		t.Error(err)
	}
	if file, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); file != "/dev/null" {
		t.Errorf("the other file was closed: %q, %v", file, err)
	}
}

// memfds are the descriptors of the memory of kernel libraries.
func memfds(t *testing.T) map[int]bool {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("needs /proc: %v", err)
	}
	found := map[int]bool{}
	for _, f := range files {
		if file, _ := os.Readlink("/proc/self/fd/" + f.Name()); strings.HasPrefix(file, "/memfd:deepep") {
			number, _ := strconv.Atoi(f.Name())
			found[number] = true
		}
	}
	return found
}

func TestAllocSaysHowMuch(t *testing.T) {
	d := open(t)
	defer d.Release()
	if _, err := d.Alloc(1 << 62); !errors.Is(err, status.ErrOutOfMemory) || !strings.Contains(err.Error(), "4611686018427387904 bytes") {
		t.Error(err)
	}
}

func TestEventsOfAStream(t *testing.T) {
	d := open(t)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	ev, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	page, err := d.NewHostPage(100)
	if err != nil {
		t.Fatal(err)
	}
	if done, err := ev.Wait(0); !done || err != nil {
		t.Errorf("never recorded: %v %v", done, err)
	}
	fill := &abi.FillParams{Device: d.Handle(), Stream: uint64(s), Dst: page.Address, Bytes: 8, Value: 7}
	if code := d.Lib.Fill(fill); code != 0 {
		t.Fatal(code)
	}
	if err := ev.Record(s); err != nil {
		t.Fatal(err)
	}
	if done, err := ev.Wait(5 * time.Second); !done || err != nil || page.Host[7] != 7 {
		t.Errorf("done %v, %v, byte %d", done, err, page.Host[7])
	}
	if capturing, err := d.Capturing(s); capturing || err != nil {
		t.Errorf("capturing %v %v", capturing, err)
	}
	if err := errors.Join(page.Close(), ev.Destroy(), d.DestroyStream(s), d.Release()); err != nil {
		t.Error(err)
	}
}

// A destroyed event is freed when its last user leaves, and later uses say so.
func TestEventDestroyedBesideItsUsers(t *testing.T) {
	d := open(t)
	for range 300 {
		ev, err := d.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		var users errgroup.Group
		for range 3 {
			users.Go(func() error {
				for range 40 {
					if _, err := ev.Wait(0); err != nil {
						if errors.Is(err, status.ErrInvalidState) {
							return nil
						}
						return err
					}
					if err := ev.Record(0); err != nil && !errors.Is(err, status.ErrInvalidState) {
						return err
					}
				}
				return nil
			})
		}
		if err := ev.Destroy(); err != nil {
			t.Fatal(err)
		}
		if err := users.Wait(); err != nil {
			t.Fatal(err)
		}
		if _, err := ev.Wait(0); !errors.Is(err, status.ErrInvalidState) || !strings.Contains(err.Error(), "destroyed") {
			t.Fatalf("after Destroy: %v", err)
		}
		if err := ev.Destroy(); err != nil {
			t.Fatal(err)
		}
	}
}

// Ranks of a crowd use each other's memory where it is; it lasts as long as the last of them uses it.
func TestCrowdSharesMemoryWithoutMappings(t *testing.T) {
	d := open(t)
	m := newMeet(2)
	var made [2]*Symmetric
	var failures [2]error
	var both sync.WaitGroup
	for rank := range 2 {
		both.Go(func() {
			p := Places{Rank: rank, Mapped: []bool{true, true}, Crowd: []bool{rank == 1, rank == 0}}
			made[rank], failures[rank] = d.ShareAmong(context.Background(), p, 8192, m.exchange(rank))
		})
	}
	both.Wait()
	m.close()
	if err := errors.Join(failures[:]...); err != nil {
		t.Fatal(err)
	}
	*word(made[1].Local.Address + 4096) = 0x1234
	if made[0].Addresses[1] != made[1].Local.Address || made[1].Addresses[0] != made[0].Local.Address {
		t.Errorf("rank 0 has %#x, rank 1 %#x", made[0].Addresses, made[1].Addresses)
	}
	if err := made[0].CanGiveBack(); !errors.Is(err, status.ErrUnsupported) {
		t.Errorf("giving back shared memory: %v", err)
	}
	name, address := made[1].Local.name, made[1].Local.Address
	if err := made[1].Leave(); err != nil {
		t.Error(err)
	}
	if got := *word(address + 4096); got != 0x1234 {
		t.Errorf("rank 0 reads %#x of memory that it uses", got)
	}
	if err := made[0].Release(); err != nil {
		t.Error(err)
	}
	if got := *word(address + 4096); got != 0 || find(name) != nil {
		t.Errorf("memory that its last user has left reads %#x", got)
	}
	if err := d.Release(); err != nil {
		t.Error(err)
	}
}
