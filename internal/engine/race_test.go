//go:build race

package engine_test

// raced: the race detector makes pools forget at random.
const raced = true
