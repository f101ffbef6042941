// The smallest client that connects over stdio or HTTP and calls one tool.
package main

import (
	"context"
	"fmt"
	"os"

	"resilient/mcp"
)

func main() {
	cfg := mcp.Config{Name: "m", Endpoint: os.Args[1]}
	if len(os.Args) > 2 {
		cfg.Command, cfg.Endpoint = os.Args[1:], ""
	}
	c, err := mcp.New(cfg, nil)
	if err != nil {
		panic(err)
	}
	defer c.Close()
	r, err := c.Call(context.Background(), &mcp.Call{Tool: "echo", Arguments: map[string]any{"text": "hi"}})
	fmt.Println(r, err)
}
