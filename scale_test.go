package mcp

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
)

// A service runs as thousands of replicas, each with a breaker of its own, and
// one outage hits them all in the same second. What does the server get while
// it is down, and when it is back with room for a twentieth of them at once?
// The busiest case: at each replica somebody is always waiting, so that a probe
// goes as soon as it may.
func TestScaleOneOutageManyReplicas(t *testing.T) {
	const (
		replicas = 10_000
		outage   = 600 // seconds
		after    = 60
		room     = 500              // requests a second
		normal   = 40 * time.Second // between the calls of one replica when all is well
		step     = 50 * time.Millisecond
		second   = int(time.Second / step)
	)
	type figures struct {
		mean, peak, settled float64 // probes a second in the outage; the peak of its second half
		load, busiest       int     // requests in the first minute after, and in its busiest second
		refused             int     // of these, for want of room
		recovered           int     // seconds after, until 99 % of the breakers were closed
	}
	simulate := func(jitter bool) (f figures) {
		r := rand.New(rand.NewPCG(1, 2))
		var breakers [replicas]breaker
		const end = (outage + 1200) * second
		due := make([][]int, end+1) // replicas by the step of their next call
		at := func(i int, when time.Duration) {
			if s := int((when + step - 1) / step); s <= end {
				due[s] = append(due[s], i)
			}
		}
		for i := range breakers {
			breakers[i] = breaker{limit: 5, reset: 30 * time.Second}
			if jitter {
				breakers[i].draw = r.Int64N
			}
			at(i, time.Duration(r.Int64N(int64(time.Second)))) // the outage begins
		}
		perSecond := make([]int, end/second+1)
		served, closed := 0, 0
		start := time.Now()
		for s := range end {
			if f.recovered > 0 && s >= (outage+after)*second {
				break
			}
			if s%second == 0 {
				served = 0
			}
			for _, i := range due[s] {
				now := time.Since(start)
				b := &breakers[i]
				tk, ok := b.admit(now, time.Second)
				if !ok {
					at(i, b.next)
					continue
				}
				perSecond[s/second]++
				v := fault
				if s >= outage*second && served < room {
					served++
					v = good
				} else if s >= outage*second && s < (outage+after)*second {
					f.refused++
				}
				was := b.mode
				switch b.settle(tk, v, now); {
				case b.mode == BreakerOpen:
					at(i, b.next)
				case v == good:
					if was != BreakerClosed {
						closed++
					}
					at(i, now+time.Duration(r.ExpFloat64()*float64(normal)))
				default:
					at(i, now+step) // the first faults, one after another
				}
			}
			if closed >= replicas*99/100 && f.recovered == 0 {
				f.recovered = s/second - outage + 1
			}
			time.Sleep(step)
		}
		sum := 0
		for i, n := range perSecond[2:outage] { // without the faults that opened them
			sum += n
			f.peak = max(f.peak, float64(n))
			if i >= outage/2 {
				f.settled = max(f.settled, float64(n))
			}
		}
		f.mean = float64(sum) / (outage - 2)
		for _, n := range perSecond[outage : outage+after] {
			f.load += n
			f.busiest = max(f.busiest, n)
		}
		return f
	}
	synctest.Test(t, func(t *testing.T) {
		var got [2]figures
		for i, jitter := range []bool{false, true} {
			f := simulate(jitter)
			t.Logf("jitter %v: probes/s in the outage: mean %.0f, peak %.0f (%.1f×), second half %.0f (%.1f×); first minute after: %d requests, %d in the busiest second, %d without room; 99 %% closed after %d s",
				jitter, f.mean, f.peak, f.peak/f.mean, f.settled, f.settled/f.mean, f.load, f.busiest, f.refused, f.recovered)
			got[i] = f
		}
		// Why the window is drawn: without, every window is one burst, and the
		// burst is all that stands in the way of recovery.
		if f := got[0]; f.settled < 10*f.mean {
			t.Errorf("without jitter the bursts are %.1f× the mean: then it may go", f.settled/f.mean)
		}
		if f := got[1]; f.peak > 12*f.mean || f.settled > 5*f.mean || f.recovered > 120 {
			t.Errorf("with jitter: %+v", f)
		}
	})
}
