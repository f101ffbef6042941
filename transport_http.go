package mcp

// The HTTP half of the seam: one POST for each message, its reply read as JSON
// or as a stream of events. This file knows Config, Request and the errors, no
// session and no policy. Its invariants: nothing outlives its bounds; every
// error knows whether the server may have run the request; net/http never sends
// anything a second time; no word of a server gets into an error's text.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	connectTries   = 3                     // for what was provably not sent
	resumeTries    = 5                     // in a row, without an event
	errorBodyBytes = 64 << 10              // read of a reply that is an error anyway
	errorBodyWait  = time.Second           // for such a body: the status is known already
	drainReads     = 16                    // after the answer, for the connection's sake
	drainWait      = 10 * time.Millisecond // a server should end a stream after the answer
	farewellWait   = time.Second           // for a notifications/cancelled
	replyWait      = 10 * time.Second      // for the POST of an answer to the server
	closeWait      = 2 * time.Second       // for everything that Close does
	idleWait       = 4 * time.Second       // Node closes idle connections after five: a request that meets that is lost
	silentWait     = 12 * time.Second      // on HTTP/2, until a ping, and then for its answer: all calls share the connection
	listenWait     = time.Second           // for the server to open its own stream
	reconnectDelay = time.Second           // unless the server's `retry` says otherwise
	reconnectFloor = 50 * time.Millisecond // a server that wants us back at once, again and again, would keep us busy
	reconnectCap   = 30 * time.Second      // without an event, the delay doubles up to this
	believedLength = 2 << 20               // the memory that a Content-Length is worth
	headerBytes    = 256 << 10             // of the head of a reply
	maxToken       = 1 << 10               // bytes of a session or event id
)

// HTTPTransport carries requests to an endpoint over Streamable HTTP, every
// revision of it, and over the HTTP+SSE of 2024-11-05 if that is what answers.
// It has no goroutine while nothing is going on, unless a stream is held open
// for the server. The methods are safe for concurrent use, and their errors those
// of a [Transport].
type HTTPTransport struct {
	cfg       *Config // not changed; a pointer, behind which fmt does not look for secrets
	o         *Options
	roundTrip func(*http.Request) (*http.Response, error)
	own       *http.Transport // behind roundTrip, unless the caller brought a client
	cut       func()          // closes the connections of own
	traced    bool            // the RoundTripper is net/http's: it reports every connection
	url       *url.URL
	postHead  *http.Header // of every POST; shared, so never changed
	getHead   *http.Header // of every GET
	limit     int          // bytes of one message
	slots     chan struct{}
	farewells chan struct{} // slots of the cancellations under way
	kept      buffers       // for replies, and for long requests
	lastID    atomic.Int64
	closing   sync.Once
	idle      chan struct{} // closed when the transport is, and no call is left
	randMu    sync.Mutex    // is held while rand is called
	rand      func(n int64) int64

	mu        sync.Mutex // guards the fields below
	in        Inbound
	inbox     *inbox
	number    int    // of the connection; 0 before the first Open
	opened    bool   // Open has reported it
	lost      bool   // the session is gone, and not initialized again yet
	closed    bool   // nothing begins any more
	session   string // Mcp-Session-Id: a secret
	version   string // the revision last spoken, for DELETE
	old       *oldStream
	listening *httpCall
	calls     map[*httpCall]struct{} // whatever is under way
}

var (
	_ Transport       = (*HTTPTransport)(nil)
	_ listener        = (*HTTPTransport)(nil)
	_ honoursDeadline = (*HTTPTransport)(nil)
)

// newHTTPTransport returns a transport for cfg, which has its defaults.
func newHTTPTransport(cfg Config, o *Options) (*HTTPTransport, error) {
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		// No Value: it may hold a password or a token.
		return nil, &ConfigError{Server: cfg.Name, Key: "endpoint", Detail: "not an http or https URL with a host"}
	}
	t := &HTTPTransport{
		cfg: &cfg, o: o, url: u, limit: cfg.MaxMessageBytes,
		kept:      buffers{spares: newSpares()},
		farewells: make(chan struct{}, maxHandlers),
		inbox:     newInbox(Inbound{}, cfg.MaxMessageBytes),
		idle:      make(chan struct{}),
		calls:     make(map[*httpCall]struct{}),
		getHead:   &http.Header{},
	}
	if t.rand = o.Rand; t.rand == nil {
		t.rand = rand.Int64N
	}
	if t.limit <= 0 {
		t.limit = math.MaxInt32
	}
	if cfg.MaxInFlight > 0 {
		t.slots = make(chan struct{}, cfg.MaxInFlight)
	}
	if u.User != nil {
		pass, _ := u.User.Password()
		basic := base64.StdEncoding.EncodeToString([]byte(u.User.Username() + ":" + pass))
		t.getHead.Set("Authorization", "Basic "+basic)
	}
	u.Fragment, u.RawFragment, u.User = "", "", nil
	for k, v := range cfg.Headers {
		t.getHead.Set(k, v)
	}
	post := t.getHead.Clone()
	t.postHead = &post
	t.getHead.Set("Accept", "text/event-stream")
	post.Set("Accept", "application/json, text/event-stream")
	post.Set("Content-Type", "application/json")

	if o.HTTPClient == nil {
		life, cut := context.WithCancel(context.Background())
		t.own, t.cut, t.traced = ownHTTPTransport(life, cfg.MaxInFlight), cut, true
		t.roundTrip = t.own.RoundTrip // all that a Client would add is redirects
		return t, nil
	}
	client := *o.HTTPClient
	_, t.traced = client.Transport.(*http.Transport)
	t.traced = t.traced || client.Transport == nil
	// A redirect would carry credentials elsewhere, or turn a POST into a GET.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	t.roundTrip = client.Do
	return t, nil
}

// ownHTTPTransport is net/http's default with a connection for every slot. Its
// connections know whether anything was written to them, and end with life.
func ownHTTPTransport(life context.Context, slots int) *http.Transport {
	tr := &http.Transport{Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true}
	if std, ok := http.DefaultTransport.(*http.Transport); ok {
		tr = std.Clone()
	}
	if slots <= 0 {
		slots = math.MaxInt16
	}
	tr.MaxIdleConns, tr.MaxIdleConnsPerHost = 0, slots+maxHandlers
	tr.IdleConnTimeout = idleWait
	tr.HTTP2 = cmp.Or(tr.HTTP2, &http.HTTP2Config{SendPingTimeout: silentWait, PingTimeout: silentWait})
	if tr.MaxResponseHeaderBytes == 0 {
		tr.MaxResponseHeaderBytes = headerBytes // net/http's own 10 MiB, in short headers, take 50 in memory
	}
	dial := tr.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: conn, spare: context.AfterFunc(life, func() { conn.Close() })}, nil
	}
	return tr
}

