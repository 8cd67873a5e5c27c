//! One run of a Linux program, from its start to its end: `afresh exec` from Python.
//!
//! The program runs on a separate thread. The caller's waits, passes output on, and looks at
//! signals, so that an interruption, a time limit and the end of the interpreter end the run.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use afresh::CallCost;
use afresh::linux::{End, HostStreams, Program, RunControl, WarmError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call::Stop;
use crate::error::{self, GuestError, OpenError, StoppedError};
use crate::exit;
use crate::linux::CostParts;
use crate::pending::Pending;
use crate::program::{ProgramOptions, seconds};
use crate::session::Stopper;
use crate::text::Utf8Decoder;

/// Maximum time between two looks at signals and limits.
const TICK: Duration = Duration::from_millis(10);
/// Memory of output that waits for the callback, beyond which the program waits.
const MAX_NEWS: usize = 1 << 20;
/// Memory of a piece of output, apart from its bytes.
const PIECE_COST: usize = 64;
const SIGKILL: i32 = 9;
/// Maximum time after a kill until the caller waits no longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Output for the callback, in order.
#[derive(Default)]
struct PendingOutput {
    /// Streams and bytes.
    pieces: Vec<(usize, Vec<u8>)>,
    /// Bytes of memory that the pieces take.
    cost: usize,
}

impl PendingOutput {
    fn push(&mut self, stream: usize, bytes: &[u8]) {
        self.cost += bytes.len();
        match self.pieces.last_mut() {
            Some((last, piece)) if *last == stream => piece.extend_from_slice(bytes),
            _ => {
                self.cost += PIECE_COST;
                self.pieces.push((stream, bytes.to_vec()));
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

/// Output of the run.
#[derive(Default)]
struct Streams {
    /// Bytes of each stream.
    kept: [Vec<u8>; 2],
    /// Output that the callback has not been given.
    news: PendingOutput,
    limit: usize,
    /// Bytes beyond the limit.
    dropped: usize,
    streams: bool,
    cost: CallCost,
    ended: Option<Result<End, WarmError>>,
}

#[derive(Default)]
struct SharedRun {
    state: Mutex<Streams>,
    changed: Condvar,
}

impl SharedRun {
    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One stream of the run.
struct Sink(Arc<SharedRun>, usize);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut state = self.0.lock();
        // A callback that is slower than the program makes it wait.
        while state.streams && state.news.cost > MAX_NEWS {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let limit = state.limit;
        let kept = &mut state.kept[self.1];
        let room = limit.saturating_sub(kept.len()).min(bytes.len());
        kept.extend_from_slice(&bytes[..room]);
        state.dropped += bytes.len() - room;
        if state.streams {
            state.news.push(self.1, bytes);
            self.0.changed.notify_all();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The input of a run: a file without a name that holds the bytes.
fn input(bytes: &[u8]) -> io::Result<OwnedFd> {
    if bytes.is_empty() {
        return Ok(File::open("/dev/null")?.into());
    }
    // SAFETY: the name is a string that ends with 0, and the result is checked.
    let fd = unsafe { libc::memfd_create(c"afresh-input".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned a new descriptor, which nothing else owns.
    let mut file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// The exit status (negative for a signal), standard output, standard error, and whether output was
/// dropped, with the cost.
type RunResult<'py> = (i32, Bound<'py, PyBytes>, Bound<'py, PyBytes>, bool, CostParts);

/// Runs a program of the host once.
#[pyfunction]
#[pyo3(signature = (path, arguments, linux, input, timeout, output, on_output, stopper))]
#[allow(clippy::too_many_arguments, reason = "called by the Python half only")]
pub(crate) fn run_program<'py>(
    py: Python<'py>,
    path: PathBuf,
    arguments: Vec<String>,
    linux: ProgramOptions,
    input: &[u8],
    timeout: Option<f64>,
    output: usize,
    on_output: Option<Py<PyAny>>,
    stopper: Option<&Bound<'py, Stopper>>,
) -> PyResult<RunResult<'py>> {
    let until = timeout.map(|timeout| seconds(timeout, "a timeout")).transpose()?;
    let until = until.and_then(|timeout| Instant::now().checked_add(timeout));
    let stop = stopper.map(|stopper| stopper.get().flag()).unwrap_or_default();
    let limits = RunLimits { until, stop };
    let program = linux.shape(None)?(Program::new(path));
    let program = arguments.iter().fold(program, Program::arg);
    let shared = Arc::new(SharedRun::default());
    {
        let mut state = shared.lock();
        (state.limit, state.streams) = (output, on_output.is_some());
    }
    let control = RunControl::new()?;
    let streams = HostStreams::default()
        .input(self::input(input)?)
        .output(Sink(Arc::clone(&shared), 0))
        .messages(Sink(Arc::clone(&shared), 1))
        .control(control.clone());
    let own = Arc::clone(&shared);
    let mut run = Run { shared, control, decoders: Default::default(), on_output, limits };
    let ended = exit::hold(py, || {
        std::thread::Builder::new().name("afresh-exec".to_owned()).spawn(move || {
            let (ended, cost) = CallCost::of(|| program.run_to_end(streams));
            let mut state = own.lock();
            state.cost = cost;
            state.ended = Some(ended.map(|ended| ended.end));
            drop(state);
            own.changed.notify_all();
        })?;
        run.attend(py)
    })?;
    let end = ended.map_err(|error| error::raise::<OpenError>(&error))?;
    let status = match end {
        End::Exit(code) => code & 0xff,
        End::Signal(signal) => -signal,
        end => return Err(GuestError::new_err(format!("the program {end}"))),
    };
    let state = run.shared.lock();
    let [stdout, stderr] = [0, 1].map(|stream| PyBytes::new(py, &state.kept[stream]));
    let (wall, cpu) = (state.cost.wall.as_secs_f64(), state.cost.cpu.as_secs_f64());
    let dropped = state.dropped as u64;
    let sent = state.kept.iter().map(|kept| kept.len() as u64).sum::<u64>() + dropped;
    let cost = (wall, cpu, state.cost.peak_memory, sent, dropped);
    Ok((status, stdout, stderr, dropped > 0, cost))
}

/// The limits of a run.
struct RunLimits {
    until: Option<Instant>,
    stop: Stop,
}

impl RunLimits {
    /// The reason to end the run now, as an error.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        if self.stop.is_set() || exit::has_begun() {
            return Err(StoppedError::new_err("the run was stopped by its host"));
        }
        match self.until.is_some_and(|until| Instant::now() >= until) {
            true => Err(error::time_limit("the run took longer than its time limit".to_owned())),
            false => Ok(()),
        }
    }
}

/// The caller's side of a run.
struct Run {
    shared: Arc<SharedRun>,
    control: RunControl,
    decoders: [Utf8Decoder; 2],
    on_output: Option<Py<PyAny>>,
    limits: RunLimits,
}

impl Run {
    /// Passes output on until the program has ended, or has to be killed.
    fn attend(&mut self, py: Python<'_>) -> PyResult<Result<End, WarmError>> {
        loop {
            let ended = self.wait(py);
            let delivered = self.deliver(py, ended.is_none());
            if let Some(ended) = ended {
                delivered?;
                return Ok(ended);
            }
            if let Err(failed) = delivered.and_then(|()| self.limits.check(py)) {
                self.kill(py);
                return Err(failed);
            }
        }
    }

    /// Waits for output or the end, for a tick at most.
    fn wait(&self, py: Python<'_>) -> Option<Result<End, WarmError>> {
        py.detach(|| {
            let state = self.shared.lock();
            let idle = |state: &mut Streams| state.ended.is_none() && state.news.is_empty();
            let waited = self.shared.changed.wait_timeout_while(state, TICK, idle);
            let ended = waited.unwrap_or_else(PoisonError::into_inner).0.ended.take();
            exit::park_if_finished();
            ended
        })
    }

    /// Passes new output on. While the program `runs`, a callback on an event loop that is behind
    /// is waited for.
    fn deliver(&mut self, py: Python<'_>, runs: bool) -> PyResult<()> {
        let Some(on_output) = &self.on_output else { return Ok(()) };
        let news = std::mem::take(&mut self.shared.lock().news);
        self.shared.changed.notify_all();
        for (stream, bytes) in news.pieces {
            let text = self.decoders[stream].decode(&bytes);
            if text.is_empty() {
                continue;
            }
            let delivered = on_output.bind(py).call1((stream + 1, text))?;
            let Ok(pending) = delivered.cast::<Pending>() else { continue };
            let mut failed = None;
            if runs {
                pending.get().wait(py, || {
                    failed = self.limits.check(py).err();
                    failed.is_none()
                })?;
            }
            if let Some(failed) = failed {
                return Err(failed);
            }
        }
        Ok(())
    }

    /// Ends the program, and waits for its end.
    fn kill(&self, py: Python<'_>) {
        self.control.signal(SIGKILL);
        let mut state = self.shared.lock();
        // Nothing is passed on any more.
        state.streams = false;
        drop(state);
        self.shared.changed.notify_all();
        py.detach(|| {
            let state = self.shared.lock();
            let runs = |state: &mut Streams| state.ended.is_none();
            drop(self.shared.changed.wait_timeout_while(state, KILL_TIMEOUT, runs));
            exit::park_if_exiting();
        });
    }
}
