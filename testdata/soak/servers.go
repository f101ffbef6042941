package main

// The servers, and what goes wrong with them. Each notes that a call has run
// before anything can keep it from saying so: a child appends a line to a file,
// which survives it, and an endpoint keeps a list.

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"resilient/mcp"
)

func marksFile(dir string, index int) string {
	return filepath.Join(dir, "server"+strconv.Itoa(index))
}

// serve is a child: its arguments are the directory, its index, the seed and
// the window.
func serve(args []string) int {
	if len(args) != 5 {
		return 2
	}
	index, err1 := strconv.Atoi(args[1])
	seed, err2 := strconv.ParseUint(args[2], 10, 64)
	from, err3 := strconv.ParseInt(args[3], 10, 64)
	until, err4 := strconv.ParseInt(args[4], 10, 64)
	if errors.Join(err1, err2, err3, err4) != nil {
		return 2
	}
	w := window{time.Unix(0, from), time.Unix(0, until)}
	if index < 0 { // a grandchild that nothing moves, and that holds the pipes
		signal.Ignore(syscall.SIGTERM, os.Interrupt)
		time.Sleep(time.Until(w.until.Add(20 * time.Second)))
		return 0
	}
	marks, err := os.OpenFile(marksFile(args[0], index), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 1
	}
	// Another life, other misfortunes: what is in the file so far tells them apart.
	age, err := marks.Seek(0, io.SeekEnd)
	if err != nil {
		return 1
	}
	if _, err := marks.WriteString("start\n"); err != nil {
		return 1
	}
	d := &dice{window: w, r: rand.New(rand.NewPCG(seed+uint64(index), uint64(age)))}
	if d.one(4) {
		c := exec.Command(os.Args[0], "serve", args[0], "-1", args[2], args[3], args[4])
		c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
		c.Start() // if it fails there is one mishap less
	}
	go func() { // the end of the process is its end too
		for {
			time.Sleep(d.between(500, 6000))
			if d.open() {
				die()
			}
		}
	}()
	s := &mcp.FaultyServer{Tools: tools, Handler: func(ctx context.Context, c *mcp.Call) (*mcp.Result, error) {
		id, err := idOf(c)
		if err != nil {
			return nil, err
		}
		if d.one(400) {
			os.Exit(3) // before it has run
		}
		if _, err := marks.WriteString(id + "\n"); err != nil {
			return nil, err
		}
		switch {
		case d.one(400):
			os.Exit(3) // after
		case d.one(50):
			pause(ctx, d.between(100, 900))
		case d.one(200):
			return nil, &mcp.RPCError{Code: -32603, Message: "out of luck"}
		}
		return done(id), nil
	}}
	if s.Serve(&lazyReader{os.Stdin, d}, &badWriter{os.Stdout, d}) != nil {
		return 1
	}
	return 0
}

// die ends this process without a word, as the system does when it is out of
// memory.
func die() {
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		p.Kill()
	}
}

// A lazyReader stops reading now and then.
type lazyReader struct {
	r io.Reader
	*dice
}

func (l *lazyReader) Read(p []byte) (int, error) {
	if l.one(300) {
		time.Sleep(l.between(100, 1000))
	}
	return l.r.Read(p)
}

// A badWriter spoils messages. Each Write is one.
type badWriter struct {
	w io.Writer
	*dice
}

func (b *badWriter) Write(p []byte) (int, error) {
	n := len(p)
	switch {
	case b.one(100):
		p = slices.Concat([]byte("DEBUG: [connection] {\"level\": 3}\n"), p)
	case b.one(200):
		p = slices.Concat(p[:n/2], []byte("\n"))
	case b.one(200):
		p = bytes.Replace(p, []byte(`"id":`), []byte(`"id":77`), 1) // nobody's
	case b.one(200):
		return n, nil
	case b.one(200):
		p = slices.Concat(p, p)
	case b.one(2000):
		p = append(bytes.Repeat([]byte("x"), 2<<20), '\n')
	case b.one(400):
		b.w.Write(p[:n/2])
		die()
	case b.one(200):
		b.w.Write(p[:n/2])
		time.Sleep(b.between(10, 600))
		p = p[n/2:]
	}
	if _, err := b.w.Write(p); err != nil {
		return 0, err
	}
	return n, nil
}

