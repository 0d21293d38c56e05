package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
	"github.com/spf13/cobra"

	"github.com/deepep-go/deepep/internal/monitor"
	"github.com/deepep-go/deepep/internal/plan"
)

// defaultAddress can be reached from this host only. For other hosts the user names an address.
const defaultAddress = "127.0.0.1:9464"

type metricsFlags struct {
	pages  pagesFlags
	listen string
	once   bool
}

func metricsCommand() *cobra.Command {
	var f metricsFlags
	cmd := &cobra.Command{
		Use:   "metrics",
		Short: "Serve the statistics of all buffers to Prometheus, or print them once",
		Long: `Serves /metrics in Prometheus' text format, on 127.0.0.1 unless another address
is named. Each request reads the pages; nothing runs in between.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			registry := prometheus.NewRegistry()
			if err := registry.Register(&collector{pages: f.pages, stderr: cmd.ErrOrStderr()}); err != nil {
				return err
			}
			if f.once {
				return printMetrics(cmd.OutOrStdout(), registry)
			}
			return serve(cmd.Context(), f.listen, registry, cmd.ErrOrStderr())
		},
	}
	f.pages.register(cmd)
	cmd.Flags().StringVar(&f.listen, "listen", defaultAddress, "address to serve on, host:port")
	cmd.Flags().BoolVar(&f.once, "once", false, "print the metrics and end")
	return cmd
}

func printMetrics(w io.Writer, registry *prometheus.Registry) error {
	families, err := registry.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(w, f); err != nil {
			return err
		}
	}
	return nil
}

// idleTimeout is longer than Prometheus' usual pause between two requests of a connection. After it a connection is
// closed, so that clients that say nothing hold no descriptor.
var idleTimeout = 90 * time.Second

// serve answers requests until ctx ends.
func serve(ctx context.Context, address string, registry *prometheus.Registry, stderr io.Writer) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return fmt.Errorf("listen: %q; allowed is host:port, with 0.0.0.0 or [::] for all interfaces", address)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "deepep: see /metrics\n") // fails only if the client has gone
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: idleTimeout}
	fmt.Fprintf(stderr, "deepep: serving http://%s/metrics\n", listener.Addr())
	stop := context.AfterFunc(ctx, func() {
		bounded, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = server.Shutdown(bounded) // after a timeout Serve has ended too
	})
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// collector reads the pages at each collection.
type collector struct {
	pages  pagesFlags
	stderr io.Writer
}

var (
	pageLabels = []string{"group", "buffer", "rank", "pid"}
	opLabels   = append(pageLabels[:4:4], "op")
	peerLabels = append(opLabels[:5:5], "peer")

	describe = func(name, help string, labels []string) *prometheus.Desc {
		return prometheus.NewDesc("deepep_"+name, help, labels, nil)
	}
	infoDesc     = describe("buffer_info", "1 for each buffer of a rank, with what it is.", append(pageLabels[:4:4], "engine", "device", "host", "state"))
	liveDesc     = describe("buffer_live", "1 if the rank's process runs and its buffer has not failed.", pageLabels)
	callsDesc    = describe("calls_total", "Calls that ended.", opLabels)
	errorsDesc   = describe("errors_total", "Calls that ended with an error.", opLabels)
	durationDesc = describe("call_duration_seconds", "Time in the operation's own kernels.", opLabels)
	maxDesc      = describe("call_duration_max_seconds", "Longest call since the buffer was made.", opLabels)
	bytesDesc    = describe("sent_bytes_total", "Payload bytes sent to a peer.", peerLabels)
	waitDesc     = describe("wait_seconds_total", "Time that the rank waited for a peer.", peerLabels)
	awaitedDesc  = describe("awaited_seconds_total", "Time that the other ranks of this host waited for a rank: the slow one stands out.", []string{"group", "buffer", "peer"})
	slowDesc     = describe("slow_rank", "1 for the rank that the others wait for, if one stands out.", []string{"group", "buffer", "peer"})
	damagedDesc  = describe("pages_skipped", "Statistics pages that could not be read.", nil)
)

// Describe makes no promise: which series there are depends on the pages.
func (c *collector) Describe(ch chan<- *prometheus.Desc) { ch <- damagedDesc }

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	entries, err := c.pages.list(c.stderr)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(damagedDesc, err)
		return
	}
	h := look(entries, nil)
	h.choose(c.pages.group)
	ranks, doubled := h.distinctRanks()
	for _, r := range ranks {
		collectRank(ch, r)
	}
	seen := map[[2]string]bool{}
	for i := range h.buffers {
		b := &h.buffers[i]
		if key := [2]string{b.group, strconv.Itoa(int(b.buffer))}; !seen[key] {
			seen[key] = true
			collectWaits(ch, b)
		}
	}
	ch <- prometheus.MustNewConstMetric(damagedDesc, prometheus.GaugeValue, float64(len(h.damaged)+doubled))
}

// distinctRanks leaves out ranks with the labels of another: Prometheus takes a series once, and one page of another
// user, whom root reads as well, must not spoil the others. This user's own pages come first.
func (h *hostView) distinctRanks() (all []*rankView, doubled int) {
	for i := range h.buffers {
		for j := range h.buffers[i].ranks {
			all = append(all, &h.buffers[i].ranks[j])
		}
	}
	slices.SortStableFunc(all, func(a, b *rankView) int {
		switch {
		case a.own == b.own:
			return 0
		case a.own:
			return -1
		}
		return 1
	})
	seen := map[[4]string]bool{}
	found := len(all)
	all = slices.DeleteFunc(all, func(r *rankView) bool {
		key := [4]string(r.labels())
		double := seen[key]
		seen[key] = true
		return double
	})
	return all, found - len(all)
}

// labels are the values of pageLabels.
func (r *rankView) labels() []string {
	return []string{r.Group, strconv.Itoa(int(r.Buffer)), strconv.Itoa(r.Rank), strconv.Itoa(r.PID)}
}

func collectRank(ch chan<- prometheus.Metric, r *rankView) {
	page := r.labels()
	state, live := r.State.String(), 1.0
	if r.dead {
		state = "dead"
	}
	if state != monitor.Live.String() {
		live = 0
	}
	ch <- prometheus.MustNewConstMetric(infoDesc, prometheus.GaugeValue, 1, append(page[:4:4], r.Engine, r.Device, r.Host, state)...)
	ch <- prometheus.MustNewConstMetric(liveDesc, prometheus.GaugeValue, live, page...)
	for _, op := range monitor.Ops() {
		s := &r.Ops[op]
		if s.Calls+s.Errors == 0 {
			continue
		}
		labels := append(page[:4:4], op.String())
		ch <- prometheus.MustNewConstMetric(callsDesc, prometheus.CounterValue, float64(s.Calls), labels...)
		ch <- prometheus.MustNewConstMetric(errorsDesc, prometheus.CounterValue, float64(s.Errors), labels...)
		ch <- prometheus.MustNewConstMetric(maxDesc, prometheus.GaugeValue, seconds(s.MaxNS), labels...)
		buckets, n := cumulative(s)
		ch <- prometheus.MustNewConstHistogram(durationDesc, n, seconds(s.TotalNS), buckets, labels...)
		for peer := range s.BytesTo {
			toPeer := append(labels[:5:5], strconv.Itoa(peer))
			ch <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(s.BytesTo[peer]), toPeer...)
			ch <- prometheus.MustNewConstMetric(waitDesc, prometheus.CounterValue, seconds(s.WaitFor[peer]), toPeer...)
		}
	}
}

// cumulative converts the page's buckets, four an octave, to Prometheus' cumulative ones, one an octave.
func cumulative(s *monitor.OpStats) (bounds map[float64]uint64, n uint64) {
	const octave = 4
	bounds = map[float64]uint64{}
	for b, in := range s.Hist {
		n += in
		if b%octave == octave-1 && b != len(s.Hist)-1 { // the last bucket has no upper end
			bounds[seconds(plan.BucketEnd(b))] = n
		}
	}
	return bounds, n
}

func collectWaits(ch chan<- prometheus.Metric, b *bufferView) {
	slow, found := b.waits().Slowest()
	for peer := range b.numRanks {
		labels := []string{b.group, strconv.Itoa(int(b.buffer)), strconv.Itoa(peer)}
		var ns uint64
		for _, r := range b.ranks {
			if r.Rank == peer {
				continue
			}
			for op := range r.Ops {
				ns += r.Ops[op].WaitFor[peer]
			}
		}
		isSlow := 0.0
		if found && slow.Rank == peer {
			isSlow = 1
		}
		ch <- prometheus.MustNewConstMetric(awaitedDesc, prometheus.CounterValue, seconds(ns), labels...)
		ch <- prometheus.MustNewConstMetric(slowDesc, prometheus.GaugeValue, isSlow, labels...)
	}
}

func seconds(ns uint64) float64 { return float64(ns) / 1e9 }
