package mcp

import (
	"net"
	"os"
	"os/exec"
	"testing"
	"time"
)

// What a child starts in its first moments is in its job too, since it does
// nothing before it is.
func TestTreeFromTheStart(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, l.Addr().String())
	cmd.Env = append(os.Environ(), childEnv+"=double")
	var tr tree
	tr.prepare(cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer tr.kill(cmd.Process)
	l.(*net.TCPListener).SetDeadline(time.Now().Add(time.Second))
	if _, err := l.Accept(); err == nil {
		t.Fatal("the child ran before it was in the job")
	}
	tr.adopt(cmd.Process)
	if tr.job == 0 {
		t.Fatal("no job")
	}
	l.(*net.TCPListener).SetDeadline(time.Now().Add(10 * time.Second))
	conn, err := l.Accept()
	if err != nil {
		t.Fatalf("the child does not run: %v", err)
	}
	defer conn.Close()
	r := relative{life: conn}
	r.report(t)
	if !tr.running() {
		t.Error("the job is empty")
	}
	tr.kill(cmd.Process)
	wantEnded(t, r)
}
