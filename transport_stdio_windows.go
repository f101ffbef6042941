package mcp

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"
	"unsafe"
)

var (
	kernel32           = syscall.NewLazyDLL("kernel32.dll")
	createJob          = kernel32.NewProc("CreateJobObjectW")
	setJobInformation  = kernel32.NewProc("SetInformationJobObject")
	getJobInformation  = kernel32.NewProc("QueryInformationJobObject")
	assignProcessToJob = kernel32.NewProc("AssignProcessToJobObject")
	terminateJob       = kernel32.NewProc("TerminateJobObject")
	resumeProcess      = syscall.NewLazyDLL("ntdll.dll").NewProc("NtResumeProcess")
)

// A tree is a process and what it has started: here, a job, which ends when we
// do, however that comes about. The child starts suspended and runs once it is
// in the job, so that nothing that it starts stays outside.
type tree struct {
	job syscall.Handle // 0 if there is none
}

// prepare is called before the start.
func (t *tree) prepare(cmd *exec.Cmd) {
	const createSuspended, createNewProcessGroup = 0x004, 0x200 // a Ctrl-C is ours, not the child's
	cmd.SysProcAttr = &syscall.SysProcAttr{HideWindow: true, CreationFlags: createSuspended | createNewProcessGroup}
}

// adopt is called after the start. A child that cannot be put into a job has
// none; one that cannot be resumed is killed.
func (t *tree) adopt(p *os.Process) {
	const terminate, setQuota, suspendResume = 0x0001, 0x0100, 0x0800
	h, err := syscall.OpenProcess(terminate|setQuota|suspendResume, false, uint32(p.Pid))
	if err != nil {
		p.Kill()
		return
	}
	defer syscall.CloseHandle(h)
	t.job = newJob()
	if ok, _, _ := assignProcessToJob.Call(uintptr(t.job), uintptr(h)); ok == 0 && t.job != 0 {
		syscall.CloseHandle(t.job)
		t.job = 0
	}
	if status, _, _ := resumeProcess.Call(uintptr(h)); int32(status) < 0 {
		p.Kill()
	}
}

// newJob returns a job that ends with its last handle, or 0.
func newJob() syscall.Handle {
	const extendedLimits, killOnJobClose = 9, 0x2000
	job, _, _ := createJob.Call(0, 0)
	var info [14 + 4*(^uintptr(0)>>63)]uint64 // JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	info[2] = killOnJobClose                  // LimitFlags, after two LARGE_INTEGERs
	ok, _, _ := setJobInformation.Call(job, extendedLimits, uintptr(unsafe.Pointer(&info)), unsafe.Sizeof(info))
	if ok == 0 && job != 0 {
		syscall.CloseHandle(syscall.Handle(job))
		job = 0
	}
	return syscall.Handle(job)
}

// terminate asks the tree to end. There is no such signal.
func (t *tree) terminate(p *os.Process) error { return errors.ErrUnsupported }

// kill ends the tree. It is called when p has ended, or must. The processes of
// a job end some time after they were told to; kill waits for that.
func (t *tree) kill(p *os.Process) {
	p.Kill()
	if t.job == 0 {
		return
	}
	terminateJob.Call(uintptr(t.job), 1)
	for until := time.Now().Add(stdioSweep); t.running() && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	syscall.CloseHandle(t.job)
	t.job = 0
}

// running reports whether a process of the job is left.
func (t *tree) running() bool {
	const basicAccounting, activeProcesses = 1, 10
	var info [12]uint32 // JOBOBJECT_BASIC_ACCOUNTING_INFORMATION
	ok, _, _ := getJobInformation.Call(uintptr(t.job), basicAccounting, uintptr(unsafe.Pointer(&info)), unsafe.Sizeof(info), 0)
	return ok != 0 && info[activeProcesses] > 0
}

// gone reports whether nothing is left of the tree. It is called when p has
// been reaped.
func (t *tree) gone(p *os.Process) bool { return true }
