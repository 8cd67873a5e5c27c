//! What belongs to one call of a guest: its output, its tools, its limits, and how it is ended.
//!
//! It is host state of the lease ([`Host::state`]), so none of it outlives a call. What the guest's imports do is done
//! on the thread that runs it; Python's lock is taken for a tool, for streamed output, and to look at signals.
//!
//! Signals are looked at on the main thread only, where Python handles them, every tick of 5 ms. Where other threads
//! are busy in Python, taking the lock may take as long as a tick, so that they are looked at less often then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use afresh::wasm::wasmtime::{self, ResourceLimiter};
use afresh::wasm::{Limiter, Watch};
use afresh_interpreter::{Listener, Stream, imports, listener, state};
use minicbor::{Decoder, Encoder};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::value;

/// Ends calls from elsewhere: once set it stays so.
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

/// Why a call was ended.
pub(crate) enum Reason {
    /// Its time limit.
    Timeout,
    /// Somebody stopped it.
    Stopped,
    /// An exception that no guest may catch: of a signal's handler, or of a tool that was interrupted.
    Interrupted(PyErr),
}

/// What a call may use.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) timeout: Option<Duration>,
    /// Most bytes of memory.
    pub(crate) memory: usize,
    /// Most bytes kept of each stream.
    pub(crate) output: usize,
}

/// One call's own.
#[derive(Default)]
pub(crate) struct CallState {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// Whether output was dropped.
    pub(crate) truncated: bool,
    /// What tools raised, by number.
    pub(crate) failures: Vec<PyErr>,
    pub(crate) reason: Option<Reason>,
    output: usize,
    memory: Option<usize>,
    until: Option<Instant>,
    stops: [Stop; 2],
    /// Called with a stream's number and what was written.
    sink: Option<Py<PyAny>>,
    /// Called with the name and the arguments of a tool.
    tools: Option<Py<PyAny>>,
    signals: Signals,
    /// Who is told of an interruption, where no call has begun.
    warm_up: Option<Interruption>,
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
    /// Of the thread that asks: its process's first, which is Python's main thread.
    fn of_this_thread() -> Self {
        // SAFETY: both calls only return a number.
        let mine = unsafe { libc::getpid() == libc::gettid() };
        Self { mine, next: None }
    }

