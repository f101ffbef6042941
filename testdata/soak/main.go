// Command soak keeps a fleet of stdio and HTTP servers busy while they crash,
// stall, write nonsense and come back, and then settles the accounts: what
// every call returned against what the servers know to have run.
//
//	go run ./testdata/soak                        a minute
//	go run ./testdata/soak -seconds 600 -seed 7   ten, and other misfortunes
//
// The seed decides the faults; when each meets which call depends on the
// machine. It prints its figures, and exits with status 1 if any of this does
// not hold:
//
//   - a call without a key ran at most once, one with a key at most once for
//     each attempt;
//   - a call that succeeded did run, and got its own answer;
//   - a call that failed and ran says that it may have run;
//   - every call came back within its bounds;
//   - every reach is in the counters of its server, once, and the transitions
//     of each breaker are a chain;
//   - once the faults have stopped, every server serves again;
//   - after Close no process, goroutine or descriptor is left.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"resilient/mcp"
)

const (
	servers  = 6                      // the even ones are children, the odd ones endpoints
	attempts = 3                      // at one call
	ceiling  = 400 * time.Millisecond // of one attempt
	connect  = 2 * time.Second
	slack    = 2 * time.Second // for a machine that does other things too
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		os.Exit(serve(os.Args[2:]))
	}
	seconds := flag.Int("seconds", 60, "how long the faults go on")
	seed := flag.Uint64("seed", 1, "what goes wrong")
	callers := flag.Int("callers", 64, "how many call at once")
	flag.Parse()
	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(2)
	}
	s := &soak{dir: dir, seed: *seed, callers: *callers, length: time.Duration(*seconds) * time.Second, tallies: map[string]*tally{}}
	// A call that never returns would hang the program; it is what this looks for.
	watchdog := time.AfterFunc(s.length+time.Minute, func() {
		fmt.Println("VIOLATION: something hangs")
		pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
		os.RemoveAll(dir)
		os.Exit(1)
	})
	err = s.run()
	watchdog.Stop()
	os.RemoveAll(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(2)
	}
	if s.violations > 0 {
		fmt.Printf("%d violations\n", s.violations)
		os.Exit(1)
	}
	fmt.Println("no violation")
}

// A soak is one run.
type soak struct {
	dir     string // where the children leave their marks
	seed    uint64
	callers int
	length  time.Duration
	fleet   *mcp.Fleet
	webs    []*web
	records [][]record // by caller; each belongs to it until it is done

	answered atomic.Int64 // the longest that a call outlived its deadline
	longest  atomic.Int64 // the longest that a call without one took

	mu         sync.Mutex // guards the fields below
	tallies    map[string]*tally
	ends       map[string]int // calls by how they ended
	violations int
}

// A record is what is known of one call. A million of them are four megabytes.
type record struct {
	server uint8
	keyed  bool
	end    ending
	runs   uint8 // the marks that the server has of it
}

type ending uint8

const (
	pending   ending = iota
	succeeded        // with the right answer
	mayHave          // failed, and may have run
	didNot           // failed, and did not run
)

// A tally counts the reaches at a server as Options.Trace and OnState see them.
type tally struct {
	begun, ended, retried, opened, refused uint64
	outcomes                               map[mcp.Outcome]uint64
	state                                  mcp.BreakerState
}

// violation reports a broken promise. The first few say what there is to know.
func (s *soak) violation(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.violations++; s.violations <= 20 {
		fmt.Printf("VIOLATION: "+format+"\n", args...)
	}
}

