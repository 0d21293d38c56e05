// Package proctest runs ranks as real child processes of a Go test, so that they can be killed, stopped and forked.
//
// A test binary starts itself again: Main, which is the package's TestMain, sees that it is a child and plays its role.
// Parent and child talk in lines over pipes. Children end with their test, whatever happened. For tests only.
package proctest
