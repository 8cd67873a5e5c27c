//! The state of one guest call: its output, its tools, its limits, and the ways to end it.
//!
//! It is host state of the lease ([`Host::state`]), so none of it outlives a call. The guest's
//! imports run on its thread. Python's lock is taken for a tool, for streamed output, and to check
//! signals.
//!
//! Signals are looked at on the main thread only, where Python handles them, every tick of 5 ms.
//! Where other threads are busy in Python, taking the lock may take a whole tick, so signals are
//! checked less often then.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh::wasm::wasmtime;
use afresh::wasm::{Limiter, Watch};
use afresh_interpreter::{
    Commands, DisplayedResults, HostCallbacks, Stream, imports, listener, state,
};
use minicbor::{Decoder, Encoder};
use pyo3::exceptions::{PyException, PyNameError};
use pyo3::prelude::*;

use crate::error::MarshalError;
use crate::exit;
use crate::pending::Pending;
use crate::text::Utf8Decoder;
use crate::{objects, value};

/// Maximum time of a slice of background work. The program itself ends it after a twentieth of
/// that.
const MAX_SLICE: Duration = Duration::from_secs(1);

/// Ends calls from elsewhere: once set it stays so.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    stopped: AtomicBool,
    in_tool: AtomicBool,
}

impl Stop {
    pub(crate) fn set(&self) {
        self.0.stopped.store(true, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.0.stopped.store(false, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }

    /// Whether the call is in Python code (a tool, or a handler of a signal), which may itself be
    /// waiting for the end of the call.
    pub(crate) fn is_in_tool(&self) -> bool {
        self.0.in_tool.load(Ordering::Acquire)
    }

    /// Marks the call as in Python code until the guard is dropped. Python code of a tool contains
    /// that of a handler.
    fn enter_tool(&self) -> impl Drop + use<> {
        struct ToolGuard {
            flags: Arc<Flags>,
            before: bool,
        }
        impl Drop for ToolGuard {
            fn drop(&mut self) {
                self.flags.in_tool.store(self.before, Ordering::Release);
            }
        }
        let before = self.0.in_tool.swap(true, Ordering::AcqRel);
        ToolGuard { flags: Arc::clone(&self.0), before }
    }
}

/// Why a call was ended.
pub(crate) enum Reason {
    /// Its time limit.
    Timeout,
    /// Somebody stopped it.
    Stopped,
    /// An exception that no guest may catch: from a signal handler, or from an interrupted tool.
    Interrupted(PyErr),
}

/// The limits of a call.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) timeout: Option<Duration>,
    /// Maximum CPU time.
    pub(crate) cpu_time: Option<Duration>,
    /// Maximum bytes of guest memory.
    pub(crate) memory: usize,
    /// Maximum bytes kept of each stream.
    pub(crate) output: usize,
    /// Maximum bytes of Python objects made of one value.
    pub(crate) result: usize,
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
    /// Whether the pages that differ after the call are counted.
    counts_pages: bool,
    cpu_time: Option<Duration>,
    /// Results that code displayed.
    pub(crate) displayed: DisplayedResults,
    pub(crate) failures: Failures,
    pub(crate) reason: Option<Reason>,
    output: usize,
    /// Maximum bytes of Python objects made of one value.
    pub(crate) result: usize,
    memory: Option<usize>,
    until: Option<Instant>,
    stops: [Stop; 2],
    /// Called with a stream's number and the text written.
    sink: Option<Py<PyAny>>,
    /// Decoders of streamed text: a character may be split over writes.
    text: [Utf8Decoder; 2],
    /// Called with the name and the arguments of a tool, and whether the call has a time limit.
    tools: Option<Py<PyAny>>,
    signals: Signals,
    /// The commands of a Linux sandbox.
    commands: Option<Commands>,
    /// The call stays whole until then: its limits are those of its caller.
    until_checked: Option<Instant>,
}

/// Exceptions that tools raised, by number. The guest's own error names its cause by that number.
#[derive(Default)]
pub(crate) struct Failures {
    /// The most recent ones.
    recent: VecDeque<PyErr>,
    /// The number of dropped entries before those.
    dropped: usize,
}

impl Failures {
    /// Maximum exceptions kept: each holds its traceback, and all objects that are reachable from
    /// there.
    const MAX: usize = 16;

