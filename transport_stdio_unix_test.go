//go:build unix

package mcp

import (
	"bufio"
	"encoding/json"
	"os"
	"syscall"
	"testing"
	"time"
)

func init() { children["deserter"] = deserterChild }

// deserterChild leaves its process group for that of its parent, and answers
// nothing, not even the end of stdin.
func deserterChild([]string) int {
	group, err := syscall.Getpgid(os.Getppid())
	if err == nil {
		err = syscall.Setpgid(0, group)
	}
	if err != nil {
		return 1
	}
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	os.Stdout.WriteString(line) // we are there
	time.Sleep(time.Minute)
	return 0
}

// TestStdioDeserter has a child that is no longer in the group that is to end.
func TestStdioDeserter(t *testing.T) {
	t.Parallel()
	cfg := stdioConfig(t)
	cfg.Env[childEnv] = "deserter"
	heard := make(chan struct{})
	tr := openStdio(t, cfg, nil, Inbound{Notify: func(string, json.RawMessage) { close(heard) }})
	if err := tr.Notify(t.Context(), &Request{Method: "hello"}); err != nil {
		t.Fatal(err)
	}
	<-heard
	if err := tr.Close(); err != nil {
		t.Error(err)
	}
	if code, ok := tr.ExitCode(); !ok || code != -1 {
		t.Errorf("ExitCode() = %d, %v want -1, true", code, ok)
	}
}