// honoursDeadline marks that Request.Deadline needs no derived context.
func (t *HTTPTransport) honoursDeadline() {}

// Open does no I/O. It reports a new connection the first time, and again after
// the session, or the stream of 2024-11-05, was lost.
func (t *HTTPTransport) Open(ctx context.Context, in Inbound) (fresh bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || ctx.Err() != nil {
		e := &TransportError{Origin: Origin{Server: t.cfg.Name, Op: "connect"}, Reason: ReasonCancelled, Err: ctx.Err()}
		if e.Err == nil {
			e.Reason, e.Detail = endClosed.Reason, endClosed.Detail
		}
		return false, e
	}
	if t.number == 0 {
		t.in, t.inbox = in, newInbox(in, t.limit)
	}
	if fresh = !t.opened; fresh {
		t.number, t.opened = t.number+1, true
	}
	return fresh, nil
}

// connection returns the number of the present connection.
func (t *HTTPTransport) connection() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.number
}

// Call sends a request as a POST and reads the reply until the answer.
func (t *HTTPTransport) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	c, err := t.begin(ctx, req, !req.Stream) // what lasts takes no slot
	if err != nil {
		return nil, err
	}
	defer c.end()
	err = c.call()
	if err != nil && req.Method == "initialize" && c.old == nil && maybeOld(err) {
		err = c.callOldest(err)
	}
	if err != nil {
		c.cancelRemote(err)
		return nil, err
	}
	if c.result != nil && c.buf != nil {
		*c.buf = nil // the caller's from now on
	}
	return c.result, nil
}

// Notify sends a notification. It takes no slot, since it is not waited for.
func (t *HTTPTransport) Notify(ctx context.Context, req *Request) error {
	c, err := t.begin(ctx, req, false)
	if err != nil {
		return err
	}
	defer c.end()
	return c.send(appendNotification(nil, req.Method, req.Params))
}

// Close ends calls and streams, ends the session on the server, and waits for
// what it ended, all within two seconds. Its error is nil.
func (t *HTTPTransport) Close() error {
	t.closing.Do(func() {
		until := time.Now().Add(closeWait)
		t.mu.Lock()
		version := t.version
		t.mu.Unlock()
		bye, _ := t.begin(context.Background(), &Request{Method: "close", Version: version, Deadline: until}, false)
		t.mu.Lock()
		t.closed = true
		for c := range t.calls {
			if c != bye && c.req.Method != farewell {
				c.cancel(endClosed)
			}
		}
		if len(t.calls) == 0 {
			close(t.idle)
		}
		t.mu.Unlock()
		t.inbox.close()
		if bye != nil {
			if bye.session != "" {
				if resp, err := bye.do(http.MethodDelete, t.url, bye.header(*t.getHead), nil); err == nil {
					bye.discard(resp)
				}
			}
			bye.end()
		}
		ctx, cancel := context.WithDeadline(context.Background(), until)
		defer cancel()
		for _, idle := range []chan struct{}{t.inbox.idle, t.idle} {
			select {
			case <-idle:
			case <-ctx.Done(): // a callback waits for us, or ignores its context
			}
		}
		if t.own != nil {
			t.own.CloseIdleConnections()
			t.cut() // what does not know yet that it is idle
		}
	})
	return nil
}

// listen holds the server's own stream open, if the server offers one. It waits
// a moment until it does: what a server says on a stream that is not open yet is
// lost, or keeps it from answering.
func (t *HTTPTransport) listen(ctx context.Context, version string) {
	c, err := t.begin(context.Background(), &Request{Method: "listen", Version: version, Stream: true}, false)
	if err != nil {
		return
	}
	t.mu.Lock()
	busy := t.listening != nil || c.old != nil
	if !busy {
		t.listening = c
	}
	t.mu.Unlock()
	if busy {
		c.end()
		return
	}
	open := make(chan struct{})
	go func() { // ended by Close, or with the session; Close waits for it
		defer c.end()
		resp, err := c.openStream("")
		close(open)
		if err == nil || passing(err) {
			_ = c.follow(resp)
		}
	}()
	select {
	case <-open:
	case <-time.After(listenWait):
	case <-ctx.Done():
	}
}

// forget drops the session that c was made in, unless a later one has replaced
// it, and ends the stream that listens to it.
func (t *HTTPTransport) forget(c *httpCall) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.number != t.number || c.session != t.session {
		return
	}
	t.session = ""
	t.loseLocked()
	if t.listening != nil {
		t.listening.cancel(endLost)
		t.listening = nil
	}
}

// loseLocked notes that there is no session any more, and ends what the server
// asked in it: the next one may ask under the same ids. It is called with t.mu held.
func (t *HTTPTransport) loseLocked() {
	t.opened, t.lost = false, true
	t.inbox.withdraw(nil)
}

// adopt begins the session that an answer to initialize came with.
func (t *HTTPTransport) adopt(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.session, t.lost = id, false
}

// draw returns a random duration in [0, n].
func (t *HTTPTransport) draw(n time.Duration) time.Duration {
	t.randMu.Lock()
	defer t.randMu.Unlock()
	return time.Duration(t.rand(int64(max(n, 0)) + 1))
}

// Ends of a call that are not its caller's: causes of its context.
var (
	endDeadline = &TransportError{Reason: ReasonTimeout}
	endStall    = &TransportError{Reason: ReasonTimeout, Detail: "read stalled"}
	endClosed   = &TransportError{Reason: ReasonDisconnected, Detail: "transport closed"}
	endLost     = &TransportError{Reason: ReasonDisconnected, Detail: "session lost"}
)

// An httpCall is one thing under way: a call, a notification, a stream of the
// server's. It belongs to one goroutine, but for what is marked.
type httpCall struct {
	t       *HTTPTransport
	req     *Request
	id      int64
	session string // the session id that its requests carry
	number  int    // of the connection that it is tied to
	old     *oldStream
	slot    bool
	caller  context.Context
	ctx     context.Context // ends with the caller's, the timer, or Close
	cancel  context.CancelCauseFunc
	start   time.Time
	until   time.Time     // Request.Deadline: the timer may run when the request is its caller's again
	stall   time.Duration // how long a read may stall; 0 for ever
	timer   *time.Timer   // runs expire
	last    atomic.Int64  // when the latest byte came, after start; 0: no reply yet; -1: it is over
	values  [2]string     // of its headers

	// The reply.
	body    io.ReadCloser
	method  string // of the request that it replies to
	status  int
	events  eventReader
	buf     *[]byte  // what was read; nil before that
	rest    [64]byte // and what was read after it
	result  json.RawMessage
	failed  error // the answer was no
	done    bool  // the answer has come
	foreign bool  // another answer has come

	// What net/http tells of the latest request, from any goroutine.
	trace httptrace.ClientTrace
	asked atomic.Bool                 // a foreign RoundTripper has asked it for a connection
	got   atomic.Bool                 // it has a connection, so it may have written
	conn  atomic.Pointer[countedConn] // that connection, if it is a used one of ours
	mark  atomic.Int64                // bytes written to conn before
	wrote atomic.Bool                 // the large body is out, and nobody reads it any more

	sentBody *[]byte // where it is worth keeping; nil otherwise
	trips    int     // requests made
}

