//! Calls whose output is received while the program writes it: all of it, or what is not part of
//! the answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use afresh_snapshot::{OutputSource, OutputStream};

use super::Instance;
use crate::StopHandle;
use crate::error::CallError;
use crate::sentry::{LogSink, OutputSink, OutputSinks};

impl Instance {
    /// The time limit of a call.
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.limits.time
    }

    /// Sets the time limit of further calls. States of the program do not hold it.
    pub fn set_time_limit(&mut self, limit: Duration) {
        self.limits.time = limit;
    }

    /// The CPU time limit of a call, if it has one.
    #[must_use]
    pub fn cpu_time_limit(&self) -> Option<Duration> {
        self.limits.cpu_time
    }

    /// Sets the CPU time limit of the following calls: that of all processes of the program, and of
    /// the thread that serves their system calls. Waits do not count. It is not part of the
    /// program's state.
    pub fn set_cpu_time_limit(&mut self, limit: Option<Duration>) {
        self.limits.cpu_time = limit;
    }

    /// A handle that stops the calls of this instance from another thread, until the next reset.
    #[must_use]
    pub fn stop_handle(&mut self) -> StopHandle {
        self.limits.stop.get_or_insert_default().clone()
    }

    /// As [`Instance::call`]. `log` receives output that is not part of the answer when the program
    /// writes it: its standard error, and the standard output of a program that is called through a
    /// port. The program waits while `log` runs. `log` must bound the output that it keeps, because
    /// no limit of the call counts it. If the call is repeated in a new process, its output is
    /// logged again.
    ///
    /// # Errors
    /// As [`Instance::call`].
    pub fn call_logged(
        &mut self,
        request: &[u8],
        log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        self.stats.calls += 1;
        let log = Arc::new(Mutex::new(log));
        let sinks = || {
            let log = Arc::clone(&log);
            let log = LogSink(Box::new(move |stream, piece: &[u8]| {
                log.lock().unwrap_or_else(PoisonError::into_inner)(stream, piece);
            }));
            OutputSinks { log: Some(log), hearer: None, view: None }
        };
        self.attempt_twice(Some(request), sinks, || false)
    }

    /// As [`Instance::attempt_twice`], with a receiver of the output.
    fn attempt_heard(
        &mut self,
        request: Option<&[u8]>,
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        let heard = Arc::new(AtomicBool::new(false));
        let hear = Arc::new(Mutex::new(hear));
        let view = self.view.clone();
        let sinks = || {
            let (heard, hear) = (Arc::clone(&heard), Arc::clone(&hear));
            let hearer = OutputSink(Box::new(move |from, piece: &[u8]| {
                heard.fetch_or(!piece.is_empty(), Ordering::Relaxed);
                hear.lock().unwrap_or_else(PoisonError::into_inner)(from, piece)
            }));
            OutputSinks { hearer: Some(hearer), log: None, view: view.clone() }
        };
        self.attempt_twice(request, sinks, || heard.load(Ordering::Relaxed)).map(drop)
    }

    /// As [`Instance::call`], but `hear` receives the program's output at once, piece by piece,
    /// including its messages and its writes to `/dev/host`. The program waits while `hear` runs,
    /// and its time passes; `false` ends the program. While the program writes nothing, `hear` is
    /// called with no bytes, at each [interval](crate::Program::poll_interval), to decide whether
    /// it may continue.
    ///
    /// If the program has a [slice](crate::Program::slice) of time, the call ends that long after
    /// it is answered, even if other threads or processes can run. [`Instance::proceed`] lets them.
    ///
    /// # Errors
    /// As [`Instance::call`]. The pieces so far may be half of an answer then.
    pub fn call_streaming(
        &mut self,
        request: &[u8],
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.stats.calls += 1;
        self.attempt_heard(Some(request), hear)
    }

    /// Lets the program run without a call, for a slice of time or until all of it waits: its
    /// background work. `hear` as for [`Instance::call_streaming`].
    ///
    /// # Errors
    /// As [`Instance::call`].
    pub fn proceed(
        &mut self,
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.attempt_heard(None, hear)
    }
}