func (s *soak) run() error {
	if err := warmUp(); err != nil {
		return err
	}
	goroutines, files := runtime.NumGoroutine(), descriptors()
	begin := time.Now()
	w := window{from: begin.Add(time.Second), until: begin.Add(s.length)}
	cfgs, err := s.start(w)
	if err != nil {
		return err
	}
	ctx := context.Background()
	if s.fleet, err = mcp.Open(ctx, cfgs, &mcp.Options{Trace: s.trace, OnState: s.onState}); err != nil {
		return err
	}
	watched, watching := context.WithCancel(ctx)
	var polls sync.WaitGroup
	peak := uint64(0)
	polls.Go(func() { // ends with the faults; run waits for it
		for watched.Err() == nil {
			_ = s.fleet.String() // must not disturb anybody
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapAlloc)
			pause(watched, 100*time.Millisecond)
		}
	})
	s.records, s.ends = make([][]record, s.callers), map[string]int{}
	var wg sync.WaitGroup
	for i := range s.callers {
		wg.Go(func() { s.call(i, w.until) })
	}
	wg.Wait()
	watching()
	polls.Wait()
	s.recover(cfgs)
	health := s.fleet.Health()
	closing := time.Now()
	if err := s.fleet.Close(); err != nil {
		s.violation("Close: %v", err)
	}
	closed := time.Since(closing)
	left := processes(s.dir)
	for _, p := range left {
		s.violation("a process is left: %s", p)
	}
	for _, web := range s.webs {
		web.stop()
	}
	s.leaks(goroutines, files)
	starts, err := s.collect()
	if err != nil {
		return err
	}
	s.settle()
	s.audit(health)
	s.print(health, starts, peak, closed)
	return nil
}

// start brings up the endpoints and says how all servers are reached.
func (s *soak) start(w window) ([]mcp.Config, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var cfgs []mcp.Config
	for i := range servers {
		cfg := mcp.Config{
			Name:            "server" + strconv.Itoa(i),
			Prefix:          "server" + strconv.Itoa(i),
			ConnectTimeout:  connect,
			CallTimeout:     ceiling,
			ReadTimeout:     ceiling,
			MaxMessageBytes: 1 << 20,
			MaxInFlight:     24,
			Retry:           mcp.RetryConfig{MaxAttempts: attempts, BaseDelay: 10 * time.Millisecond, MaxDelay: 100 * time.Millisecond, MaxRetryAfter: time.Second},
			BreakerReset:    200 * time.Millisecond,
		}
		if i%2 == 0 {
			cfg.Command = []string{self, "serve", s.dir, strconv.Itoa(i), strconv.FormatUint(s.seed, 10),
				strconv.FormatInt(w.from.UnixNano(), 10), strconv.FormatInt(w.until.UnixNano(), 10)}
		} else {
			web, err := newWeb(i, s.seed, w)
			if err != nil {
				return nil, err
			}
			s.webs = append(s.webs, web)
			cfg.Endpoint = "http://" + web.addr + "/"
		}
		cfgs = append(cfgs, cfg)
	}
	return cfgs, nil
}

// call is one of the callers.
func (s *soak) call(caller int, until time.Time) {
	r := rand.New(rand.NewPCG(s.seed, uint64(caller)))
	ctx := context.Background()
	for time.Now().Before(until) {
		n := len(s.records[caller])
		rec := record{server: uint8(r.IntN(servers)), keyed: r.IntN(2) == 0}
		id := strconv.Itoa(caller) + "." + strconv.Itoa(n)
		call := &mcp.Call{Tool: fmt.Sprintf("server%d-mark", rec.server), Arguments: map[string]any{"id": id}}
		if r.IntN(50) == 0 { // more than a pipe holds
			call.Arguments = map[string]any{"id": id, "pad": strings.Repeat("x", 200<<10)}
		}
		if rec.keyed {
			call.IdempotencyKey = id
		}
		s.records[caller] = append(s.records[caller], rec)

		cctx, cancel := ctx, context.CancelFunc(func() {})
		patience := time.Duration(0)
		switch r.IntN(10) {
		case 0: // a caller that changes its mind
			cctx, cancel = context.WithCancel(ctx)
			patience = time.Duration(r.IntN(100)) * time.Millisecond
			time.AfterFunc(patience, cancel)
		case 1, 2, 3: // a run with little time
			patience = time.Duration(10+r.IntN(1000)) * time.Millisecond
			cctx, cancel = context.WithTimeout(ctx, patience)
		}
		start := time.Now()
		res, err := s.fleet.Call(cctx, call)
		took := time.Since(start)
		cancel()
		s.records[caller][n].end = s.judge(id, rec, res, err)
		s.timely(id, took, patience)
		if ue := new(mcp.UnavailableError); errors.As(err, &ue) {
			time.Sleep(min(ue.RetryAfter, 50*time.Millisecond))
		}
		time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
	}
}