// begin registers a call, so that Close ends it, waits for its slot if it takes
// one, and ties it to the present session. The caller ends it.
func (t *HTTPTransport) begin(ctx context.Context, req *Request, slot bool) (*httpCall, error) {
	c := &httpCall{t: t, req: req, caller: ctx, start: time.Now(), until: req.Deadline}
	if !req.Stream {
		c.stall = t.cfg.ReadTimeout
	}
	c.trace.GotConn = c.gotConn
	if len(req.Params) >= smallestSpare {
		c.trace.WroteRequest = func(i httptrace.WroteRequestInfo) { c.wrote.Store(i.Err == nil) }
	}
	if !t.traced {
		c.trace.GetConn = func(string) { c.asked.Store(true) }
	}
	ctx, c.cancel = context.WithCancelCause(ctx)
	c.ctx = httptrace.WithClientTrace(ctx, &c.trace)
	c.timer = time.AfterFunc(math.MaxInt64, c.expire)
	t.mu.Lock()
	if t.closed {
		c.cancel(endClosed)
	} else {
		t.calls[c] = struct{}{}
	}
	t.mu.Unlock()
	c.expire()
	if slot && t.slots != nil && c.ctx.Err() == nil {
		select {
		case t.slots <- struct{}{}:
			c.slot = true
		case <-c.ctx.Done():
		}
	}

	t.mu.Lock()
	c.old = t.old
	switch {
	case c.modern() || req.Method == "initialize":
	case req.Version != "" && (t.lost || req.conn != 0 && req.conn != t.number):
		// There is no session, or it is another one: this way the caller knows
		// that it was not run.
		c.cancel(endLost)
	default:
		if req.Version != "" {
			t.version = req.Version
		}
		c.session, c.number = t.session, t.number
	}
	t.mu.Unlock()
	if c.ctx.Err() != nil {
		defer c.end()
		return nil, c.ended(false)
	}
	return c, nil
}

// end releases what the call holds and takes it out of the books. It is the last
// thing that a goroutine of ours does.
func (c *httpCall) end() {
	c.cancel(nil)
	c.timer.Stop()
	if c.body != nil {
		c.body.Close()
	}
	if c.buf != nil {
		c.t.kept.give(c.buf)
	}
	if c.sentBody != nil && c.trips == 1 && c.wrote.Load() { // else net/http may still read it
		c.t.kept.give(c.sentBody)
	}
	if c.slot {
		<-c.t.slots
	}
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listening == c {
		t.listening = nil
	}
	if _, ok := t.calls[c]; ok {
		delete(t.calls, c)
		if t.closed && len(t.calls) == 0 {
			close(t.idle)
		}
	}
}

// expire starts the one timer that keeps both the deadline and the read stall,
// and runs when one of them may have been reached. A byte that comes only moves
// last: the timer is set anew when it fires. There is no stall before a reply.
func (c *httpCall) expire() {
	if c.ctx.Err() != nil {
		return
	}
	if c.last.Load() < 0 {
		c.cancel(endStall) // the server has been given drainWait
		return
	}
	left, end := time.Duration(math.MaxInt64), endDeadline
	if c.stall > 0 {
		left = c.stall
		if last := c.last.Load(); last > 0 {
			left, end = c.stall-(time.Since(c.start)-time.Duration(last)), endStall
		}
	}
	if !c.until.IsZero() {
		if d := time.Until(c.until); d <= left {
			left, end = d, endDeadline
		}
	}
	if left <= 0 {
		c.cancel(end)
		return
	}
	c.timer.Reset(left)
}

// modern reports whether the request is one of 2026-07-28.
func (c *httpCall) modern() bool { return c.req.Version == version2026 }

// gotConn hears that the request has a connection.
func (c *httpCall) gotConn(info httptrace.GotConnInfo) {
	conn := info.Conn
	if tc, ok := conn.(*tls.Conn); ok {
		conn = tc.NetConn()
	}
	cc, _ := conn.(*countedConn)
	if cc != nil && info.Reused {
		c.mark.Store(cc.written.Load())
	} else {
		cc = nil // and forget the one before, which net/http has found dead
	}
	c.conn.Store(cc)
	c.got.Store(true)
}

// sent reports whether the latest request may have reached the server. Without
// a connection nothing was written; a RoundTripper that never asked net/http
// for one may have done anything.
func (c *httpCall) sent() bool { return c.got.Load() || !c.asked.Load() && !c.t.traced }

// unwritten reports whether the latest request failed on a used connection to
// which nothing was written: the server had closed it meanwhile. Where others
// write too (HTTP/2), it errs on the safe side.
func (c *httpCall) unwritten() bool {
	conn := c.conn.Load()
	return conn != nil && conn.written.Load() == c.mark.Load()
}

// fault returns a TransportError of this call.
func (c *httpCall) fault(r Reason, sent bool, detail string) *TransportError {
	return &TransportError{Origin: Origin{Server: c.t.cfg.Name, Op: c.req.Method}, Reason: r, Sent: sent, Detail: detail}
}

// ended returns the error of a call whose ctx is done. The caller's own end goes
// before any of ours, also when both come at the same moment.
func (c *httpCall) ended(sent bool) *TransportError {
	err := c.caller.Err()
	if end, ok := c.caller.Deadline(); err == nil && ok && !time.Now().Before(end) {
		err = context.DeadlineExceeded
	}
	if err != nil {
		e := c.fault(ReasonCancelled, sent, "")
		e.Err = err
		return e
	}
	end := endClosed
	errors.As(context.Cause(c.ctx), &end)
	return c.fault(end.Reason, sent, end.Detail)
}

// tooBig is a message past the bound.
func (c *httpCall) tooBig(sent bool) *TransportError {
	return c.fault(ReasonLimit, sent, "message over "+strconv.Itoa(c.t.limit)+" bytes")
}

// sleep waits, and reports whether it did. It does not begin a wait that a bound
// would cut short.
func (c *httpCall) sleep(d time.Duration) bool {
	end, ok := c.caller.Deadline()
	if ok && d >= time.Until(end) || !c.until.IsZero() && d >= time.Until(c.until) {
		return false
	}
	c.last.Store(0)
	select {
	case <-time.After(d):
		return true
	case <-c.ctx.Done():
		return false
	}
}

