package kern

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mostDescriptors is how many numbers are looked at, whatever the limit.
const mostDescriptors = 1 << 14

// descriptors says what this process's descriptors are, and how many it may have. It opens none: there is none left.
func descriptors() string {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return ""
	}
	kinds, open := map[string]int{}, 0
	target := make([]byte, 64)
	for fd := range min(limit.Cur, mostDescriptors) {
		if n, err := unix.Readlink("/proc/self/fd/"+strconv.FormatUint(fd, 10), target); err == nil {
			kinds[kindOf(string(target[:n]))]++
			open++
		}
	}
	most := slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
		return cmp.Or(cmp.Compare(kinds[b], kinds[a]), cmp.Compare(a, b))
	})
	for i, kind := range most {
		most[i] = fmt.Sprintf("%d %s", kinds[kind], kind)
	}
	return fmt.Sprintf("%d are open of at most %d (RLIMIT_NOFILE): %s", open, limit.Cur, strings.Join(most, ", "))
}

// kindOf is what a link of /proc/self/fd leads to, without what is its own: a number, a path.
func kindOf(target string) string {
	if name, ok := strings.CutPrefix(target, "/memfd:"); ok {
		return "memfd:" + strings.TrimSuffix(name, " (deleted)")
	}
	if strings.HasPrefix(target, "/") {
		return "file"
	}
	kind, name, _ := strings.Cut(target, ":")
	if kind == "anon_inode" {
		return strings.Trim(name, "[]")
	}
	return kind
}
