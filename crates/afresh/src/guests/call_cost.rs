//! The cost of calls.
//!
//! Promises: every kind of guest is measured the same way, and an amount that its kind does not
//! know is `None`, never 0. A call that is not measured pays nothing but the counts of its bytes: a
//! measurement makes two system calls for CPU time, which take longer than an empty call of a Wasm
//! guest. May break it: work on other threads, such as compilation or the fetching of pages, is not
//! counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use afresh_memory::thread_cpu_time;

use crate::guests::backend::process_costs;
use crate::{Answer, CallError};

/// The cost of one or several calls, measured by [`Lease::measure`](crate::Lease::measure).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallCost {
    /// Wall-clock time.
    pub wall: Duration,
    /// CPU time of the thread that runs the guest, including host functions and the sentry of a
    /// Linux program, and of the processes of a Linux program. Waits do not count. On hosts other
    /// than Linux it is zero.
    pub cpu: Duration,
    /// Peak of the memory that [`CallOptions::memory`](crate::CallOptions::memory) limits, in
    /// bytes: the memories of a Wasm guest, or what the processes of a Linux program have mapped
    /// together. `None` for a micro-VM, whose memory has one size.
    pub peak_memory: Option<u64>,
    /// Pages of 4 KiB that differ from the state to which the instance returns: the warm state, or
    /// that of a session. `None` if they are not counted
    /// ([`Lease::measure_pages`](crate::Lease::measure_pages)), and for Linux programs and
    /// micro-VMs.
    pub dirty_pages: Option<usize>,
    /// Bytes of input.
    pub input_bytes: u64,
    /// Bytes of answers, and of output that was received in a call. The output of a Wasm guest by
    /// WASI is not counted.
    pub output_bytes: u64,
    /// Bytes of output that the receiver dropped. A lease drops none. Receivers with a limit, as in
    /// the Python and npm packages, add theirs.
    pub dropped_bytes: u64,
}

/// Bytes of the calls of a lease.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallBytes {
    pub(crate) input: u64,
    pub(crate) output: u64,
}

impl CallBytes {
    /// Counts a call with so many bytes of input.
    #[inline]
    pub(crate) fn add(&mut self, input: usize, answer: &Result<Vec<u8>, CallError>) {
        self.input += input as u64;
        if let Ok(answer) = answer {
            self.output += answer.len() as u64;
        }
    }

    /// Counts a call whose output was received in pieces.
    pub(crate) fn add_streamed(&mut self, input: usize, output: &OutputCounter) {
        self.input += input as u64;
        self.output += output.0.load(Ordering::Relaxed);
    }

    /// Counts a call with arguments as text.
    pub(crate) fn add_texts(&mut self, texts: &[String], answer: &Result<Answer, CallError>) {
        self.input += texts.iter().map(|text| text.len() as u64).sum::<u64>();
        self.output += match answer {
            Ok(Answer::Bytes(bytes)) => bytes.len() as u64,
            Ok(Answer::Values(values)) => values.iter().map(|value| value.len() as u64).sum(),
            Err(_) => 0,
        };
    }
}

/// Counts pieces of output that a receiver gets on any thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputCounter(Arc<AtomicU64>);

impl OutputCounter {
    pub(crate) fn add(&self, piece: &[u8]) {
        self.0.fetch_add(piece.len() as u64, Ordering::Relaxed);
    }
}

/// A measurement of this thread that has begun.
pub(super) struct CostMeter {
    began: Instant,
    cpu: Duration,
    peak: process_costs::MemoryPeak,
}

impl CostMeter {
    /// Begins with a guest that has mapped so many bytes.
    pub(super) fn start(mapped: u64) -> Self {
        let peak = process_costs::MemoryPeak::start(mapped);
        Self {
            began: Instant::now(),
            cpu: thread_cpu_time() + process_costs::guest_cpu_time(),
            peak,
        }
    }

    /// The times, and the peak of memory that Linux programs have mapped on this thread.
    pub(super) fn stop(self) -> (CallCost, u64) {
        let cpu = (thread_cpu_time() + process_costs::guest_cpu_time()).saturating_sub(self.cpu);
        let wall = self.began.elapsed();
        (CallCost { wall, cpu, ..CallCost::default() }, self.peak.stop())
    }
}

impl CallCost {
    /// Measures work of this thread that runs a Linux program without a lease: times and the
    /// peak of memory.
    pub fn of<T>(work: impl FnOnce() -> T) -> (T, Self) {
        let meter = CostMeter::start(0);
        let result = work();
        let (cost, peak) = meter.stop();
        (result, Self { peak_memory: (peak > 0).then_some(peak), ..cost })
    }
}
