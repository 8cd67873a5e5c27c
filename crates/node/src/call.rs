//! The state of one guest call: its output, its tools, its limits, and the ways to end it.
//!
//! It is host state of the lease, so none of it outlives a call. The guest's imports run on its
//! thread, and JavaScript is reached by events.
//!
//! Promises: a wait for a tool ends with its answer, or within a tick of the moment when the call
//! reaches a limit. A guest that prints faster than JavaScript reads waits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use afresh::wasm::wasmtime;
use afresh::wasm::{GuestOptions, Limiter, Watch};
use afresh_interpreter::{
    Commands, DisplayedResults, HostCallbacks, Stream, imports, listener, state,
};
use serde::Deserialize;

use crate::mailbox::{Event, EventKind, Mailbox};
use crate::threads;

/// Maximum time of a slice of background work. The program itself ends it after a twentieth of
/// that.
const MAX_SLICE: Duration = Duration::from_secs(1);
/// Time between two looks at the limits of a call that waits.
const TICK: Duration = Duration::from_millis(5);
/// Memory of output that waits for JavaScript, beyond which the guest waits.
const MAX_PENDING_OUTPUT: usize = 1 << 20;

/// Ends calls from elsewhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[derive(Default)]
struct ToolAnswer {
    /// The number of the tool call that waits.
    expected: u32,
    answer: Option<Vec<u8>>,
}

/// One operation that JavaScript began.
pub(crate) struct Call {
    pub(crate) number: u32,
    pub(crate) stop: Stop,
    mailbox: Arc<Mailbox>,
    tool: Mutex<ToolAnswer>,
    answered: Condvar,
    pending_output: Arc<AtomicUsize>,
}

impl Call {
    pub(crate) fn new(number: u32, mailbox: Arc<Mailbox>) -> Self {
        Self {
            number,
            stop: Stop::default(),
            mailbox,
            tool: Mutex::default(),
            answered: Condvar::new(),
            pending_output: Arc::default(),
        }
    }

    fn send(&self, kind: EventKind, detail: u32, bytes: Vec<u8>) {
        let (number, text) = (self.number, String::new());
        let mut event = Event { number, kind, detail, text, bytes, pending: None };
        if kind == EventKind::Output {
            self.pending_output.fetch_add(event.cost(), Ordering::AcqRel);
            event.pending = Some(Arc::clone(&self.pending_output));
        }
        self.mailbox.send(event);
    }

    /// Sends output; whether there is room for more.
    pub(crate) fn print(&self, stream: u32, bytes: &[u8]) -> bool {
        self.send(EventKind::Output, stream, bytes.to_vec());
        self.has_room()
    }

    /// Whether JavaScript has taken enough output.
    pub(crate) fn has_room(&self) -> bool {
        self.pending_output.load(Ordering::Acquire) <= MAX_PENDING_OUTPUT
    }

    /// The answer to a tool call, unless nothing waits for it any more.
    pub(crate) fn reply(&self, number: u32, answer: Vec<u8>) {
        let mut tool = self.tool.lock().unwrap_or_else(PoisonError::into_inner);
        if tool.expected == number {
            tool.answer = Some(answer);
            self.answered.notify_all();
        }
    }

    /// Calls a tool, and waits while `proceeds`; `None` if the call has to end.
    fn call_tool(&self, request: &[u8], mut proceeds: impl FnMut() -> bool) -> Option<Vec<u8>> {
        let lock = || self.tool.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tool = lock();
        tool.expected = tool.expected.wrapping_add(1);
        tool.answer = None;
        let number = tool.expected;
        drop(tool);
        self.send(EventKind::Tool, number, request.to_vec());
        loop {
            let waited =
                self.answered.wait_timeout_while(lock(), TICK, |tool| tool.answer.is_none());
            let mut tool = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(answer) = tool.answer.take() {
                return Some(answer);
            }
            drop(tool);
            if !proceeds() {
                let mut tool = lock();
                // A late answer is dropped.
                tool.expected = tool.expected.wrapping_add(1);
                return None;
            }
        }
    }
}

/// Why a call was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Timeout,
    Stopped,
}

/// The limits of a call.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Limits {
    /// Maximum milliseconds.
    pub(crate) timeout: Option<f64>,
    /// Maximum milliseconds of CPU time.
    pub(crate) cpu: Option<f64>,
    /// Maximum bytes of guest memory.
    pub(crate) memory: Option<usize>,
    /// Maximum bytes kept of each stream.
    pub(crate) output: usize,
}

impl Limits {
    fn until(&self) -> Option<Instant> {
        // A limit beyond the last moment never ends a call.
        let timeout = Duration::try_from_secs_f64(self.timeout? / 1e3).ok()?;
        Instant::now().checked_add(timeout)
    }

    fn cpu_time(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.cpu? / 1e3).ok()
    }
}