// header returns the headers of a request, whose values are shared with base.
func (c *httpCall) header(base http.Header) http.Header {
	h := make(http.Header, len(base)+4)
	maps.Copy(h, base)
	if c.old != nil {
		return h // 2024-11-05 knows none of the others
	}
	if c.req.Version != "" && c.req.Method != "initialize" {
		c.values[0] = c.req.Version
		h["Mcp-Protocol-Version"] = c.values[0:1:1]
	}
	if c.session != "" {
		c.values[1] = c.session
		h["Mcp-Session-Id"] = c.values[1:2:2]
	}
	if c.modern() {
		h.Set("Mcp-Method", c.req.Method)
		if c.req.Name != "" {
			h.Set("Mcp-Name", encodeHeaderValue(c.req.Name))
		}
		for k, v := range c.req.Header {
			h.Set("Mcp-Param-"+k, encodeHeaderValue(v))
		}
	}
	return h
}

// authorize returns h with the Authorization that the caller gives. h may be in
// use by an earlier request.
func (c *httpCall) authorize(h http.Header, challenge string) (http.Header, error) {
	if c.t.o.Authorize == nil {
		return h, nil
	}
	value, err := c.t.o.Authorize(c.ctx, challenge)
	if c.ctx.Err() != nil {
		return nil, c.ended(false)
	}
	if err != nil {
		e := c.fault(ReasonUnavailable, false, "no authorization")
		e.Err = err
		return nil, e
	}
	h = maps.Clone(h)
	if value != "" {
		h["Authorization"] = []string{value}
	}
	return h, nil
}

// do sends one request and returns the head of its reply, whatever the status.
// What was provably not sent is tried again; what a 401 refused is sent once
// more, if there is somebody to ask for another authorization.
func (c *httpCall) do(method string, u *url.URL, h http.Header, body []byte) (*http.Response, error) {
	h, err := c.authorize(h, "")
	if err != nil {
		return nil, err
	}
	challenged, resent := false, false
	for try := 1; ; {
		resp, err := c.roundTrip(method, u, h, body)
		if err == nil {
			if resp.StatusCode != http.StatusUnauthorized || c.t.o.Authorize == nil || challenged {
				return resp, nil
			}
			resp.Body.Close()
			challenged = true
			if h, err = c.authorize(h, cmp.Or(challengeOf(resp), "Bearer")); err != nil {
				return nil, err
			}
			continue
		}
		if c.ctx.Err() == nil && !resent && c.unwritten() {
			resent = true
			continue
		}
		e, again := c.failure(err)
		if again && try < connectTries && c.sleep(c.backoff(try)) {
			try++
			continue
		}
		if c.ctx.Err() != nil {
			e = c.ended(e.Sent)
		}
		e.Tries = try
		return nil, e
	}
}

// backoff returns the wait after the nth try to connect: anything up to a
// ceiling that doubles.
func (c *httpCall) backoff(n int) time.Duration {
	r := c.t.cfg.Retry
	return c.t.draw(min(r.BaseDelay, r.MaxDelay>>(n-1)) << (n - 1))
}

// roundTrip has net/http send one request, once.
func (c *httpCall) roundTrip(method string, u *url.URL, h http.Header, body []byte) (*http.Response, error) {
	c.asked.Store(false)
	c.got.Store(false)
	c.conn.Store(nil)
	c.last.Store(0)
	c.trips++
	r := http.Request{Method: method, URL: u, Host: u.Host, Header: h, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}
	if host := h["Host"]; len(host) > 0 {
		r.Host = host[0]
	}
	if body != nil {
		// Without GetBody net/http cannot send it twice. With a reader that
		// net/http does not know, headers and body would go out apart.
		r.Body = io.NopCloser(bytes.NewReader(body))
		r.ContentLength = int64(len(body))
	}
	resp, err := c.t.roundTrip(r.WithContext(c.ctx))
	if err != nil {
		return nil, err
	}
	c.body, c.method, c.status = resp.Body, method, resp.StatusCode
	c.last.Store(int64(max(time.Since(c.start), 1)))
	return resp, nil
}

// Read reads the body of the reply.
func (c *httpCall) Read(p []byte) (int, error) {
	n, err := c.body.Read(p)
	if n > 0 {
		c.last.Store(int64(max(time.Since(c.start), 1)))
	}
	return n, err
}

// discard closes the last reply of a call. Before that it reads a little more, for
// a short time, so that the connection can be used again.
func (c *httpCall) discard(resp *http.Response) {
	if resp.ContentLength != 0 && c.timer.Stop() {
		c.last.Store(-1)
		c.timer.Reset(drainWait)
		c.drain(resp)
	}
	resp.Body.Close()
}

// drain reads a little more of a reply, and closes it.
func (c *httpCall) drain(resp *http.Response) {
	for range drainReads {
		if _, err := resp.Body.Read(c.rest[:]); err != nil {
			break
		}
	}
	resp.Body.Close()
}

// failure turns an error of net/http into one of ours, and says whether another
// try makes sense: nothing was sent, and it may go better.
func (c *httpCall) failure(err error) (e *TransportError, again bool) {
	if c.ctx.Err() != nil {
		return c.ended(c.sent()), false
	}
	detail, cause, final := explainHTTP(err)
	e = c.fault(ReasonDisconnected, c.sent() && detail != notTaken, detail)
	e.Err = cause
	var ne net.Error
	switch {
	case !e.Sent:
		e.Reason, again = ReasonUnavailable, !final
	case errors.As(err, &ne) && ne.Timeout():
		e.Reason = ReasonTimeout
	case detail == notHTTP:
		e.Reason = ReasonProtocol
	case detail == bigHead:
		e.Reason = ReasonLimit
	}
	return e, again
}

const (
	notHTTP  = "not HTTP"
	bigHead  = "headers over the bound"
	notTaken = "not taken by an HTTP/2 connection that ends"
)

// explainHTTP says in our words what went wrong below HTTP. It keeps the cause
// only if its text has neither the URL nor anything of the server in it, as the
// names in a certificate and a malformed status line are. A final error would
// come again at every try.
func explainHTTP(err error) (detail string, cause error, final bool) {
	var (
		unknown x509.UnknownAuthorityError
		host    x509.HostnameError
		invalid x509.CertificateInvalidError
		verify  *tls.CertificateVerificationError
		record  tls.RecordHeaderError
		dns     *net.DNSError
		sys     *os.SyscallError
		ne      net.Error
	)
	switch {
	case errors.As(err, &unknown):
		return "certificate of an unknown authority", nil, true
	case errors.As(err, &host):
		return "certificate of another host", nil, true
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "certificate expired, or not valid yet", nil, true
	case errors.As(err, &verify), errors.As(err, &invalid):
		return "certificate not accepted", nil, true
	case errors.As(err, &record):
		return "not TLS", nil, true
	case errors.As(err, &dns):
		return "", dns, false
	case errors.As(err, &sys):
		return "", sys.Err, false // "connection refused"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "", io.ErrUnexpectedEOF, false
	case errors.As(err, &ne) && ne.Timeout():
		return "connection timed out", nil, false
	case strings.Contains(err.Error(), "malformed HTTP"): // net/http has no types for these
		return notHTTP, nil, false
	case strings.Contains(err.Error(), "response headers exceeded"):
		return bigHead, nil, false
	case strings.Contains(err.Error(), "net/http: cannot rewind body after connection loss"),
		strings.Contains(err.Error(), "http2: Transport: cannot retry err [") && !strings.Contains(err.Error(), "PROTOCOL_ERROR"):
		return notTaken, nil, false // not begun; or GOAWAY or REFUSED_STREAM, which say: not run (RFC 9113, 8.7)
	case strings.Contains(err.Error(), "net/http: invalid header"):
		return "a header is not valid", nil, true
	}
	return "connection failed", nil, false
}