// judge files what a call returned.
func (s *soak) judge(id string, rec record, res *mcp.Result, err error) ending {
	var (
		be *mcp.BudgetError
		te *mcp.TransportError
		re *mcp.RPCError
		pe *mcp.ProtocolError
		ue *mcp.UnavailableError
	)
	end, word := didNot, ""
	sent := func(sent bool) {
		if sent {
			end = mayHave
		}
	}
	switch {
	case err == nil && !res.IsError && res.Text() == id && res.Degraded == "":
		end, word = succeeded, "ok"
	case err == nil:
		end, word = succeeded, "another's answer"
		s.violation("call %s: the answer is not its own: %.40q", id, res.Text())
	case errors.As(err, &be):
		word = "out of time"
		sent(be.Sent)
	case errors.As(err, &ue):
		word = "refused by the breaker"
		s.mu.Lock()
		s.tallyLocked(ue.Server).refused++
		s.mu.Unlock()
	case errors.As(err, &te):
		word = string(te.Reason)
		sent(te.Sent)
	case errors.As(err, &re):
		end, word = mayHave, "refused by the server"
	case errors.As(err, &pe):
		end, word = mayHave, "invalid result"
	default:
		word = "untyped"
		s.violation("call %s: an error of no type of ours: %v", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends[word]++
	return end
}

// timely checks that a call kept its bounds. A call without a deadline of its
// own has the sum of what its configuration allows.
func (s *soak) timely(id string, took, patience time.Duration) {
	over, most := &s.answered, patience
	if patience == 0 {
		over, most = &s.longest, attempts*(connect+2*ceiling)+(attempts-1)*time.Second
	}
	late := took
	if patience > 0 {
		late -= patience
	}
	for {
		old := over.Load()
		if int64(late) <= old || over.CompareAndSwap(old, int64(late)) {
			break
		}
	}
	if took > most+slack {
		s.violation("call %s took %v; its bounds are %v", id, took, most)
	}
}

// recover calls every server until it serves. Nothing goes wrong any more.
func (s *soak) recover(cfgs []mcp.Config) {
	var wg sync.WaitGroup
	for _, cfg := range cfgs {
		wg.Go(func() {
			end := time.Now().Add(10 * time.Second)
			for {
				_, err := s.fleet.Call(context.Background(), &mcp.Call{Tool: cfg.Prefix + "-mark", Arguments: map[string]any{"id": "again"}})
				if err == nil {
					return
				}
				if ue := new(mcp.UnavailableError); errors.As(err, &ue) {
					s.mu.Lock()
					s.tallyLocked(ue.Server).refused++
					s.mu.Unlock()
				}
				if time.Now().After(end) {
					s.violation("%s does not serve again: %v", cfg.Name, err)
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	wg.Wait()
}

// tallyLocked requires that s.mu is held.
func (s *soak) tallyLocked(server string) *tally {
	t := s.tallies[server]
	if t == nil {
		t = &tally{outcomes: map[mcp.Outcome]uint64{}}
		s.tallies[server] = t
	}
	return t
}

func (s *soak) trace(ctx context.Context, r mcp.Reach) (context.Context, func(mcp.Health, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tallyLocked(r.Server)
	t.begun++
	if r.Attempt > 1 {
		t.retried++
	}
	return ctx, func(h mcp.Health, _ error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		t.ended++
		t.outcomes[h.Outcome]++
	}
}

// onState checks that the transitions are a chain.
func (s *soak) onState(h mcp.Health) {
	s.mu.Lock()
	t := s.tallyLocked(h.Server)
	was := t.state
	t.state = h.State
	if h.State == mcp.BreakerOpen {
		t.opened++
	}
	s.mu.Unlock()
	switch [2]mcp.BreakerState{was, h.State} {
	case [2]mcp.BreakerState{mcp.BreakerClosed, mcp.BreakerOpen},
		[2]mcp.BreakerState{mcp.BreakerOpen, mcp.BreakerHalfOpen},
		[2]mcp.BreakerState{mcp.BreakerHalfOpen, mcp.BreakerClosed},
		[2]mcp.BreakerState{mcp.BreakerHalfOpen, mcp.BreakerOpen}:
	default:
		s.violation("%s: the breaker went from %v to %v", h.Server, was, h.State)
	}
}

// collect reads the marks of the servers into the records, and counts the
// starts of the children.
func (s *soak) collect() (starts int, err error) {
	mark := func(id string) error {
		if id == "again" {
			return nil
		}
		a, b, _ := strings.Cut(id, ".")
		caller, err1 := strconv.Atoi(a)
		n, err2 := strconv.Atoi(b)
		if err1 != nil || err2 != nil || caller >= len(s.records) || n >= len(s.records[caller]) {
			return fmt.Errorf("a server ran a call that nobody made: %q", id)
		}
		if r := &s.records[caller][n]; r.runs < 255 {
			r.runs++
		}
		return nil
	}
	for i := range servers {
		if i%2 == 1 {
			continue
		}
		b, err := os.ReadFile(marksFile(s.dir, i))
		if err != nil {
			return 0, err
		}
		for id := range strings.Lines(string(b)) {
			if id == "start\n" {
				starts++
			} else if err := mark(strings.TrimSuffix(id, "\n")); err != nil {
				return 0, err
			}
		}
	}
	for _, web := range s.webs {
		for _, id := range web.marks() {
			if err := mark(id); err != nil {
				return 0, err
			}
		}
	}
	return starts, nil
}

// settle holds what each call returned against what its server ran.
func (s *soak) settle() {
	for caller, list := range s.records {
		for n, r := range list {
			most := uint8(1)
			if r.keyed {
				most = attempts
			}
			switch {
			case r.end == pending:
				s.violation("call %d.%d never returned", caller, n)
			case r.runs > most:
				s.violation("call %d.%d at server%d, keyed %v, ran %d times", caller, n, r.server, r.keyed, r.runs)
			case r.end == succeeded && r.runs == 0:
				s.violation("call %d.%d at server%d succeeded and did not run", caller, n, r.server)
			case r.end == didNot && r.runs > 0:
				s.violation("call %d.%d at server%d ran, but its error says that it did not", caller, n, r.server)
			}
		}
	}
}

// audit holds the counters of each server against what was seen of it.
func (s *soak) audit(health []mcp.Health) {
	for _, h := range health {
		s.mu.Lock()
		t := *s.tallyLocked(h.Server)
		s.mu.Unlock()
		equal := func(what string, counted, seen uint64) {
			if counted != seen {
				s.violation("%s: %d %s are counted, %d were seen", h.Server, counted, what, seen)
			}
		}
		equal("reaches", h.Calls, t.begun)
		equal("reaches that ended", h.Calls, t.ended)
		equal("retries", h.Retried, t.retried)
		equal("openings", h.Opened, t.opened)
		equal("refusals", h.Refused, t.refused)
		// A fault or a timeout is always a fault to the breaker, a protocol
		// outcome sometimes; one that comes late is not counted as either.
		certain := t.outcomes[mcp.OutcomeFault] + t.outcomes[mcp.OutcomeTimeout]
		possible := certain + t.outcomes[mcp.OutcomeProtocol]
		if h.Faults > possible || h.Faults+h.Late < certain || h.Faults+h.Late > h.Calls {
			s.violation("%s: %d faults and %d late do not fit %d to %d seen", h.Server, h.Faults, h.Late, certain, possible)
		}
		if h.State != mcp.BreakerClosed || t.state != mcp.BreakerClosed {
			s.violation("%s serves, but its breaker is %v, %v at the last event", h.Server, h.State, t.state)
		}
	}
}

// leaks compares with what there was before. Connections of the endpoints take
// a moment to notice their end.
func (s *soak) leaks(goroutines, files int) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if runtime.NumGoroutine() <= goroutines && descriptors() <= files {
			return
		}
	}
	s.violation("%d goroutines are left of %d, and %d descriptors of %d", runtime.NumGoroutine(), goroutines, descriptors(), files)
	pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
}

func (s *soak) print(health []mcp.Health, starts int, peak uint64, closed time.Duration) {
	var calls, ran, keyed, twice, executed int
	ends := map[ending]int{}
	for _, list := range s.records {
		for _, r := range list {
			calls++
			executed += int(r.runs)
			ends[r.end]++
			if r.runs > 0 {
				ran++
			}
			if r.keyed {
				keyed++
			}
			if r.runs > 1 {
				twice++
			}
		}
	}
	outages := 0
	for _, w := range s.webs {
		outages += w.outages
	}
	fmt.Printf("soak: %v, seed %d, %d callers, %d children, %d endpoints\n", s.length, s.seed, s.callers, servers-len(s.webs), len(s.webs))
	fmt.Printf("calls:    %d (%d with a key): %d succeeded, %d failed and may have run, %d failed and did not\n", calls, keyed, ends[succeeded], ends[mayHave], ends[didNot])
	fmt.Printf("ran:      %d calls, %d times in all, %d with a key more than once\n", ran, executed, twice)
	fmt.Print("endings: ")
	for _, w := range slices.Sorted(maps.Keys(s.ends)) {
		fmt.Printf(" %s %d;", w, s.ends[w])
	}
	fmt.Printf("\nmishaps:  %d starts of children, %d outages of endpoints\n", starts, outages)
	fmt.Printf("times:    a call outlived its deadline by at most %v; one without took at most %v; Close took %v\n",
		time.Duration(s.answered.Load()).Round(time.Millisecond), time.Duration(s.longest.Load()).Round(time.Millisecond), closed.Round(time.Millisecond))
	fmt.Printf("heap:     at most %d MiB\n", peak>>20)
	for _, h := range health {
		fmt.Printf("%s:  %d reaches, %d faults, %d late, %d retried, %d refused; opened %d times\n", h.Server, h.Calls, h.Faults, h.Late, h.Retried, h.Refused, h.Opened)
	}
}

// descriptors counts what this process has open; 0 where that cannot be told.
func descriptors() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(list)
}

// processes lists those that have word among their arguments; nothing where
// that cannot be told.
func processes(word string) (out []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(b), word) {
			out = append(out, f+" "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return out
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// tools are those of every server.
var tools = []mcp.Tool{{
	Name:         "mark",
	Description:  "Note that the call has run.",
	InputSchema:  json.RawMessage(`{"type":"object","properties":{"id":{"type":"string"},"pad":{"type":"string"}},"required":["id"]}`),
	OutputSchema: json.RawMessage(`{"type":"object","properties":{"id":{"type":"string"}},"required":["id"]}`),
}}

// done is the answer to a call that has run.
func done(id string) *mcp.Result {
	return &mcp.Result{Content: []mcp.Content{{Type: "text", Text: id}}, Structured: json.RawMessage(`{"id":"` + id + `"}`)}
}

// idOf reads the id out of a call.
func idOf(c *mcp.Call) (string, error) {
	var in struct{ ID string }
	raw, _ := c.Arguments.(json.RawMessage)
	if err := json.Unmarshal(raw, &in); err != nil || in.ID == "" {
		return "", errors.New("no id")
	}
	return in.ID, nil
}

// A window is when things go wrong.
type window struct{ from, until time.Time }

func (w window) open() bool {
	now := time.Now()
	return now.After(w.from) && now.Before(w.until)
}

// Dice are shared by what goes wrong in one server.
type dice struct {
	window
	mu sync.Mutex // guards r
	r  *rand.Rand
}

// one reports true once in n, while the window is open.
func (d *dice) one(n int) bool { return d.open() && d.number(n) == 0 }

// between returns a duration of so many milliseconds.
func (d *dice) between(least, most int) time.Duration {
	return time.Duration(least+d.number(most-least)) * time.Millisecond
}

func (d *dice) number(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.IntN(n)
}

// warmUp opens what the runtime keeps open from its first use on.
func warmUp() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	go io.WriteString(w, "x")
	_, err = r.Read(make([]byte, 1))
	return err
}
