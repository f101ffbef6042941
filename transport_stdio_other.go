//go:build !unix && !windows

package mcp

import (
	"errors"
	"os"
	"os/exec"
)

// A tree is a process and what it has started: here, the process alone, since
// the system has no way to name the rest that we could use.
type tree struct{}

// prepare is called before the start.
func (tree) prepare(cmd *exec.Cmd) {}

// adopt is called after the start.
func (tree) adopt(p *os.Process) {}

// terminate asks the tree to end.
func (tree) terminate(p *os.Process) error { return errors.ErrUnsupported }

// kill ends the tree. It is called when p has ended, or must.
func (tree) kill(p *os.Process) { p.Kill() }

// gone reports whether nothing is left of the tree. It is called when p has
// been reaped.
func (tree) gone(p *os.Process) bool { return true }