    fn add(&mut self, error: PyErr) {
        if self.recent.len() == Self::MAX {
            self.recent.pop_front();
            self.dropped += 1;
        }
        self.recent.push_back(error);
    }

    /// The number of the next one.
    fn next(&self) -> usize {
        self.dropped + self.recent.len()
    }

    pub(crate) fn get(&self, number: usize) -> Option<&PyErr> {
        self.recent.get(number.checked_sub(self.dropped)?)
    }
}

/// How the host's own code ends a call.
enum CutCause {
    /// A limit of the call was reached; its reason is kept.
    Limit,
    /// An exception that no guest may catch.
    Raised(PyErr),
}

impl From<PyErr> for CutCause {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// When signals are looked at next.
#[derive(Default)]
struct Signals {
    /// Whether this is the thread that they are handled on.
    mine: bool,
    /// Not before.
    next: Option<Instant>,
}

impl Signals {
    /// For the calling thread: the first of its process is Python's main thread.
    fn of_this_thread() -> Self {
        Self { mine: exit::is_main_thread(), next: None }
    }

    /// Runs the handlers of signals that have arrived. They may close the session of the call,
    /// which has this flag.
    fn look(&mut self, session: &Stop) -> PyResult<()> {
        let now = Instant::now();
        if !self.mine || self.next.is_some_and(|next| now < next) {
            return Ok(());
        }
        let entered = session.enter_tool();
        let result = Python::attach(|py| py.check_signals());
        drop(entered);
        // At most a tenth of the time goes to waiting for the lock.
        self.next = Some(now + now.elapsed() * 10);
        result
    }
}

impl CallState {
    /// For the next call.
    pub(crate) fn begin(
        limits: &Limits,
        sink: Option<Py<PyAny>>,
        tools: Option<Py<PyAny>>,
        stops: [Stop; 2],
    ) -> Self {
        Self {
            output: limits.output,
            result: limits.result,
            memory: Some(limits.memory),
            cpu_time: limits.cpu_time,
            until: limits.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            stops,
            sink,
            tools,
            signals: Signals::of_this_thread(),
            ..Self::default()
        }
    }

    /// The same, with the pages counted that differ after the call.
    pub(crate) fn counting_pages(self, counts_pages: bool) -> Self {
        Self { counts_pages, ..self }
    }

    /// The same, in a sandbox with these commands.
    pub(crate) fn with_commands(self, commands: Commands) -> Self {
        Self { commands: Some(commands), ..self }
    }

    /// A slice of background work, which ends by itself in time unless the program keeps it from
    /// that.
    pub(crate) fn slice(stops: [Stop; 2], commands: Commands) -> Self {
        Self {
            stops,
            commands: Some(commands),
            signals: Signals::of_this_thread(),
            until_checked: Some(Instant::now() + MAX_SLICE),
            ..Self::default()
        }
    }

    /// Whether the call is within its limits; otherwise keeps the reason.
    fn proceeds(&mut self) -> bool {
        if self.until_checked.is_some_and(|until| Instant::now() < until) && !exit::has_begun() {
            return true;
        }
        let reason = if self.stops.iter().any(Stop::is_set) || exit::has_begun() {
            Reason::Stopped
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Reason::Timeout
        } else {
            match self.signals.look(&self.stops[0]) {
                Ok(()) => return true,
                Err(error) => Reason::Interrupted(error),
            }
        };
        self.reason = Some(reason);
        false
    }

    fn keep(&mut self, stream: Stream, bytes: &[u8]) -> Result<(), CutCause> {
        let (number, kept, decoder) = match stream {
            // Only commands have terminals.
            Stream::Stdout | Stream::Terminal => (1, &mut self.stdout, &mut self.text[0]),
            Stream::Stderr => (2, &mut self.stderr, &mut self.text[1]),
        };
        let room = self.output.saturating_sub(kept.len());
        kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
        self.dropped += bytes.len().saturating_sub(room) as u64;
        self.truncated |= room < bytes.len();
        if self.sink.is_none() {
            return Ok(());
        }
        let text = decoder.decode(bytes);
        if text.is_empty() {
            return Ok(());
        }
        self.in_python(|this, py| {
            let Some(sink) = &this.sink else { return Ok(()) };
            let delivered = sink.bind(py).call1((number, text))?;
            this.settle(py, delivered).map(drop)
        })
    }

