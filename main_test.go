package mcp

import (
	"fmt"
	"os"
	"testing"
)

// childEnv names the behaviour that a re-executed test binary takes on: the
// test binary is its own child server, so that tests need no other program.
const childEnv = "MCP_TEST_CHILD"

// children are the behaviours. Each gets the arguments after argv[0] and
// returns the exit status.
var children = map[string]func(args []string) int{
	"case":            caseChild,
	"case-grandchild": caseGrandchild,
	"contract":        contractChild,
	"puppet":          puppetChild,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child, ok := children[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "no child behaviour %q\n", name)
			os.Exit(2)
		}
		os.Exit(child(os.Args[1:]))
	}
	os.Exit(m.Run())
}