/// One call's own.
#[derive(Default)]
pub(crate) struct CallState {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// Whether output was dropped.
    pub(crate) truncated: bool,
    /// Bytes of output that were dropped.
    dropped: u64,
    /// Results that code displayed.
    pub(crate) displayed: DisplayedResults,
    /// Whether the pages that differ after the call are counted.
    counts_pages: bool,
    cpu_time: Option<Duration>,
    pub(crate) reason: Option<Reason>,
    output: usize,
    memory: Option<usize>,
    until: Option<Instant>,
    stops: Vec<Stop>,
    call: Option<Arc<Call>>,
    /// Whether output is sent while the guest runs.
    streams: bool,
    /// The commands of a Linux sandbox.
    commands: Option<Commands>,
    /// No limit is looked at until then.
    until_checked: Option<Instant>,
}

impl CallState {
    /// For the next call.
    pub(crate) fn begin(limits: &Limits, call: &Arc<Call>, session: Stop, streams: bool) -> Self {
        Self {
            output: limits.output,
            memory: limits.memory,
            cpu_time: limits.cpu_time(),
            until: limits.until(),
            stops: vec![call.stop.clone(), session],
            call: Some(Arc::clone(call)),
            streams,
            ..Self::default()
        }
    }

    /// The same, with the pages counted that differ after the call.
    pub(crate) fn counting_pages(self, counts_pages: bool) -> Self {
        Self { counts_pages, ..self }
    }

    /// The same, in a sandbox with these commands.
    pub(crate) fn with_commands(self, commands: Option<Commands>) -> Self {
        Self { commands, ..self }
    }

    /// A slice of background work, which ends by itself in time unless the program keeps it from
    /// that.
    pub(crate) fn slice(stops: Vec<Stop>, commands: Commands) -> Self {
        Self {
            stops,
            commands: Some(commands),
            until_checked: Some(Instant::now() + MAX_SLICE),
            ..Self::default()
        }
    }

    /// Whether the call is within its limits; otherwise keeps the reason.
    fn proceeds(&mut self) -> bool {
        if self.until_checked.is_some_and(|until| Instant::now() < until) {
            return true;
        }
        self.reason = if self.stops.iter().any(Stop::is_set) {
            Some(Reason::Stopped)
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Some(Reason::Timeout)
        } else {
            return true;
        };
        false
    }

    fn keep(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        let (number, kept) = match stream {
            // Only commands have terminals.
            Stream::Stdout | Stream::Terminal => (1, &mut self.stdout),
            Stream::Stderr => (2, &mut self.stderr),
        };
        let room = self.output.saturating_sub(kept.len());
        kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
        self.dropped += bytes.len().saturating_sub(room) as u64;
        self.truncated |= room < bytes.len();
        let Some(call) = self.call.clone().filter(|_| self.streams) else { return Ok(()) };
        if call.print(number, bytes) {
            return Ok(());
        }
        threads::wait(|| {
            while !call.has_room() {
                if !self.proceeds() {
                    return Err(ended());
                }
                std::thread::sleep(TICK);
            }
            Ok(())
        })
    }
}

/// The error that ends a call at a limit; the reason is kept.
fn ended() -> wasmtime::Error {
    wasmtime::Error::msg("the call reached a limit while it waited for its host")
}

impl HostCallbacks for CallState {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.keep(stream, bytes)
    }

    fn commands(&self) -> Option<&Commands> {
        self.commands.as_ref()
    }

    fn display(&mut self, result: &[u8]) -> wasmtime::Result<()> {
        if !self.displayed.take(result) {
            self.dropped += result.len() as u64;
            self.truncated = true;
        }
        Ok(())
    }

    fn cpu_time_limit(&self) -> Option<Duration> {
        self.cpu_time
    }

    fn counts_pages(&self) -> bool {
        self.counts_pages
    }

    fn dropped_bytes(&self) -> u64 {
        self.dropped
    }

    fn proceeds(&mut self) -> bool {
        Self::proceeds(self)
    }

    fn call(&mut self, request: &[u8]) -> wasmtime::Result<Vec<u8>> {
        if !self.proceeds() {
            return Err(ended());
        }
        let Some(call) = self.call.clone() else {
            return Err(wasmtime::Error::msg("the host offers no functions here"));
        };
        threads::wait(|| call.call_tool(request, || self.proceeds())).ok_or_else(ended)
    }
}

/// The options of every Wasm guest. `warm_up` ends its warm-up.
pub(crate) fn guest_options(warm_up: &Stop) -> GuestOptions {
    let warm_up = warm_up.clone();
    GuestOptions {
        imports: imports::<CallState>(),
        state: state(move || CallState { stops: vec![warm_up.clone()], ..CallState::default() }),
        limiter: Limiter::of_total(|host| listener::<CallState>(host).memory),
        watch: Watch::new(|host| listener::<CallState>(host).proceeds()),
        ..GuestOptions::default()
    }
}