    /// Runs Python code of the host.
    fn in_python<T>(
        &mut self,
        run: impl FnOnce(&mut Self, Python<'_>) -> Result<T, CutCause>,
    ) -> Result<T, CutCause> {
        exit::park_if_finished();
        let _entered = self.stops[0].enter_tool();
        Python::attach(|py| run(self, py))
    }

    /// Waits for a result that is pending.
    fn settle<'py>(
        &mut self,
        py: Python<'py>,
        result: Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>, CutCause> {
        match result.cast::<Pending>() {
            Err(_) => Ok(result),
            Ok(pending) => pending.get().wait(py, || self.proceeds())?.ok_or(CutCause::Limit),
        }
    }

    /// Calls a tool. An exception is an answer as well, unless no guest may catch it.
    fn answer(&mut self, request: &[u8]) -> Result<Vec<u8>, CutCause> {
        self.in_python(|this, py| {
            let error = match this.call_tool(py, request) {
                Err(CutCause::Raised(error)) if error.is_instance_of::<PyException>(py) => error,
                other => return other,
            };
            let number = u32::try_from(this.failures.next()).unwrap_or(u32::MAX);
            let name = error.get_type(py).name()?.to_string();
            let message = error.value(py).str()?.to_string_lossy().into_owned();
            let mut answer = Vec::new();
            let mut out = Encoder::new(&mut answer);
            let written = (|| out.array(4)?.u8(1)?.str(&name)?.str(&message)?.u32(number)?.ok())();
            written.map_err(|error| MarshalError::new_err(error.to_string()))?;
            this.failures.add(error);
            Ok(answer)
        })
    }

    fn call_tool(&mut self, py: Python<'_>, request: &[u8]) -> Result<Vec<u8>, CutCause> {
        let broken = |error: minicbor::decode::Error| {
            MarshalError::new_err(format!("a tool's request cannot be read: {error}"))
        };
        let mut from = Decoder::new(request);
        from.array().map_err(broken)?;
        let name = from.str().map_err(broken)?;
        let mut values = objects::reader(py, from, false, self.result);
        let arguments = values.read()?;
        let Some(tools) = &self.tools else {
            let why = format!("the host offers no function {name:?}");
            return Err(PyNameError::new_err(why).into());
        };
        // Named arguments follow, from languages that have them.
        let named = match values.position() < request.len() {
            true => values.read()?,
            false => py.None().into_bound(py),
        };
        let result = tools.bind(py).call1((name, arguments, named, self.until.is_some()))?;
        let result = self.settle(py, result)?;
        let mut answer = Vec::new();
        let mut out = Encoder::new(&mut answer);
        let begun = (|| out.array(2)?.u8(0)?.ok())();
        begun.map_err(|error| MarshalError::new_err(error.to_string()))?;
        value::write(&result, &mut out, 0)?;
        Ok(answer)
    }
}

impl CallState {
    /// The error that ends the call; its reason is kept.
    fn ended(&mut self, cut: CutCause) -> wasmtime::Error {
        match cut {
            CutCause::Raised(error) => {
                self.reason = Some(Reason::Interrupted(error));
                wasmtime::Error::msg("the host's own code was interrupted")
            }
            CutCause::Limit => {
                wasmtime::Error::msg("the call reached a limit in the host's own code")
            }
        }
    }
}

impl HostCallbacks for CallState {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.keep(stream, bytes).map_err(|cut| self.ended(cut))
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
            return Err(self.ended(CutCause::Limit));
        }
        self.answer(request).map_err(|cut| self.ended(cut))
    }
}

/// The options of every Wasm guest. `stop` ends its warm-up.
pub(crate) fn guest_options(stop: Stop) -> afresh::wasm::GuestOptions {
    afresh::wasm::GuestOptions {
        imports: imports::<CallState>(),
        state: state(move || CallState {
            signals: Signals::of_this_thread(),
            result: objects::DEFAULT_RESULT,
            stops: [stop.clone(), Stop::default()],
            ..CallState::default()
        }),
        limiter: Limiter::of_total(|host| listener::<CallState>(host).memory),
        watch: Watch::new(|host| listener::<CallState>(host).proceeds()),
        ..afresh::wasm::GuestOptions::default()
    }
}
