package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

func init() { children["held"] = heldChild }

// heldChild is a server that never answers. It holds a connection for as long
// as it lives.
func heldChild(args []string) int {
	c, err := net.Dial("tcp", args[0])
	if err != nil {
		return 1
	}
	defer c.Close()
	time.Sleep(time.Minute) // deaf to the end of its stdin
	return 0
}

// fleetProgram builds testdata/fleet, as it is copied into a container.
func fleetProgram(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("builds a program")
	}
	if _, err := os.Stat("testdata/fleet"); err != nil {
		t.Skip("no testdata/fleet: the package was copied without it")
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command in PATH to build testdata/fleet with")
	}
	program := filepath.Join(t.TempDir(), "fleet")
	if runtime.GOOS == "windows" {
		program += ".exe"
	}
	cmd := exec.Command(tool, "build", "-o", program, "./testdata/fleet")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOPROXY=off", "GOTOOLCHAIN=local")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build ./testdata/fleet: %v\n%s", err, out)
	}
	return program
}

// runFleet runs the program and returns what it wrote, and its exit status.
func runFleet(t *testing.T, argv ...string) (stdout, stderr string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%q: %v", argv, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func TestFleetProgram(t *testing.T) {
	program := fleetProgram(t)
	file := func(t *testing.T, text string) string {
		name := filepath.Join(t.TempDir(), "servers.json")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	quotedProgram, _ := json.Marshal(program)
	clock := `{"name":"clock","command":[` + string(quotedProgram) + `,"serve"]}`

	for _, tt := range []struct {
		name   string
		config string // none for the demonstration
		args   []string
		status int
		stdout []string
		stderr []string
	}{{
		name: "demonstration",
		stdout: []string{
			"clock     stdio      ready", "handbook  http       ready", "weather   http       degraded",
			"add_days", "handbook-lookup", `The tools of server "weather" are not available`,
			"| 2028-03-01", "| Ask two weeks ahead.", "UNKNOWN_TOOL", "tools/call ok",
		},
	}, {
		name:   "call",
		config: `[` + clock + `]`,
		args:   []string{"-call", "add_days", "-args", `{"date":"2027-12-31","days":1}`},
		stdout: []string{"| 2028-01-01"},
	}, {
		name:   "call that fails",
		config: `[` + clock + `]`,
		args:   []string{"-call", "add_days", "-args", `{"date":"2027-12-31"}`},
		status: 1,
		stdout: []string{"INVALID_ARGUMENTS"},
	}, {
		name:   "required server missing, all shown",
		config: `{"mcpServers":{"gone":{"command":"/does/not/exist"},"clock":{"command":` + string(quotedProgram) + `,"args":["serve"]}}}`,
		status: 1,
		stdout: []string{"MISSING: gone", "To do: check that the command exists", "clock   stdio      ready",
			"A required server is missing"},
	}, {
		name:   "optional server missing",
		config: `[` + clock + `,{"name":"gone","command":["/does/not/exist"],"required":false}]`,
		stdout: []string{"DEGRADED: gone", "NOTICE"},
	}, {
		name:   "child that ends, with its last words",
		config: `[{"name":"loud","command":[` + string(quotedProgram) + `,"-nonsense"]}]`,
		status: 1,
		stdout: []string{`server "loud": `, "disconnected: exit status 2", "in its own words", "| flag provided but not defined: -nonsense"},
	}, {
		name:   "all problems of a file",
		config: `[{"name":"a b","command":["x"]},{"name":"c","comand":["x"]},{"name":"d","endpoint":"ftp://h/"}]`,
		status: 2,
		stderr: []string{`server "a b": name`, `did you mean "command"?`, `server "d": endpoint`},
	}, {
		name:   "no server",
		config: `[]`,
		status: 2,
		stderr: []string{"declares no server"},
	}, {
		name:   "arguments that are none",
		args:   []string{"-args", "[1]"},
		status: 2,
		stderr: []string{"-args is not a JSON object"},
	}} {
		t.Run(tt.name, func(t *testing.T) {
			argv := append([]string{program}, tt.args...)
			if tt.config != "" {
				argv = append(argv, "-config", file(t, tt.config))
			}
			stdout, stderr, status := runFleet(t, argv...)
			if status != tt.status {
				t.Errorf("exit status %d, want %d", status, tt.status)
			}
			for _, w := range tt.stdout {
				if !strings.Contains(stdout, w) {
					t.Errorf("stdout lacks %q", w)
				}
			}
			for _, w := range tt.stderr {
				if !strings.Contains(stderr, w) {
					t.Errorf("stderr lacks %q", w)
				}
			}
			if tt.stderr == nil && stderr != "" {
				t.Error("stderr is not empty, though it is no terminal")
			}
			if t.Failed() {
				t.Logf("stdout:\n%s\nstderr:\n%s", stdout, stderr)
			}
		})
	}

	t.Run("json", func(t *testing.T) {
		stdout, _, status := runFleet(t, program, "-json")
		var r struct {
			OK      bool
			Servers []struct {
				Name, State string
				Health      struct{ Calls int }
			}
			Notice string
			Calls  []struct{ Result, Error string }
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
			t.Fatalf("status %d, %v in\n%s", status, err, stdout)
		}
		if !r.OK || len(r.Servers) != 3 || r.Servers[2].State != "degraded" || r.Servers[0].Health.Calls == 0 || len(r.Calls) != 3 || r.Calls[1].Result == "" {
			t.Errorf("got %+v", r)
		}
	})

	t.Run("alone in a root directory", func(t *testing.T) {
		chroot, err := exec.LookPath("chroot")
		if err != nil || os.Getuid() != 0 || runtime.GOOS != "linux" {
			t.Skip("needs chroot and root on linux")
		}
		stdout, stderr, status := runFleet(t, chroot, filepath.Dir(program), "/"+filepath.Base(program))
		if status != 0 || !strings.Contains(stdout, "| 2028-03-01") {
			t.Errorf("exit status %d\n%s%s", status, stdout, stderr)
		}
	})

	t.Run("interrupt", func(t *testing.T) {
		if runtime.GOOS == "windows" {
			t.Skip("an interrupt cannot be sent to a single process on windows")
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		config, _ := json.Marshal([]any{map[string]any{
			"name": "held", "command": []string{self, l.Addr().String()}, "env": map[string]string{childEnv: "held"},
		}})
		cmd := exec.Command(program, "-config", file(t, string(config)))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill() // in case of a failure below
		l.(*net.TCPListener).SetDeadline(time.Now().Add(20 * time.Second))
		c, err := l.Accept()
		if err != nil {
			t.Fatalf("the child did not start: %v", err)
		}
		defer c.Close()
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if got := cmd.ProcessState.ExitCode(); got != 130 {
			t.Errorf("exit status %d, want 130", got)
		}
		c.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the child has outlived the program")
		}
	})
}
