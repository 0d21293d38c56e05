package nicsim

// Result is the outcome of a call. Times are those of ranks: from the common start until the rank's last byte has
// arrived, with the constant part of a low-latency call.
type Result struct {
	Mean, Max Time
	Transfer  Time // Mean without the constant part

	RDMABytes    int64 // payload sent by all NICs
	NVLinkBytes  int64
	Logical      int64   // payload of a rank as upstream counts it, mean over the ranks
	Bandwidth    float64 // Logical over Mean, in GB/s
	Throughput   float64 // payload that a NIC sent over Max without the constant part, in GB/s, mean over the ranks
	LargestQueue int64   // maximum of the bytes that waited for one port of a switch
	Messages     int     // over RDMA
	Floor        Time    // the busiest link's bytes at its rate: a lower bound of every run
}

// Run simulates a call. The error names an argument out of range, or what the audit found.
func Run(hw Hardware, j Job) (Result, error) {
	if err := hw.Check(); err != nil {
		return Result{}, err
	}
	if err := j.Check(); err != nil {
		return Result{}, err
	}
	m := newMachine(&hw, &j)
	var finish []Time
	var logical int64
	if j.Operation.lowLatency() {
		w := newLowLatency(m, &j)
		finish, logical = w.finish, w.logical
	} else {
		w := newNormal(m, &j)
		finish, logical = w.finish, w.logical
	}
	m.run()
	if err := m.audit(); err != nil {
		return Result{}, err
	}
	return m.result(&j, finish, logical), nil
}

func (m *machine) result(j *Job, finish []Time, logical int64) Result {
	ranks := int64(j.Topology.Ranks)
	r := Result{Logical: logical / ranks}
	var sum Time
	for _, t := range finish {
		sum += t
		r.Max = max(r.Max, t)
	}
	r.Transfer = sum / Time(ranks)
	longest := r.Max
	r.Mean = r.Transfer
	if j.Operation.lowLatency() {
		r.Mean += m.hw.Call
		r.Max += m.hw.Call
	}
	for i := range m.messages {
		if msg := &m.messages[i]; msg.queue != none {
			r.RDMABytes += msg.bytes
			r.Messages++
		}
	}
	for i := range m.links {
		l := &m.links[i]
		r.Floor = max(r.Floor, duration(l.carried, l.rate))
		switch l.kind {
		case leafUp, spineDown, hostDown:
			r.LargestQueue = max(r.LargestQueue, l.largest)
		case nvOut:
			r.NVLinkBytes += l.carried
		}
	}
	r.Bandwidth = gigabytes(r.Logical, r.Mean)
	r.Throughput = gigabytes(r.RDMABytes/ranks, longest)
	return r
}

// gigabytes is a rate in 10^9 bytes a second.
func gigabytes(bytes int64, t Time) float64 {
	if t == 0 {
		return 0
	}
	return float64(bytes) * 1e3 / float64(t)
}
