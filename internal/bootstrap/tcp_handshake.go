package bootstrap

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net"
	"time"
)

// refuseTime bounds the sending of a refusal.
const refuseTime = time.Second

// joinRequest is a rank's answer to rank 0's challenge: its size and a proof, bound to both nonces, that it knows the
// secret.
type joinRequest struct {
	size  int
	nonce [16]byte
	proof [sha256.Size]byte
}

const joinBytes = 4 + 16 + sha256.Size

func (j joinRequest) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(j.size))
	b = append(b, j.nonce[:]...)
	return append(b, j.proof[:]...)
}

func decodeJoin(b []byte) (joinRequest, error) {
	if len(b) != joinBytes {
		return joinRequest{}, fmt.Errorf("a join request of %d bytes, want %d", len(b), joinBytes)
	}
	return joinRequest{
		size: int(binary.LittleEndian.Uint32(b)), nonce: [16]byte(b[4:20]), proof: [sha256.Size]byte(b[20:]),
	}, nil
}

// Roles in a proof: the proof of one side must not serve as the other's.
const (
	roleCoordinator = "coordinator"
	roleJoiner      = "joiner"
)

// proof shows knowledge of the secret without sending it. It is bound to the connection's challenge, and rank 0's to the
// group's nonce, which its frame brings.
func proof(secret, role string, challenge, joiner, group [16]byte, rank, size int) [sha256.Size]byte {
	m := hmac.New(sha256.New, []byte(secret))
	fmt.Fprintf(m, "deepep %s %x %x %x %d %d", role, challenge, joiner, group, rank, size)
	return [sha256.Size]byte(m.Sum(nil))
}

func refuse(c net.Conn, nonce [16]byte, err error) {
	c.SetWriteDeadline(time.Now().Add(refuseTime))
	writeFrame(c, &frame{kind: kindRefuse, nonce: nonce, blob: encodeRefusal(err)})
	c.Close()
}
