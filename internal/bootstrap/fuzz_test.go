package bootstrap

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"slices"
	"testing"
	"time"
)

// script makes what a peer says of a fuzzer's bytes: frames, each right or wrong in kind, rank, nonce, tag, length and
// content, and raw bytes between them. body makes the content of a frame of a kind; nil: the fuzzer's bytes.
type script struct {
	nonce [16]byte
	rank  int
	body  func(kind frameKind, right bool) []byte
	said  []frame // the frames that are whole and right in nonce and rank, in order
}

func (s *script) frames(b []byte) []byte {
	var wire bytes.Buffer
	next := func() byte {
		if len(b) == 0 {
			return 0
		}
		first := b[0]
		b = b[1:]
		return first
	}
	for len(b) > 0 && wire.Len() < 1<<16 {
		what := next()
		if what&0x0f == 0x0f { // raw bytes
			n := int(next())
			wire.Write(b[:min(n, len(b))])
			return wire.Bytes() // what follows means something else
		}
		f := frame{kind: frameKind(next() % byte(kindEnd)), rank: s.rank, nonce: s.nonce, tag: []string{"t", "u", "", "1"}[what>>4&3]}
		if what&1 != 0 {
			f.nonce[what>>4]++
		}
		if what&2 != 0 {
			f.rank = int(next())
		}
		if s.body != nil && what&4 == 0 {
			f.blob = s.body(f.kind, what&0x40 == 0)
		} else {
			n := int(next())
			n = min(n, len(b))
			f.blob, b = b[:n], b[n:]
		}
		head, err := f.encodeHead()
		if err != nil {
			continue
		}
		lie := what&8 != 0
		if lie { // about the length
			binary.LittleEndian.PutUint32(head[8:], uint32(next())<<24|uint32(len(f.blob)+1+int(next())))
		}
		wire.Write(head)
		wire.Write(f.blob)
		if lie || f.kind < kindChallenge {
			return wire.Bytes()
		}
		if f.nonce == s.nonce && f.rank == s.rank {
			s.said = append(s.said, f)
		}
	}
	return wire.Bytes()
}

