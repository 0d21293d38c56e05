package status

// Keep stores next in *err unless an earlier error is there: the first error counts.
func Keep(err *error, next error) {
	if *err == nil {
		*err = next
	}
}
