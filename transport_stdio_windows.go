package mcp

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"unsafe"
)

// A tree is a process and what it has started: here, a job, which ends when we
// do, however that comes about. What the child starts before it is put into
// the job, right after its own start, stays outside.
type tree struct {
	job syscall.Handle // 0 if there is none
}

// prepare is called before the start.
func (t *tree) prepare(cmd *exec.Cmd) {
	const createNewProcessGroup = 0x200 // a Ctrl-C is ours, not the child's
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: createNewProcessGroup}
}

// adopt is called after the start.
func (t *tree) adopt(p *os.Process) {
	const (
		killOnJobClose = 0x2000
		extendedLimits = 9
		terminate      = 0x0001
		setQuota       = 0x0100
	)
	kernel := syscall.NewLazyDLL("kernel32.dll")
	job, _, _ := kernel.NewProc("CreateJobObjectW").Call(0, 0)
	if job == 0 {
		return
	}
	// JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	var info struct {
		perProcessUserTime, perJobUserTime int64
		limitFlags                         uint32
		minWorkingSet, maxWorkingSet       uintptr
		activeProcesses                    uint32
		affinity                           uintptr
		priorityClass, schedulingClass     uint32
		_                                  [4 - 4*(^uintptr(0)>>63)]byte // C aligns the next to 8, Go on 386 to 4
		io                                 [6]uint64
		processMemory, jobMemory           uintptr
		peakProcessMemory, peakJobMemory   uintptr
	}
	info.limitFlags = killOnJobClose
	ok, _, _ := kernel.NewProc("SetInformationJobObject").Call(job, extendedLimits, uintptr(unsafe.Pointer(&info)), unsafe.Sizeof(info))
	h, err := syscall.OpenProcess(terminate|setQuota, false, uint32(p.Pid))
	if err == nil {
		if ok != 0 {
			ok, _, _ = kernel.NewProc("AssignProcessToJobObject").Call(job, uintptr(h))
		}
		syscall.CloseHandle(h)
	}
	if ok == 0 || err != nil {
		syscall.CloseHandle(syscall.Handle(job))
		return
	}
	t.job = syscall.Handle(job)
}

// terminate asks the tree to end. There is no such signal.
func (t *tree) terminate(p *os.Process) error { return errors.ErrUnsupported }

// kill ends the tree. It is called when p has ended, or must.
func (t *tree) kill(p *os.Process) {
	p.Kill()
	if t.job != 0 {
		syscall.CloseHandle(t.job) // the last handle: it takes all with it
		t.job = 0
	}
}

// gone reports whether nothing is left of the tree. It is called when p has
// been reaped.
func (t *tree) gone(p *os.Process) bool { return true }