// FuzzPeer lets a peer of a channel say anything: what Exchange returns is what the peer has sent for it, in order, and
// the channel closes.
func FuzzPeer(f *testing.F) {
	data, note, bye := byte(kindData), byte(kindNote), byte(kindBye)
	f.Add([]byte{0, data, 3, 'a', 'b', 'c', 0, note, 1, 'x', 0, data, 0})
	f.Add([]byte{0x10, data, 1, 'u', 0, data, 2, 't', 't', 0, bye, 0})
	f.Add([]byte{8, data, 1, 'u', 0xff, 0xff})
	f.Add([]byte{1, data, 1, 'u', 2, data, 0, 9, 0x0f, 4, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &script{nonce: [16]byte{7}, rank: 1}
		wire := s.frames(b)
		c, err := newChannel(0, s.nonce, []Peer{{Rank: 0}, {Rank: 1}})
		if err != nil {
			t.Fatal(err)
		}
		notes := make(chan int, 1<<10)
		c.OnNote(func(rank int, note []byte) { notes <- rank })
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		c.start(newLink(1, ours))
		_ = theirs.SetWriteDeadline(time.Now().Add(10 * time.Second))
		_, _ = theirs.Write(wire) // fails where the channel has closed the link
		over, cancel := context.WithCancel(context.Background())
		cancel()
		var sent [][]byte
		for _, f := range s.said {
			if f.kind == kindData && f.tag == "t" {
				sent = append(sent, f.blob)
			}
		}
		for i := 0; ; i++ {
			got, err := c.Exchange(over, "t", []byte("mine"), nil)
			if err != nil {
				break
			}
			if i >= len(sent) || !bytes.Equal(got[1].Blob, sent[i]) || string(got[0].Blob) != "mine" {
				t.Fatalf("exchange %d gave %q, sent were %q", i, got[1].Blob, sent)
			}
		}
		theirs.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

// FuzzHandshake lets someone who does not know the secret talk to rank 0, to a joiner, and to a listener of the channel
// (there without the nonce): none lets him in.
func FuzzHandshake(f *testing.F) {
	join, accept, hello, refuse, challenge := byte(kindJoin), byte(kindAccept), byte(kindHello), byte(kindRefuse), byte(kindChallenge)
	f.Add(byte(0), []byte{0, join})
	f.Add(byte(0), []byte{0x40, join, 0, join})
	f.Add(byte(0), []byte{4, join, 3, 1, 2, 3})
	f.Add(byte(1), []byte{0, challenge, 0, accept})
	f.Add(byte(1), []byte{4, challenge, 0, 0, refuse, 0x40, accept})
	f.Add(byte(2), []byte{0, hello})
	f.Add(byte(2), []byte{2, hello, 2})
	f.Fuzz(func(t *testing.T, who byte, b []byte) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		_ = theirs.SetDeadline(time.Now().Add(10 * time.Second))
		s := &script{rank: 1, nonce: randomNonce()}
		s.body = func(kind frameKind, right bool) []byte {
			switch kind {
			case kindJoin:
				j := joinRequest{size: 3, nonce: randomNonce()}
				if right { // in all but the secret
					j.proof = proof("not the secret", roleJoiner, s.nonce, j.nonce, [16]byte{}, 1, 3)
				}
				return j.encode()
			case kindAccept:
				p := proof("not the secret", roleCoordinator, s.nonce, [16]byte{}, s.nonce, 1, 3)
				return p[:]
			case kindHello:
				return binary.LittleEndian.AppendUint32(nil, 0)
			}
			return nil
		}
		spoken := make(chan struct{})
		go func() {
			defer close(spoken)
			defer theirs.Close()
			if who%3 == 0 { // he reads the challenge first
				if f, err := readFrame(theirs, handshakeBlob); err == nil {
					s.nonce = f.nonce
				}
			}
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			_, _ = theirs.Write(s.frames(b)) // fails where he was sent away
		}()
		o := TCPOptions{Rank: 1, Size: 3, Secret: "the secret"}
		var err error
		switch who % 3 {
		case 0:
			r := &tcp{size: 3, conns: make([]net.Conn, 3)}
			_, err = r.challenge(ours, o)
		case 1:
			r := &tcp{rank: 1, size: 3, conns: make([]net.Conn, 3)}
			err = r.answer(context.Background(), ours, o, 0)
		case 2:
			c, cerr := newChannel(0, [16]byte{1}, []Peer{{Rank: 0}, {Rank: 1}})
			if cerr != nil {
				t.Fatal(cerr)
			}
			defer c.Close()
			n := &connector{Pending: &Pending{nonce: [16]byte{1}, peers: c.peers}, c: c, pidfd: -1}
			strangers := newLobby(2)
			strangers.enter(ours)
			err = n.answer(newLink(-1, ours), strangers)
		}
		ours.Close()
		<-spoken
		if err == nil {
			t.Errorf("side %d let in someone who sent %x", who%3, b)
		}
	})
}

// FuzzDecision reads any `go` file of a folder.
func FuzzDecision(f *testing.F) {
	f.Add([]byte(`{"Nonces":["a","b"]}`))
	f.Add([]byte(`{"Nonces":["a","b"],"Refusal":"no","Code":6}`))
	f.Add([]byte(`{"Nonces":["a",""],"Refusal":"no","Code":-3}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d decision
		if json.Unmarshal(b, &d) != nil {
			return
		}
		for rank := range 2 {
			err := d.verdict(rank, 2, "b")
			if mine := len(d.Nonces) == 2 && d.Nonces[rank] == "b" && d.Refusal == ""; (err == nil) != mine {
				t.Errorf("rank %d: %v of %+v", rank, err, d)
			}
			if d.Refusal != "" && slices.Contains(d.Nonces, "b") && err.Error() != d.Refusal {
				t.Errorf("%v, refused with %q", err, d.Refusal)
			}
		}
	})
}