// A web is an endpoint.
type web struct {
	*dice
	addr    string
	faulty  *mcp.FaultyServer
	quit    chan struct{}
	ended   sync.WaitGroup
	outages int // not read before stop

	listMu sync.Mutex // guards list
	list   []string
}

func newWeb(index int, seed uint64, w window) (*web, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	web := &web{
		dice: &dice{window: w, r: rand.New(rand.NewPCG(seed+uint64(index), 0))},
		addr: l.Addr().String(),
		quit: make(chan struct{}),
	}
	web.faulty = &mcp.FaultyServer{Tools: tools, Handler: web.mark, Sessions: true, SSE: index%4 == 3}
	web.ended.Go(func() { web.live(l) })
	return web, nil
}

// live serves, with outages, until stop.
func (w *web) live(l net.Listener) {
	for {
		srv := &http.Server{Handler: w, ErrorLog: log.New(io.Discard, "", 0)}
		w.ended.Go(func() { srv.Serve(l) })
		for up := true; up; {
			select {
			case <-w.quit:
				srv.Close()
				return
			case <-time.After(w.between(1000, 5000)):
				up = !w.open()
			}
		}
		srv.Close()
		w.faulty.ForgetSessions()
		w.outages++
		time.Sleep(w.between(50, 700))
		for { // the port may have gone to a connection of somebody's for a moment
			var err error
			if l, err = net.Listen("tcp", w.addr); err == nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func (w *web) stop() {
	close(w.quit)
	w.ended.Wait()
}

func (w *web) marks() []string {
	w.listMu.Lock()
	defer w.listMu.Unlock()
	return w.list
}

// mark runs a call.
func (w *web) mark(ctx context.Context, c *mcp.Call) (*mcp.Result, error) {
	id, err := idOf(c)
	if err != nil {
		return nil, err
	}
	w.listMu.Lock()
	w.list = append(w.list, id)
	w.listMu.Unlock()
	switch {
	case w.one(100):
		panic(http.ErrAbortHandler) // it has run, and nobody hears of it
	case w.one(50):
		pause(ctx, w.between(100, 900))
	case w.one(200):
		return nil, &mcp.RPCError{Code: -32603, Message: "out of luck"}
	}
	return done(id), nil
}

func (w *web) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	status := func(code int) {
		out.WriteHeader(code)
		io.WriteString(out, http.StatusText(code))
	}
	switch {
	case w.one(100): // a reset, before anything is read
		if c, _, err := http.NewResponseController(out).Hijack(); err == nil {
			if t, ok := c.(*net.TCPConn); ok {
				t.SetLinger(0)
			}
			c.Close()
		}
		return
	case w.one(100):
		status(http.StatusServiceUnavailable)
		return
	case w.one(200):
		out.Header().Set("Retry-After", "0")
		status(http.StatusTooManyRequests)
		return
	case w.one(200):
		out.Header().Set("Content-Type", "text/html")
		io.WriteString(out, "<title>Sign in</title>")
		return
	case w.one(200):
		http.Redirect(out, r, "/elsewhere", http.StatusTemporaryRedirect)
		return
	case w.one(1000):
		w.faulty.ForgetSessions()
	case w.one(100): // the answer stops in its middle
		out = &cutWriter{out, w.number(150)}
	}
	w.faulty.ServeHTTP(out, r)
}

// A cutWriter breaks the connection after so many bytes.
type cutWriter struct {
	http.ResponseWriter
	left int
}

func (c *cutWriter) Write(p []byte) (int, error) {
	if len(p) <= c.left {
		c.left -= len(p)
		return c.ResponseWriter.Write(p)
	}
	c.ResponseWriter.Write(p[:c.left])
	http.NewResponseController(c.ResponseWriter).Flush()
	panic(http.ErrAbortHandler)
}

func (c *cutWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }
