//go:build !linux

package mcp

import "os"

// await reports that p cannot be waited for without reaping it. A group that
// outlives its leader keeps its number; that an empty one's is used again
// between the reaping and the kill, microseconds later, is a risk that is
// taken. (The waitid of macOS returns for stopped processes, golang/go#19314.)
func (tree) await(p *os.Process) bool { return false }