// call sends the request and waits for its answer.
func (c *httpCall) call() error {
	c.id = c.t.lastID.Add(1)
	n := len(c.req.Params) + len(c.req.Method) + 64
	var body []byte
	if n < smallestSpare {
		body = appendRequest(make([]byte, 0, n), c.id, c.req.Method, c.req.Params)
	} else {
		c.sentBody = c.t.kept.take(n)
		body = appendRequest(*c.sentBody, c.id, c.req.Method, c.req.Params)
		*c.sentBody = body
	}
	if c.old != nil {
		return c.callOld(body)
	}
	resp, err := c.post(body)
	if err != nil {
		return err
	}
	switch media := mediaType(resp.Header); {
	case resp.StatusCode == http.StatusAccepted, resp.StatusCode == http.StatusNoContent:
		c.discard(resp)
		return c.statusFault("accepted without an answer")
	case media == "application/json":
		err = c.readJSON(resp)
	case media == "text/event-stream":
		err = c.follow(resp)
	default:
		err = c.badMedia(resp, media)
	}
	if err == nil && c.req.Method == "initialize" {
		id := resp.Header.Get("Mcp-Session-Id")
		if len(id) > maxToken || !carried(id) || strings.Contains(id, " ") {
			return c.statusFault("session id out of range")
		}
		c.t.adopt(id)
	}
	return err
}

// send posts a message that has no answer.
func (c *httpCall) send(body []byte) error {
	resp, err := c.post(body)
	switch {
	case err != nil:
	case c.id != 0: // there is an answer to come, elsewhere
		timer := time.AfterFunc(drainWait, func() { resp.Body.Close() })
		c.drain(resp)
		timer.Stop()
	default:
		c.discard(resp)
	}
	return err
}

// post posts a message; the reply has a 2xx status.
func (c *httpCall) post(body []byte) (*http.Response, error) {
	if len(body) > c.t.limit {
		return nil, c.tooBig(false)
	}
	u := c.t.url
	if c.old != nil {
		u = c.old.post
	}
	resp, err := c.do(http.MethodPost, u, c.header(*c.t.postHead), body)
	if err == nil && resp.StatusCode/100 != 2 {
		return nil, c.refused(resp)
	}
	return resp, err
}

// statusFault is a reply that is not protocol.
func (c *httpCall) statusFault(detail string) *TransportError {
	e := c.fault(ReasonProtocol, true, detail)
	e.Status = c.status
	return e
}

// refused turns a reply whose status is not 2xx into an error. It is the table
// of statuses (MCP 2025-11-25, transports; RFC 9110).
func (c *httpCall) refused(resp *http.Response) error {
	e := c.statusFault("")
	switch {
	case e.Status/100 == 1: // the connection is ours now, and heeds no context
		resp.Body.Close()
		return e
	case e.Status/100 == 3:
		resp.Body.Close()
		e.Detail, e.Raw = "redirect", clip([]byte(resp.Header.Get("Location")))
		return e
	case e.Status == http.StatusUnauthorized, e.Status == http.StatusForbidden:
		resp.Body.Close()
		e.Sent = e.Status == http.StatusForbidden || c.t.o.Authorize == nil
		e.Raw = clip([]byte(challengeOf(resp)))
		return e
	}
	body := c.readError(resp)
	e.Raw = clip(body)
	switch {
	case e.Status == http.StatusTooManyRequests:
		e.Reason, e.Sent, e.RetryAfter = ReasonUnavailable, false, retryAfter(resp.Header) // it says: not run
		return e
	case e.Status == http.StatusRequestTimeout, e.Status == http.StatusServiceUnavailable:
		e.Reason, e.RetryAfter = ReasonUnavailable, retryAfter(resp.Header)
		return e
	case e.Status/100 == 5:
		e.Reason = ReasonUnavailable
		return e
	}
	// What is left of 4xx: the body may be a JSON-RPC error, about us or not.
	var rpc *RPCError
	env, err := scanEnvelope(body)
	if err == nil && env.err != nil && env.method == "" {
		rpc, _ = decodeError(env.err)
	}
	ours := c.isOurs(env)
	lost := e.Status == http.StatusNotFound ||
		e.Status == http.StatusBadRequest && rpc != nil && (!ours || nullID(env.id)) && rpc.Code <= -32000 && rpc.Code >= -32019
	switch {
	case c.session != "" && lost && c.method == http.MethodPost: // many have no GET at all, and say so with 404
		c.t.forget(c)
		e.Reason, e.Sent, e.Detail = ReasonDisconnected, false, "session lost"
	case rpc != nil && ours:
		rpc.Origin, rpc.Status = e.Origin, e.Status
		return rpc
	}
	return e
}

// badMedia is a reply that is neither JSON nor a stream: a proxy's error page,
// a login form.
func (c *httpCall) badMedia(resp *http.Response, media string) error {
	e := c.statusFault("unknown media type")
	e.Raw = clip(c.readError(resp))
	if len(e.Raw) == 0 {
		e.Detail = "empty body"
	} else if slices.Contains(knownMedia, media) {
		e.Detail = media // the server's words, but of our list
	}
	return e
}

// readError reads the body of a reply that is an error anyway, as far as that is
// worth the wait.
func (c *httpCall) readError(resp *http.Response) []byte {
	timer := time.AfterFunc(errorBodyWait, func() { resp.Body.Close() })
	defer timer.Stop()
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(c, errorBodyBytes))
	return bytes.TrimPrefix(body, []byte(byteOrderMark))
}

// readJSON reads a reply that is one message, or a batch.
func (c *httpCall) readJSON(resp *http.Response) error {
	if err := c.readBody(resp.ContentLength); err != nil {
		return err
	}
	body := bytes.TrimPrefix(*c.buf, []byte(byteOrderMark))
	err := c.dispatch(body)
	if c.done {
		return c.failed
	}
	e := c.statusFault("no answer")
	e.Raw = clip(body)
	switch {
	case len(bytes.TrimSpace(body)) == 0:
		e.Detail = "empty body"
	case err != nil && resp.ContentLength < 0 && len(resp.TransferEncoding) == 0 && !resp.Uncompressed && resp.ProtoMajor == 1:
		// Such a body ends where the connection does, wherever that is.
		e.Reason, e.Detail = ReasonDisconnected, "incomplete body"
	case err != nil:
		e.Detail = "not JSON-RPC"
	case c.foreign:
		e.Detail = "answer to another request"
	}
	return e
}

