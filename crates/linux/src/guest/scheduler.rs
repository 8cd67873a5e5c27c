//! The scheduler of a guest: its threads take turns in the one thread that the guest has.
//!
//! Promises: a round over all threads ends at the deadline of the call, however many they are and
//! whatever they wait for. May break it: a reason to wait whose check looks at more than
//! [`WaitReason::looks`](crate::sentry::WaitReason) counts.

use std::time::{Duration, Instant};

use afresh_sys::host::thread_cpu_time;

use super::time_slice::{CpuTimes, TimeSlice};
use super::{CpuBudget, Guest, StopReason};
use crate::sentry::{FIRST, ReadySets};
use crate::subprocess::Subprocess;

/// Maximum wait for an interrupted process, which enters the stub as soon as it runs.
const INTERRUPT_WAIT: Duration = Duration::from_millis(4);
/// Minimum time slice of a thread.
const MOMENT: Duration = Duration::from_micros(50);
/// Maximum time slice that follows a long search for a thread.
const MAX_SEARCH: Duration = Duration::from_millis(100);

/// Descriptors, interests and connections that a round looks at before it checks the deadline, and
/// those of one more thread.
const LOOKS_PER_CHECK: usize = 1 << 10;

/// The outcome of a round over all threads.
#[derive(Debug)]
pub(super) enum NextThread {
    /// A process and its thread that may run.
    Thread(u32, u32),
    /// All threads wait.
    Nothing,
    /// The guest stops before the round is over.
    Halt(StopReason),
}

fn cpu_times(body: &Subprocess) -> Option<CpuTimes> {
    Some(CpuTimes { guest: body.process.cpu_time()?, sentry: thread_cpu_time() })
}

impl Guest {
    /// Whether the guest has to stop: time is up, or the caller ends the call.
    pub(crate) fn halt(&mut self, deadline: Instant) -> Option<StopReason> {
        if Instant::now() >= deadline {
            return Some(StopReason::Late);
        }
        if self.has_used_cpu_time() {
            return Some(StopReason::CpuTime);
        }
        if self.proceeds() { None } else { Some(StopReason::Unheard) }
    }

    /// Sets the CPU time limit of the call that begins now.
    pub(crate) fn set_cpu_time_limit(&mut self, limit: Option<Duration>) {
        if limit.is_some() {
            // Earlier time of the process does not belong to it.
            self.body.process.bill();
        }
        self.cpu = CpuBudget::new(limit);
    }

    /// Whether the call has used its CPU time.
    pub(super) fn has_used_cpu_time(&mut self) -> bool {
        if !self.cpu.is_due() {
            return false;
        }
        self.body.process.bill();
        self.cpu.is_over()
    }

    /// Whether other threads, an alarm or the caller have waited for long enough. A thread that
    /// makes calls without pause is never late otherwise.
    pub(crate) fn turn_is_over(&mut self) -> bool {
        let taken = self.turn.elapsed();
        if taken < self.search.max(MOMENT) || self.sentry.state.is_alone() {
            return false;
        }
        let rings = self.sentry.state.rings_at();
        rings.is_some_and(|at| at <= self.sentry.now()) || self.slice_is_over()
    }

    /// Whether the thread has used its time slice.
    fn slice_is_over(&mut self) -> bool {
        let Self { slice, body, .. } = self;
        slice.is_over(|| cpu_times(body))
    }

    /// Whether a thread whose turn was to end now runs on, because the guest has waited for a
    /// processor.
    pub(super) fn turn_lasts(&mut self, deadline: Instant) -> bool {
        !self.sentry.state.is_alone()
            && !self.slice_is_over()
            && self.turn_due(deadline) > Instant::now()
    }

    /// The end of the running thread's time, from which on it is interrupted.
    pub(super) fn turn_ends(&self, deadline: Instant) -> Instant {
        // An interrupted process gets a moment to enter the stub.
        let wait = if self.body.process.is_interrupted() { INTERRUPT_WAIT } else { MOMENT };
        self.turn_due(deadline).max(Instant::now() + wait).min(deadline)
    }

    /// The end of the running thread's time: after its slice, or when the alarm expires.
    fn turn_due(&self, deadline: Instant) -> Instant {
        let state = &self.sentry.state;
        let now = Instant::now();
        if state.is_alone() {
            let is_polled = self.sentry.streams.is_polled() || self.body.inside.shows_contents();
            return match is_polled {
                true => deadline.min(now + self.poll),
                false => deadline,
            };
        }
        let mut ends = self.slice.lasts_until();
        if let Some(at) = state.rings_at() {
            ends = ends.min(now + Duration::from_nanos(at.saturating_sub(self.sentry.now())));
        }
        ends = ends.max(self.turn + self.search);
        if let Some(left) = state.processor_left() {
            ends = ends.min(now + Duration::from_nanos(left));
        }
        if let Some(rests) = self.rests {
            ends = ends.min(rests);
        }
        ends.min(deadline)
    }

    /// Begins the turn of the thread that was found. Its minimum is the time of the search. Where
    /// threads wait for many descriptors, a search can exceed a whole turn, and the thread would
    /// make only one call before the next search.
    pub(super) fn begin_turn(&mut self) {
        let now = Instant::now();
        self.search = now.duration_since(self.turn).min(MAX_SEARCH);
        self.turn = now;
    }

    /// Begins the time slice of a thread of the current process.
    pub(crate) fn begin_slice(&mut self) {
        // Nothing waits for the end of the slice of a thread that is alone.
        let is_alone = self.sentry.state.is_alone();
        let before = if is_alone { None } else { cpu_times(&self.body) };
        self.slice = TimeSlice::new(before);
    }

    /// Finds the process and the thread that may run. Expired timers send their signals.
    pub(super) fn find(&mut self, now: u64, deadline: Instant) -> NextThread {
        loop {
            // Between two answers of a round only signals change, and their sets are asked anew.
            let (mut sets, mut stopped, mut checked) = (ReadySets::default(), false, 0);
            let single = self.sentry.state.processes.is_single();
            let members = if single { vec![FIRST] } else { self.sentry.state.processes.in_turn() };
            for member in members {
                if !single {
                    self.sentry.change().switch_to(member);
                }
                self.sentry.ring(now);
                stopped |= self.heed_stops();
                for id in self.sentry.threads_in_turn() {
                    if self.sentry.is_ready(id, now, &mut sets) {
                        return NextThread::Thread(member, id);
                    }
                    if sets.looks() - checked < LOOKS_PER_CHECK {
                        continue;
                    }
                    checked = sets.looks();
                    if let Some(halt) = self.halt(deadline) {
                        return NextThread::Halt(halt);
                    }
                }
            }
            // A stopped process was the last, and its parent may run now.
            if single || !stopped {
                return NextThread::Nothing;
            }
        }
    }

    /// Stops the current process on a pending signal; returns whether it did.
    fn heed_stops(&mut self) -> bool {
        let stops = self.sentry.state.is_to_stop();
        if stops {
            self.sentry.change().heed_stops();
        }
        stops
    }
}
