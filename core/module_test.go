package core

import (
	"archive/zip"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	modzip "golang.org/x/mod/zip"
)

// modulePath is what programs require.
const modulePath = "github.com/deepep-go/deepep"

// treeFile is a file of the tree that goes into the module's archive.
type treeFile struct{ root, path string }

func (f treeFile) Path() string                 { return f.path }
func (f treeFile) Lstat() (os.FileInfo, error)  { return os.Lstat(filepath.Join(f.root, f.path)) }
func (f treeFile) Open() (io.ReadCloser, error) { return os.Open(filepath.Join(f.root, f.path)) }

// treeFiles lists what a commit of the tree would hold: what git has or would take, and nothing that it ignores.
func treeFiles(t *testing.T, root string) (files []modzip.File) {
	t.Helper()
	out, err := exec.Command("git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Skipf("needs a git checkout: the archive of a module holds what git does (%v)", err)
	}
	for _, path := range strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if _, err := os.Lstat(filepath.Join(root, path)); err == nil { // else it is removed, and not yet committed
			files = append(files, treeFile{root, path})
		}
	}
	return files
}

// moduleVersion is the version that a commit of this tree would be tagged with.
func moduleVersion() module.Version {
	return module.Version{Path: modulePath, Version: "v" + versionText()}
}

// serveModule writes the tree as a module proxy would serve it and returns the proxy's folder.
func serveModule(t *testing.T, root string) string {
	t.Helper()
	version, proxy := moduleVersion(), t.TempDir()
	folder := filepath.Join(proxy, filepath.FromSlash(modulePath), "@v")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	gomod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for suffix, text := range map[string]string{
		".mod": string(gomod), ".info": fmt.Sprintf(`{"Version":%q,"Time":"2026-01-01T00:00:00Z"}`, version.Version),
	} {
		if err := os.WriteFile(filepath.Join(folder, version.Version+suffix), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "list"), []byte(version.Version+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Create(filepath.Join(folder, version.Version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	if err := modzip.Create(archive, version, treeFiles(t, root)); err != nil {
		t.Fatal(err) // a file name or a size that the module proxy does not take
	}
	return proxy
}

// The module can be published: its archive is small and whole, and go.mod has nothing that holds in this tree alone.
func TestModuleCanBePublished(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	mod, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	version := moduleVersion()
	if mod.Module.Mod.Path != version.Path || len(mod.Replace)+len(mod.Exclude) != 0 {
		t.Errorf("go.mod is of %s, with %d replace and %d exclude directives", mod.Module.Mod.Path, len(mod.Replace), len(mod.Exclude))
	}
	if err := module.Check(version.Path, version.Version); err != nil { // from v2 on the path ends in the major version
		t.Errorf("a tag that Go does not take: %v", err)
	}
	proxy := serveModule(t, root)
	archive, err := zip.OpenReader(filepath.Join(proxy, filepath.FromSlash(modulePath), "@v", version.Version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	var bytes uint64
	held := map[string]bool{}
	for _, file := range archive.File {
		bytes += file.UncompressedSize64
		held[strings.TrimPrefix(file.Name, version.Path+"@"+version.Version+"/")] = true
	}
	// The proxy's limit is 500 MiB; a file that does not belong into the sources shows long before.
	if bytes > modzip.MaxZipFile/20 {
		t.Errorf("the archive unpacks to %d bytes, wanted are at most %d", bytes, modzip.MaxZipFile/20)
	}
	// A go.mod in a folder would cut that folder out of the archive, and with it what programs import.
	for _, file := range treeFiles(t, root) {
		if !held[file.Path()] {
			if info, err := file.Lstat(); err == nil && info.Mode().IsRegular() {
				t.Errorf("%s is in the tree and not in the archive", file.Path())
			}
		}
	}
	if !held["LICENSE"] { // without it pkg.go.dev shows no documentation
		t.Error("the archive has no LICENSE")
	}
}

var releaseTag = regexp.MustCompile(`^v\d`)

// wrongTags names the tags of a release that are not this version's.
func wrongTags(tags []string, version string) (wrong []string) {
	for _, tag := range tags {
		if releaseTag.MatchString(tag) && tag != version {
			wrong = append(wrong, tag)
		}
	}
	return wrong
}

// A commit that has the tag of a release has the version of that release: go get takes the tag, the rest the header.
func TestTagsAreTheHeadersVersion(t *testing.T) {
	out, err := exec.Command("git", "tag", "--points-at", "HEAD").Output()
	if err != nil {
		t.Skipf("needs a git checkout: %v", err)
	}
	version := moduleVersion().Version
	if !semver.IsValid(version) || semver.Canonical(version) != version {
		t.Errorf("%s is no version of a Go module", version)
	}
	for _, tag := range wrongTags(strings.Fields(string(out)), version) {
		t.Errorf("this commit is tagged %s, include/deepep.h says %s", tag, version)
	}
	if wrong := wrongTags([]string{version, "v9.9.9", "nightly", "v1"}, version); len(wrong) != 2 {
		t.Errorf("of v9.9.9 and v1 only %v are seen", wrong)
	}
}

// outside is a module of its own that gets this one from a proxy, and everything else from what the tests were built of.
type outside struct {
	folder   string
	settings []string // of the go command
}

// modules is where the go command keeps what it has downloaded, and whom it asks for the rest: go mod tidy looks for
// what the tests of dependencies import, too, which nothing else downloads.
var modules = sync.OnceValues(func() (m struct{ cache, proxies string }, err error) {
	out, err := exec.Command("go", "env", "GOMODCACHE", "GOPROXY").Output()
	lines := strings.Split(string(out), "\n")
	if err == nil && len(lines) < 2 {
		err = fmt.Errorf("go env: %q", out)
	}
	if err == nil {
		m.cache, m.proxies = filepath.Join(lines[0], "cache", "download"), lines[1]
	}
	return m, err
})

// newOutside makes the module from the example's files.
func newOutside(t *testing.T, root string) *outside {
	t.Helper()
	known, err := modules()
	if err != nil {
		t.Fatal(err)
	}
	o := &outside{folder: t.TempDir(), settings: []string{
		"GOPROXY=file://" + serveModule(t, root) + ",file://" + known.cache + "," + known.proxies,
		// A cache of its own: the version that the tree would have must not stay in the user's.
		"GOMODCACHE=" + t.TempDir(), "GOFLAGS=-modcacherw", "GOSUMDB=off", "GONOPROXY=none", "GOPRIVATE=", "GOWORK=off", "GOTOOLCHAIN=local",
	}}
	for _, name := range []string{"main.go", "rank.go", "lowlatency.go"} {
		copyFile(t, filepath.Join("example", name), filepath.Join(o.folder, name))
	}
	return o
}

// run runs a command in a folder without the settings of this library.
func (o *outside) run(folder string, environment []string, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = folder
	for _, setting := range os.Environ() {
		if !strings.HasPrefix(setting, "DEEPEP_") && !strings.HasPrefix(setting, "LD_LIBRARY_PATH=") {
			cmd.Env = append(cmd.Env, setting)
		}
	}
	cmd.Env = append(cmd.Env, environment...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// must runs a script of the module's folder that has to succeed.
func (o *outside) must(t *testing.T, script string) {
	t.Helper()
	if out, err := o.run(o.folder, o.settings, "sh", "-ec", script); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}
