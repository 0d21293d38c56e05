package bootstrap

// Candidate is a process that is ready to become a rank: its listeners are open and its hello is written, but it learns
// its number and the other ranks later.
type Candidate struct{ p *Pending }

// NewCandidate opens the listeners. The caller ends it with Enter or Close.
func NewCandidate(h HelloOptions) (*Candidate, error) {
	p, err := prepare(unnumbered, 0, h)
	if err != nil {
		p.Close()
		return nil, err
	}
	return &Candidate{p}, nil
}

// unnumbered is the rank in a candidate's hello.
const unnumbered = -1

// Hello is what the other ranks need of this one.
func (c *Candidate) Hello() ([]byte, error) { return c.p.self.encode() }

// Enter makes the candidate a rank of the group that the hellos, in the order of the ranks, describe; nil stands for a
// place without a process. Every rank gives the same hellos. The caller must call Connect or Close next; after an error
// the candidate is closed.
func (c *Candidate) Enter(rank int, hellos [][]byte) (*Pending, error) {
	p := c.p
	err := CheckGroup(rank, len(hellos))
	if err == nil {
		p.self.Rank, p.self.Size = rank, len(hellos)
		p.hellos = make([]hello, len(hellos))
		for i, b := range hellos {
			if p.hellos[i], err = seated(i, len(hellos), b); err != nil {
				break
			}
		}
	}
	if err == nil {
		err = p.meet()
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// seated decodes a candidate's hello and gives it its rank.
func seated(rank, size int, b []byte) (hello, error) {
	if b == nil {
		return hello{Rank: rank, Size: size, absent: true}, nil
	}
	h, err := decodeHello(b)
	h.Rank, h.Size = rank, size
	return h, err
}

// Close closes the listeners. After Enter it does nothing.
func (c *Candidate) Close() error { return c.p.Close() }
