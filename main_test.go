package mcp

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// canary is in everything that the servers of the tests say in words. No text
// of ours has it.
const canary = "canary-7d1f"

// childEnv names the behaviour that a re-executed test binary takes on: the
// test binary is its own child server, so that tests need no other program.
const childEnv = "MCP_TEST_CHILD"

// children are the behaviours. Each gets the arguments after argv[0] and
// returns the exit status.
var children = map[string]func(args []string) int{
	"case":            caseChild,
	"case-grandchild": caseGrandchild,
	"contract":        contractChild,
	"faulty":          faultyChild,
	"serve":           serveChild,
	"sleep":           sleepChild,
	"double":          doubleChild,
	"puppet":          puppetChild,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child, ok := children[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "no child behaviour %q\n", name)
			os.Exit(2)
		}
		// A child that hangs on purpose is no deadlock, which is what the
		// runtime takes it for where there is no cgo. It ends with the process.
		go func() {
			for {
				time.Sleep(time.Hour)
			}
		}()
		os.Exit(child(os.Args[1:]))
	}
	code := m.Run()
	if code == 0 {
		if left := leaks(2 * time.Second); left != "" {
			fmt.Fprintf(os.Stderr, "left behind by the tests:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leaks returns what the methods of this package have started and not ended,
// after waiting for it.
func leaks(patience time.Duration) string {
	for limit := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		left := append(goroutines(), childProcesses()...)
		if len(left) == 0 || time.Now().After(limit) {
			return strings.Join(left, "\n\n")
		}
	}
}

// goroutines returns the stacks of those that methods of this package started.
func goroutines() (ours []string) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	made := "created by " + reflect.TypeFor[StdioTransport]().PkgPath() + ".(*"
	for g := range bytes.SplitSeq(buf, []byte("\n\n")) {
		if bytes.Contains(g, []byte(made)) {
			ours = append(ours, string(g))
		}
	}
	return ours
}

// childProcesses returns the children of this process, where the system tells.
func childProcesses() (left []string) {
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, task := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		for pid := range strings.FieldsSeq(string(b)) {
			stat, _ := os.ReadFile("/proc/" + pid + "/stat")
			left = append(left, "child "+pid+": "+string(stat))
		}
	}
	return left
}

// lockedBuilder is a strings.Builder for many writers.
type lockedBuilder struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
