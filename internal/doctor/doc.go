// Package doctor examines a host and says what would stop, slow or confuse
// expert parallelism on it.
//
// [Run] walks a table of small checks, in an order in which causes come before
// their effects, and returns a [Report]: one [Line] for each thing looked at,
// with what was read and where, and for a problem its cause and the exact fix.
// [FirstFail] is the same cut short; failing constructors add its text to their
// error. [Compare] lays the reports of several hosts side by side and keeps
// what differs.
//
// Every check reads through a [Root]: a file tree rooted at /, the environment,
// and a few functions that ask the NVIDIA and verbs libraries. Tests replace it
// by made-up hosts. The package opens no library itself (package libs below it
// does), starts no process, changes nothing on the host, and keeps no state
// between calls. A report may be made from any goroutine.
package doctor
