// Calls an export of a module by wago, each call in a new instance: answers each line "EXPORT
// COUNT" with the nanoseconds that the calls took.
package main

import (
	"bufio"
	"fmt"
	"os"
	"time"

	"github.com/wago-org/wago"
)

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	source, err := os.ReadFile(os.Args[1])
	fail(err)
	module, err := wago.Compile(source)
	fail(err)
	imports := wago.Imports{
		"wasi_snapshot_preview1.sched_yield": wago.HostFunc(
			func(_ wago.HostModule, _, results []uint64) { results[0] = wago.I32(0) }),
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var export string
		var count int
		_, err := fmt.Sscan(lines.Text(), &export, &count)
		fail(err)
		start := time.Now()
		for i := 0; i < count; i++ {
			instance, err := wago.Instantiate(module, imports)
			fail(err)
			_, err = instance.Invoke(export)
			fail(err)
			instance.Close()
		}
		fmt.Println(time.Since(start).Nanoseconds())
	}
}