    fn look(&mut self) -> PyResult<()> {
        let now = Instant::now();
        if !self.mine || self.next.is_some_and(|next| now < next) {
            return Ok(());
        }
        let result = Python::attach(|py| py.check_signals());
        // Waiting for the lock takes a tenth of the guest's time at most.
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
            memory: Some(limits.memory),
            until: limits.timeout.map(|timeout| Instant::now() + timeout),
            stops,
            sink,
            tools,
            signals: Signals::of_this_thread(),
            ..Self::default()
        }
    }

    /// Whether the call may go on.
    fn goes_on(&mut self) -> bool {
        let reason = if self.stops.iter().any(Stop::is_set) {
            Reason::Stopped
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Reason::Timeout
        } else {
            match self.signals.look() {
                Ok(()) => return true,
                Err(error) => match &self.warm_up {
                    Some(warm_up) => {
                        warm_up.keep(error);
                        return false;
                    }
                    None => Reason::Interrupted(error),
                },
            }
        };
        self.reason = Some(reason);
        false
    }

    fn keep(&mut self, stream: Stream, bytes: &[u8]) -> PyResult<()> {
        let (number, kept) = match stream {
            // Guests here have no commands, and so no terminals.
            Stream::Stdout | Stream::Terminal => (1, &mut self.stdout),
            Stream::Stderr => (2, &mut self.stderr),
        };
        let room = self.output.saturating_sub(kept.len());
        kept.extend_from_slice(&bytes[..room.min(bytes.len())]);
        self.truncated |= room < bytes.len();
        let Some(sink) = &self.sink else { return Ok(()) };
        Python::attach(|py| {
            let text = String::from_utf8_lossy(bytes);
            sink.call1(py, (number, text.as_ref())).map(drop)
        })
    }

    /// Calls a tool; what it raises is an answer, too, unless nothing may catch it.
    fn answer(&mut self, request: &[u8]) -> PyResult<Vec<u8>> {
        Python::attach(|py| {
            let error = match self.call_tool(py, request) {
                Err(error) if error.is_instance_of::<PyException>(py) => error,
                other => return other,
            };
            let number = u32::try_from(self.failures.len()).unwrap_or(u32::MAX);
            let name = error.get_type(py).name()?.to_string();
            let message = error.value(py).str()?.to_string_lossy().into_owned();
            let mut answer = Vec::new();
            let mut out = Encoder::new(&mut answer);
            let written = (|| out.array(4)?.u8(1)?.str(&name)?.str(&message)?.u32(number)?.ok())();
            written.map_err(|error| crate::error::MarshalError::new_err(error.to_string()))?;
            self.failures.push(error);
            Ok(answer)
        })
    }

    fn call_tool(&self, py: Python<'_>, request: &[u8]) -> PyResult<Vec<u8>> {
        let broken = |error: minicbor::decode::Error| {
            crate::error::MarshalError::new_err(format!("a tool's request cannot be read: {error}"))
        };
        let mut from = Decoder::new(request);
        from.array().map_err(broken)?;
        let name = from.str().map_err(broken)?;
        let arguments = value::read(py, &mut from, false, 0)?;
        let Some(tools) = &self.tools else {
            let why = format!("the host offers no function {name:?}");
            return Err(pyo3::exceptions::PyNameError::new_err(why));
        };
        // Named arguments follow, from languages that have them.
        let named = match from.position() < request.len() {
            true => Some(value::read(py, &mut from, false, 0)?),
            false => None,
        };
        let result = tools.bind(py).call1(PyTuple::new(
            py,
            [
                name.into_pyobject(py)?.into_any(),
                arguments,
                named.unwrap_or_else(|| py.None().into_bound(py)),
            ],
        )?)?;
        let mut answer = Vec::new();
        let mut out = Encoder::new(&mut answer);
        let begun = (|| out.array(2)?.u8(0)?.ok())();
        begun.map_err(|error| crate::error::MarshalError::new_err(error.to_string()))?;
        value::write(&result, &mut out, 0)?;
        Ok(answer)
    }
}

impl ResourceLimiter for CallState {
    fn memory_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(self.memory.is_none_or(|most| desired <= most))
    }

    fn table_growing(&mut self, _: usize, _: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(true)
    }
}

/// How a call ends whose reason its state holds.
fn ended(state: &mut CallState, error: PyErr) -> wasmtime::Error {
    state.reason = Some(Reason::Interrupted(error));
    wasmtime::Error::msg("the host's own code was interrupted")
}

impl Listener for CallState {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        self.keep(stream, bytes).map_err(|error| ended(self, error))
    }

    fn call(&mut self, request: &[u8]) -> wasmtime::Result<Vec<u8>> {
        // Nobody looks while a tool runs, which may take as long as it likes.
        if !self.goes_on() {
            return Err(wasmtime::Error::msg("the call was stopped before a tool was called"));
        }
        self.answer(request).map_err(|error| ended(self, error))
    }
}

/// What interrupted a warm-up, whose state nobody sees.
#[derive(Clone, Default)]
pub(crate) struct Interruption(Arc<Mutex<Option<PyErr>>>);

impl Interruption {
    /// What it was, if it was.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn keep(&self, error: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// The options of every Wasm guest, and where to look when its warm-up was interrupted.
pub(crate) fn guest_options() -> (afresh::wasm::GuestOptions, Interruption) {
    let interruption = Interruption::default();
    let own = interruption.clone();
    let options = afresh::wasm::GuestOptions {
        imports: imports::<CallState>(),
        state: state(move || CallState {
            signals: Signals::of_this_thread(),
            warm_up: Some(own.clone()),
            ..CallState::default()
        }),
        limiter: Limiter::new(|host| listener::<CallState>(host)),
        watch: Watch::new(|host| listener::<CallState>(host).goes_on()),
        ..afresh::wasm::GuestOptions::default()
    };
    (options, interruption)
}
