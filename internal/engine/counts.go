package engine

// CountsLen returns the number of entries that WaitCounts fills for an exchange: L, or 0 where Notify was given no
// counts for experts.
func (b *Buffer) CountsLen(token uint64) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot, err := b.pendingOf(token)
	if err != nil {
		return 0, err
	}
	return slot.perExpert, nil
}