// readBody reads a whole body into c.buf.
func (c *httpCall) readBody(length int64) error {
	if length > int64(c.t.limit) {
		return c.tooBig(true)
	}
	c.buf = c.t.kept.take(int(min(max(length+1, 512), believedLength)))
	for {
		b := *c.buf
		if len(b) == cap(b) {
			b = c.t.kept.grow(b, 2*cap(b))
			*c.buf = b
		}
		n, err := c.Read(b[len(b):min(cap(b), c.t.limit+1)])
		*c.buf = b[:len(b)+n]
		switch {
		case len(b)+n > c.t.limit:
			return c.tooBig(true)
		case err == io.EOF:
			return nil
		case err != nil:
			e, _ := c.failure(err)
			e.Sent = true
			return e
		}
	}
}

// dispatch cuts what came into messages: responses are taken, the rest goes to
// the Inbound.
func (c *httpCall) dispatch(b []byte) error {
	if c.id != 0 && !c.done && c.req.settle(b, c.id) {
		c.done = true
		return nil
	}
	if elems, ok := cutBatch(b); ok {
		var first error
		for _, b := range elems {
			first = cmp.Or(first, c.dispatch(b))
		}
		return first
	}
	env, err := scanEnvelope(b)
	switch {
	case err != nil:
		return err
	case env.method == "" && (env.result == nil) == (env.err == nil):
		return errSyntax
	case env.method == "":
		c.take(env)
	case env.id == nil:
		c.t.notified(env.method, bytes.Clone(env.params))
	case !nullID(env.id):
		c.t.inbox.take(env, c.answering(env.method))
	}
	return nil
}

// cutBatch cuts a batch (MCP 2025-03-26) into its messages.
func cutBatch(b []byte) ([]json.RawMessage, bool) {
	if b = bytes.TrimLeft(b, " \t\r\n"); len(b) == 0 || b[0] != '[' {
		return nil, false
	}
	return scanBatch(b)
}

// isOurs reports whether a response answers this call. An error without an id is
// about a request that the server could not read: on HTTP, the one it replies to.
func (c *httpCall) isOurs(env envelope) bool {
	n, ok := intID(env.id)
	return ok && n == c.id || env.err != nil && nullID(env.id)
}

func nullID(id json.RawMessage) bool { return len(id) == 0 || string(id) == "null" }

// take takes a response, if it is the answer to this call. What it keeps lies in
// the bytes that were read.
func (c *httpCall) take(env envelope) {
	switch {
	case c.id == 0:
		if c.old != nil {
			c.old.take(env)
		}
	case c.done:
	case !c.isOurs(env):
		c.foreign = true
	case env.err == nil && c.req.to == nil:
		c.result, c.done = env.result, true
	case env.err == nil:
		c.failed, c.done = c.req.to.receive(env.result), true
	default:
		c.done = true
		rpc, err := decodeError(env.err)
		if err != nil {
			e := c.statusFault("not a JSON-RPC error")
			e.Raw = clip(env.err)
			c.failed = e
			return
		}
		rpc.Origin, rpc.Status = Origin{Server: c.t.cfg.Name, Op: c.req.Method}, c.status
		c.failed = rpc
	}
}

// follow reads a stream of events until the answer to this call, and picks the
// stream up where it broke, if the revision allows. A call that waits for no
// answer follows the server's own stream, as long as there is one.
func (c *httpCall) follow(resp *http.Response) error {
	r := &c.events
	r.retry = -1
	floor := time.Duration(0) // of the wait; once, the server's word is enough
	for tries := 0; ; tries++ {
		var err error
		if resp != nil {
			if c.buf == nil {
				c.buf = c.t.kept.take(4 << 10)
			}
			*r = eventReader{r: c, max: c.t.limit, kept: c.t.kept.spares, buf: (*c.buf)[:0], id: r.id, retry: r.retry}
			buf := c.buf
			c.buf = nil // should a receiver panic: what it was is not ours any more, once it has grown
			heard, err := c.readEvents()
			*buf, c.buf = r.buf, buf
			if c.done {
				c.discard(resp)
				return c.failed
			}
			resp.Body.Close()
			if err != nil && c.id != 0 {
				return err
			}
			if heard {
				tries = 0
			}
			if len(r.id) > maxToken || !carried(r.id) {
				r.id = "" // nothing that a header could say
			}
		}
		if c.id != 0 && (!c.resumable() || r.id == "" || tries >= resumeTries) {
			if c.foreign && c.ctx.Err() == nil {
				return c.statusFault("answer to another request")
			}
			return c.lostStream()
		}
		if resp != nil || tries > 0 {
			if !c.sleep(max(c.t.reconnectAfter(r.retry, tries), floor)) {
				return c.lostStream()
			}
			floor = reconnectFloor
		}
		if resp, err = c.openStream(r.id); err != nil && !passing(err) {
			return c.lostStream()
		}
	}
}

// readEvents dispatches what a stream brings until the answer to this call, or the
// end of the stream, which is no error. heard reports whether there was anything.
// Where others depend on a stream, what cannot be read is skipped.
func (c *httpCall) readEvents() (heard bool, err error) {
	id := c.events.id
	for {
		name, data, err := c.events.next()
		if err == errTooBig {
			return heard, c.tooBig(true)
		}
		if err != nil {
			return heard || c.events.id != id, nil
		}
		if len(data) == 0 || name != "" && name != message {
			continue
		}
		heard = true
		err = c.dispatch(data)
		if c.done {
			return heard, nil
		}
		if err != nil && c.id != 0 {
			e := c.statusFault("event is not JSON-RPC")
			e.Raw = clip(data)
			return heard, e
		}
	}
}

// lostStream is the error of a stream that ended before the answer.
func (c *httpCall) lostStream() error {
	if c.ctx.Err() != nil {
		return c.ended(true)
	}
	return c.fault(ReasonDisconnected, true, "stream ended before the answer")
}

// resumable reports whether the revision has streams that can be picked up.
func (c *httpCall) resumable() bool {
	return c.req.Version == version2511 || c.req.Version == version2506 || c.req.Version == version2503
}

// reconnectAfter returns how long to wait before a stream is asked for again,
// after n tries that brought no event: never less than the server's retry.
func (t *HTTPTransport) reconnectAfter(retry time.Duration, n int) time.Duration {
	d := retry
	if retry < 0 {
		d = reconnectDelay
	}
	if n > 0 {
		d = max(d, min(reconnectDelay<<min(n, 10), reconnectCap))
	}
	return d + t.draw(d/8)
}

