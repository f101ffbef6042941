//go:build unix

package mcp

import (
	"os"
	"os/exec"
	"syscall"
)

// A tree is a process and what it has started: here, its process group. The
// child leads a new one, so that its number is the group's. What leaves the
// group (setsid) is out of reach.
//
// The kernel's help against a parent that dies without Close, PR_SET_PDEATHSIG
// of Linux, is not used: it fires when the starting thread ends, and the Go
// runtime ends threads while the process lives.
type tree struct{}

// prepare is called before the start.
func (tree) prepare(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// adopt is called after the start.
func (tree) adopt(p *os.Process) {}

// terminate asks the tree to end.
func (tree) terminate(p *os.Process) error {
	if syscall.Kill(-p.Pid, syscall.SIGTERM) == nil {
		return nil
	}
	return p.Signal(syscall.SIGTERM) // it may have joined another group of the session, ours for one
}

// kill ends the tree. It is called when p has ended, or must.
func (tree) kill(p *os.Process) {
	syscall.Kill(-p.Pid, syscall.SIGKILL)
	p.Kill()
}

// gone reports whether nothing is left of the tree. It is called when p has
// been reaped.
func (tree) gone(p *os.Process) bool { return syscall.Kill(-p.Pid, 0) != nil }
