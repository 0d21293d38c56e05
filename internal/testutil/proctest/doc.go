// Package proctest runs ranks as child processes of a Go test, so that the test can kill, stop and fork them.
//
// A test binary starts itself again: Main, which is the package's TestMain, plays the child's role in it. Parent and
// child exchange lines over pipes. Children end with their test. For tests only.
package proctest