// passing reports whether a stream that could not be had may be had later.
func passing(err error) bool {
	var e *TransportError
	return errors.As(err, &e) && (e.Reason == ReasonUnavailable || e.Reason == ReasonDisconnected && e.Status == 0)
}

// openStream asks for a stream of events: the server's own, or the rest of one
// that broke after the event lastID.
func (c *httpCall) openStream(lastID string) (*http.Response, error) {
	h := c.header(*c.t.getHead)
	if lastID != "" {
		h["Last-Event-Id"] = []string{lastID}
	}
	resp, err := c.do(http.MethodGet, c.t.url, h, nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, c.refused(resp)
	}
	if media := mediaType(resp.Header); media != "text/event-stream" {
		return nil, c.badMedia(resp, media)
	}
	return resp, nil
}

// cancelRemote tells the server, after err, that nobody waits any more. Closing
// the stream says so since 2026-07-28; before, it takes a notification.
func (c *httpCall) cancelRemote(err error) {
	var e *TransportError
	if c.modern() || c.req.Method == "initialize" || !errors.As(err, &e) || !e.Sent ||
		e.Reason != ReasonTimeout && e.Reason != ReasonCancelled {
		return
	}
	select {
	case c.t.farewells <- struct{}{}:
	default:
		return // so many at once: the server does not listen anyway
	}
	bye, berr := c.t.begin(context.Background(), &Request{
		Method: farewell, Version: c.req.Version, conn: c.number, Deadline: time.Now().Add(farewellWait),
	}, false)
	go func() { // ends by its deadline; Close waits for it
		defer func() { <-c.t.farewells }()
		if berr == nil {
			defer bye.end()
			params := append(strconv.AppendInt([]byte(`{"requestId":`), c.id, 10), '}')
			_ = bye.send(appendNotification(nil, farewell, params))
		}
	}()
}

// notified passes a notification on, after it has withdrawn the request of the
// server's that it cancels.
func (t *HTTPTransport) notified(method string, params json.RawMessage) {
	if method == farewell {
		if id := member(params, "requestId"); id != nil {
			t.inbox.withdraw(id)
		}
	}
	if t.in.Notify != nil {
		t.in.Notify(method, params)
	}
}

// answering returns how an answer is posted to a request that the server made in
// a reply to c: in the same session, or not at all.
func (c *httpCall) answering(method string) func(context.Context, []byte) {
	t, req := c.t, Request{Method: method, Version: c.req.Version, conn: c.number}
	return func(ctx context.Context, answer []byte) {
		req.Deadline = time.Now().Add(replyWait)
		if p, err := t.begin(ctx, &req, false); err == nil {
			defer p.end()
			_ = p.send(answer)
		}
	}
}

// maybeOld reports whether the refusal of initialize may come from a server of
// 2024-11-05, which has another way in.
func maybeOld(err error) bool {
	var rpc *RPCError
	if errors.As(err, &rpc) {
		return rpc.Status/100 == 4 && (rpc.Code < -32022 || rpc.Code > -32020)
	}
	var e *TransportError
	return errors.As(err, &e) && e.Status/100 == 4 && e.Reason == ReasonProtocol &&
		e.Status != http.StatusUnauthorized && e.Status != http.StatusForbidden
}

// An oldStream is a connection of 2024-11-05: a stream on which everything
// comes, and an address to which everything is posted.
type oldStream struct {
	post *url.URL
	gone chan struct{} // closed when the stream has ended

	mu      sync.Mutex // guards pending
	pending map[int64]chan envelope
}

// take hands an answer to the call that waits for it.
func (s *oldStream) take(env envelope) {
	n, _ := intID(env.id)
	s.mu.Lock()
	answer := s.pending[n]
	delete(s.pending, n)
	s.mu.Unlock()
	if answer != nil {
		env.result, env.err = bytes.Clone(env.result), bytes.Clone(env.err)
		answer <- env
	}
}

// callOldest opens a stream of 2024-11-05 and makes the call over it. If there is
// no such stream, the error is refusal, the one that led here.
func (c *httpCall) callOldest(refusal error) error {
	g, err := c.t.begin(context.Background(), &Request{Method: c.req.Method, Stream: true}, false)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(c.ctx, func() { g.cancel(endClosed) }) // ends before we return
	post, err := g.openOld()
	if !stop() {
		g.end()
		return c.ended(true)
	}
	if err == nil {
		c.old = &oldStream{post: post, gone: make(chan struct{}), pending: make(map[int64]chan envelope)}
		g.old = c.old
		go g.followOld() // ended by Close, or with the stream; Close waits for it
		if err = c.call(); err == nil {
			c.t.adopt("")
		}
		return err
	}
	g.end()
	var e, second *TransportError
	if errors.As(refusal, &e) && errors.As(err, &second) {
		e.Detail = "POST refused, and GET: " + string(second.Reason)
		if second.Status != 0 {
			e.Detail = "POST refused, and GET: HTTP status " + strconv.Itoa(second.Status)
		}
		if second.Detail != "" {
			e.Detail += " (" + second.Detail + ")"
		}
	}
	return refusal
}

// callOld posts a request and waits for its answer on the stream.
func (c *httpCall) callOld(body []byte) error {
	s, answer := c.old, make(chan envelope, 1)
	s.mu.Lock()
	s.pending[c.id] = answer
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.pending, c.id)
		s.mu.Unlock()
	}()
	if err := c.send(body); err != nil {
		return err
	}
	c.last.Store(0) // the wait is for the stream, which may be silent
	select {
	case env := <-answer:
		c.take(env)
		return c.failed
	case <-s.gone:
		return c.fault(ReasonDisconnected, true, "stream ended before the answer")
	case <-c.ctx.Done():
		return c.ended(true)
	}
}

// followOld reads a stream of 2024-11-05 to its end.
func (c *httpCall) followOld() {
	t, s := c.t, c.old
	t.mu.Lock()
	t.old = s
	t.mu.Unlock()
	_, _ = c.readEvents()
	t.mu.Lock()
	if t.old == s {
		t.old = nil
		t.loseLocked()
	}
	t.mu.Unlock()
	close(s.gone)
	c.end()
}

// openOld opens a stream of 2024-11-05, whose first event says where to post.
func (c *httpCall) openOld() (*url.URL, error) {
	if _, err := c.openStream(""); err != nil {
		return nil, err
	}
	c.events = eventReader{r: c, max: c.t.limit}
	name, data, err := c.events.next()
	if err != nil || name != "endpoint" {
		return nil, c.statusFault("no endpoint event")
	}
	post, err := c.t.url.Parse(string(data))
	if err != nil || post.Scheme != c.t.url.Scheme || post.Host != c.t.url.Host {
		// Credentials go where the operator said, nowhere else.
		return nil, c.statusFault("endpoint on another origin")
	}
	post.User = nil
	return post, nil
}

