package bootstrap

import (
	"errors"
	"fmt"
	"testing"

	"github.com/deepep-go/deepep/internal/testutil/proctest"
)

// A rank dies as the others come to meet: one of them knows so already and does not count it, the other one finds out
// on the way. Both gather the same posts.
func TestGatherWithARankThatOneKnowsToBeDead(t *testing.T) {
	checkFDs(t)
	channels := open(t, 3, nil)
	dead := 2
	for _, c := range channels[:dead] {
		c.update(dead, func(s *PeerState) { s.Ended = true }, errors.New("killed"))
	}
	members := [][]int{{0, 1}, {0, 1, dead}}
	noErrors(t, each(dead, func(r int) error {
		got, err := channels[r].Gather(proctest.Context(t), "meet", []byte{byte(r)}, members[r], func([]Message) error { return nil })
		if err != nil {
			return err
		}
		for rank, m := range got[:dead] {
			if len(m.Blob) != 1 || m.Blob[0] != byte(rank) {
				return fmt.Errorf("the post of rank %d is %v", rank, m.Blob)
			}
		}
		if got[dead].Lost != (r == 1) || got[dead].Blob != nil {
			return fmt.Errorf("of the dead rank: %+v", got[dead])
		}
		return nil
	}))
}
