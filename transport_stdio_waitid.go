//go:build linux

package mcp

import (
	"os"
	"syscall"
)

// await blocks until p has ended, without reaping it, and reports whether it
// could. As long as p is not reaped, the number of its group is not used again.
func (tree) await(p *os.Process) bool {
	const pid = 1 // P_PID
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pid, uintptr(p.Pid), 0, syscall.WEXITED|syscall.WNOWAIT, 0, 0)
		if errno != syscall.EINTR {
			return errno == 0
		}
	}
}