// An eventReader reads a stream of events (WHATWG HTML, 9.2). It holds one event
// at a time, and not more than max bytes of it.
type eventReader struct {
	r     io.Reader
	max   int
	kept  *spares       // where longer buffers come from; may be nil
	id    string        // the last event id, as of the last whole event
	retry time.Duration // the server's word on reconnecting; -1 if none

	err      error
	buf      []byte
	pos, end int  // buf[pos:end] is not parsed yet
	scanned  int  // and has no line end before this
	from, to int  // buf[from:to] is the data of the event in hand
	hasData  bool // which may be empty
	begun    bool // the byte order mark has been looked for
	skipLF   bool // the last line ended in CR
}

var errTooBig = errors.New("event over the bound")

const (
	message    = "message" // the type of an event that does not say another
	eventSlack = 64        // what a line has beside its data
)

// next returns the type and the data of the next event that has data. Both the
// data and whatever a caller cut out of it are good until the next call.
func (r *eventReader) next() (name string, data []byte, err error) {
	r.from, r.to, r.hasData = 0, 0, false
	id := r.id
	for {
		line, err := r.line()
		if err != nil {
			return "", nil, err
		}
		if len(line) == 0 {
			r.id = id
			if r.hasData {
				return name, r.buf[r.from:r.to], nil
			}
			name = ""
			continue
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) { // empty for a comment
		case "data":
			if !r.hasData {
				r.to = r.pos - 1 // where the line ended
				r.from, r.hasData = r.to-len(value), true
			} else {
				r.buf[r.to] = '\n'
				r.to += 1 + copy(r.buf[r.to+1:], value)
			}
			if r.to-r.from > r.max {
				return "", nil, errTooBig
			}
		case "event":
			if name = message; string(value) != message {
				name = string(value)
			}
		case "id":
			if bytes.IndexByte(value, 0) < 0 {
				id = string(value)
			}
		case "retry":
			if ms, err := strconv.ParseUint(string(value), 10, 31); err == nil {
				r.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
}

// line returns the next line, without its end: LF, CR or both.
func (r *eventReader) line() ([]byte, error) {
	for {
		if r.skipLF && r.pos < r.end {
			r.skipLF = false
			if r.buf[r.pos] == '\n' {
				r.pos++
			}
			r.scanned = max(r.scanned, r.pos)
		}
		if i := lineEnd(r.buf[r.scanned:r.end]); i >= 0 {
			i += r.scanned
			line := r.buf[r.pos:i]
			r.skipLF = r.buf[i] == '\r'
			r.pos, r.scanned = i+1, i+1
			if !r.begun {
				r.begun = true
				line = bytes.TrimPrefix(line, []byte(byteOrderMark))
			}
			return line, nil
		}
		r.scanned = r.end
		if err := r.fill(); err != nil {
			return nil, err
		}
	}
}

// fill reads more, and makes room for it first: the data in hand and the line
// that has begun move to the front, and the buffer grows if they fill half of it.
func (r *eventReader) fill() error {
	if r.err != nil {
		return r.err
	}
	if r.end == len(r.buf) {
		n := copy(r.buf, r.buf[r.from:r.to])
		m := copy(r.buf[n:], r.buf[r.pos:r.end])
		if n+m >= r.max+eventSlack {
			return errTooBig
		}
		r.scanned -= r.pos - n
		r.from, r.to, r.pos, r.end = 0, n, n, n+m
		if size := min(max(4<<10, 2*(n+m)), r.max+eventSlack); size > len(r.buf) {
			if size > cap(r.buf) {
				r.buf = r.kept.grow(r.buf[:r.end], size)
			}
			r.buf = r.buf[:min(cap(r.buf), r.max+eventSlack)]
		}
	}
	n, err := r.r.Read(r.buf[r.end:])
	r.end += n
	r.err = err
	if n > 0 {
		return nil
	}
	return err
}

// lineEnd returns the index of the first CR or LF in b, or -1. It looks in steps,
// so that a stream of many lines that end in CR is not searched for an LF from
// each of them to its end.
func lineEnd(b []byte) int {
	const step = 1 << 10
	for from := 0; from < len(b); from += step {
		part := b[from:min(from+step, len(b))]
		lf := bytes.IndexByte(part, '\n')
		if lf >= 0 {
			part = part[:lf]
		}
		if cr := bytes.IndexByte(part, '\r'); cr >= 0 {
			return from + cr
		}
		if lf >= 0 {
			return from + lf
		}
	}
	return -1
}

// A countedConn knows how many bytes were written to it.
type countedConn struct {
	net.Conn
	written atomic.Int64
	spare   func() bool // keeps the end of the transport from closing it
}

// Close closes the connection.
func (c *countedConn) Close() error { c.spare(); return c.Conn.Close() }

// Write writes to the connection, and counts.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// mediaType returns the media type of a reply, in lower case and without
// parameters.
func mediaType(h http.Header) string {
	v := h.Get("Content-Type")
	if v == "application/json" || v == "text/event-stream" {
		return v
	}
	media, _, _ := mime.ParseMediaType(v) // bad parameters leave the type
	return media
}

// knownMedia are types that proxies, login pages and broken servers send; an
// error may name them.
var knownMedia = []string{
	"text/html", "text/plain", "text/xml", "text/css", "text/javascript", "application/xml", "application/xhtml+xml",
	"application/problem+json", "application/octet-stream", "application/javascript", "application/x-ndjson", "application/soap+xml",
}

// retryAfter reads Retry-After, in seconds or as a date, which is measured by the
// server's own clock. What makes no sense counts as nothing.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if s, err := strconv.ParseUint(v, 10, 63); err == nil {
		if s > math.MaxInt64/uint64(time.Second) {
			return 0
		}
		return time.Duration(s) * time.Second
	}
	at, err := http.ParseTime(v)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return max(at.Sub(now), 0)
}

// encodeHeaderValue encodes a value for the headers that mirror a message (MCP
// 2026-07-28, transports): as it is if HTTP carries it unchanged, Base64 if not.
func encodeHeaderValue(s string) string {
	const head, tail = "=?base64?", "?="
	plain := strings.TrimSpace(s) == s && !(strings.HasPrefix(s, head) && strings.HasSuffix(s, tail))
	for i := 0; plain && i < len(s); i++ {
		plain = s[i] >= ' ' && s[i] <= '~'
	}
	if plain {
		return s
	}
	// As in the message, what is not UTF-8 becomes U+FFFD, byte by byte.
	return head + base64.StdEncoding.EncodeToString([]byte(string([]rune(s)))) + tail
}

// carried reports whether HTTP carries s unchanged as a header value.
func carried(s string) bool {
	return strings.TrimSpace(s) == s && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

// challengeOf returns what a 401 or 403 asks for.
func challengeOf(resp *http.Response) string {
	return strings.Join(resp.Header.Values("Www-Authenticate"), ", ")
}
