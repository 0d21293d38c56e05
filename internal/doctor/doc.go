// Package doctor examines a host for causes that stop or slow expert parallelism.
//
// [Run] runs a table of small checks, causes before their effects, and returns a [Report]: one [Line] for each subject,
// with the value and the file that the check has read, and for a problem its cause and the exact fix. [FirstFail] stops
// at the first FAIL; constructors that fail add its text to their error. [Compare] returns the differences between the
// reports of several hosts.
//
// Every check reads through a [Root]: a file tree rooted at /, the environment, and a few functions that call the
// NVIDIA and verbs libraries. Tests replace it by invented hosts. The package opens no library (package libs does),
// starts no process, changes nothing on the host, and keeps no state between calls. Any goroutine may call it.
package doctor
