package engine

// CountsLen is the number of entries that WaitCounts fills for an exchange: L, or 0 where no counts for experts were given.
func (b *Buffer) CountsLen(token uint64) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot, err := b.exchange(token)
	if err != nil {
		return 0, err
	}
	return slot.perExpert, nil
}
