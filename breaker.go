package mcp

// BreakerState is the state of a server's breaker.
type BreakerState int

const (
	BreakerClosed   BreakerState = iota // calls go through
	BreakerOpen                         // calls are refused
	BreakerHalfOpen                     // one probe may go, or is out
)

func (s BreakerState) String() string {
	return [...]string{"closed", "open", "half_open"}[s]
}
