//go:build leaf

package resiliencebench

import (
	"sync"
	"testing"
	"time"
)

// The breaker alone, with a lock around each of its methods, as the policy holds
// it. run.sh puts a copy of it beside this file.
func BenchmarkOurs_Breaker(b *testing.B) {
	var mu sync.Mutex
	k := breaker{limit: 5, reset: 30 * time.Second}
	run(b, func() error {
		mu.Lock()
		t, ok := k.admit(1, time.Second)
		mu.Unlock()
		if !ok {
			return errFault
		}
		sink, _ = answer()
		mu.Lock()
		k.settle(t, good, 2)
		mu.Unlock()
		return nil
	})
}
