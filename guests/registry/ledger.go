// A ledger as Go's own compiler builds it, and as TinyGo does: maps on a collected heap, and a goroutine that is alive between
// calls. TinyGo recovers from no panic, so that nothing here may need it: `fmt.Sscan` does.
//
// Requests are a verb and a number: "pay 7", "sum", "grow 20" (MiB that are kept), "panic", "random", "collect".
package main

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"unsafe"
)

const accounts = 20000

type request struct {
	verb   string
	number int
	answer chan string
}

var (
	input    []byte
	output   []byte
	requests = make(chan request)
	balances map[string]int
	kept     [][]byte
	random   = rand.New(rand.NewPCG(1, 2))
)

// The one that owns the balances: it waits for requests, in this call and in the next.
func clerk() {
	served := 0
	for asked := range requests {
		served++
		switch asked.verb {
		case "pay":
			balances[fmt.Sprintf("account-%d", asked.number)] += 1_000_000
		case "grow":
			kept = append(kept, make([]byte, asked.number<<20))
		case "collect":
			for range 4 {
				kept = append(kept[:0], make([]byte, 4<<20))
				runtime.GC()
			}
		case "panic":
			panic("as it was told")
		case "random":
			asked.answer <- fmt.Sprint(random.Uint64())
			continue
		}
		sum := 0
		for _, balance := range balances {
			sum += balance
		}
		asked.answer <- fmt.Sprintf("%d %d", served, sum)
	}
}

//go:wasmexport warm
func warm() {
	balances = make(map[string]int)
	for n := range accounts {
		balances[fmt.Sprintf("account-%d", n)] = n
	}
	go clerk()
	runtime.Gosched()
}

// The runtime's own seeds are of the warm state, and the same in every clone.
//
//go:wasmexport afresh_reseed
func reseed(low, high int64) {
	random = rand.New(rand.NewPCG(uint64(low), uint64(high)))
}

//go:wasmexport afresh_buffer
func buffer(length int32) int32 {
	input = make([]byte, max(length, 1))
	return int32(uintptr(unsafe.Pointer(&input[0])))
}

//go:wasmexport handle
func handle(length int32) int64 {
	verb, rest, _ := strings.Cut(string(input[:length]), " ")
	number, _ := strconv.Atoi(rest)
	answer := make(chan string)
	requests <- request{verb, number, answer}
	output = []byte(<-answer)
	return int64(uintptr(unsafe.Pointer(&output[0])))<<32 | int64(len(output))
}

func main() {}
