//! One run of a Linux program, from its start to its end: `afresh exec` from JavaScript.
//!
//! The program runs on a separate thread. The operation's own thread waits, and ends the run at its
//! limits.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use afresh::linux::{End, HostStreams, Program, RunControl, WarmError};
use serde::Deserialize;
use serde_json::json;

use crate::call::Call;
use crate::error::Failure;
use crate::program::{ProgramOptions, milliseconds};
use crate::reply::Reply;
use crate::threads;

/// Maximum time between two looks at limits.
const TICK: Duration = Duration::from_millis(10);
const SIGKILL: i32 = 9;
/// Maximum time after a kill until the caller waits no longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// A run; the bytes of the request are its standard input.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Execution {
    path: PathBuf,
    arguments: Vec<String>,
    linux: ProgramOptions,
    /// Maximum milliseconds.
    timeout: Option<f64>,
    /// Maximum bytes kept of each stream.
    output: usize,
    /// Whether output is sent while it runs.
    streams: bool,
}

#[derive(Default)]
struct State {
    /// Bytes of each stream.
    kept: [Vec<u8>; 2],
    truncated: bool,
    /// Whether the caller has left.
    abandoned: bool,
    ended: Option<Result<End, WarmError>>,
}

struct SharedRun {
    state: Mutex<State>,
    changed: Condvar,
    limit: usize,
    /// The receiver of output, if it is sent.
    call: Option<Arc<Call>>,
}

impl SharedRun {
    fn lock(&self) -> MutexGuard<'_, State> {
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
        let kept = &mut state.kept[self.1];
        let room = self.0.limit.saturating_sub(kept.len()).min(bytes.len());
        kept.extend_from_slice(&bytes[..room]);
        state.truncated |= room < bytes.len();
        let abandoned = state.abandoned;
        drop(state);
        if let Some(call) = self.0.call.as_ref().filter(|_| !abandoned) {
            call.print(self.1 as u32 + 1, bytes);
            // JavaScript that is slower than the program makes it wait.
            while !call.has_room() && !self.0.lock().abandoned {
                std::thread::sleep(TICK);
            }
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
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// Runs a program of the host once.
pub(crate) fn run(given: Execution, call: &Arc<Call>, stdin: &[u8]) -> Result<Reply, Failure> {
    let failed = |error: io::Error| Failure::open(&error);
    let timeout = given.timeout.map(|timeout| milliseconds(timeout, "a timeoutMs")).transpose()?;
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let program = given.linux.shape(None)?(Program::new(given.path));
    let program = given.arguments.iter().fold(program, Program::arg);
    let shared = Arc::new(SharedRun {
        state: Mutex::default(),
        changed: Condvar::new(),
        limit: given.output,
        call: given.streams.then(|| Arc::clone(call)),
    });
    let control = RunControl::new().map_err(failed)?;
    let streams = HostStreams::default()
        .input(input(stdin).map_err(failed)?)
        .output(Sink(Arc::clone(&shared), 0))
        .messages(Sink(Arc::clone(&shared), 1))
        .control(control.clone());
    let own = Arc::clone(&shared);
    let started = std::thread::Builder::new().name("afresh-exec".to_owned()).spawn(move || {
        let ended = program.run_to_end(streams).map(|ended| ended.end);
        own.lock().ended = Some(ended);
        own.changed.notify_all();
    });
    started.map_err(failed)?;
    let ended = threads::wait(|| wait(&shared, call, until)).inspect_err(|_| {
        control.signal(SIGKILL);
        let mut state = shared.lock();
        state.abandoned = true;
        let runs = |state: &mut State| state.ended.is_none();
        drop(shared.changed.wait_timeout_while(state, KILL_TIMEOUT, runs));
    })?;
    let status = match ended.map_err(|error| Failure::open(&error))? {
        End::Exit(code) => code & 0xff,
        End::Signal(signal) => -signal,
        end => return Err(Failure::guest(format!("the program {end}"))),
    };
    let mut state = shared.lock();
    let [mut bytes, stderr] = std::mem::take(&mut state.kept);
    let json = json!({
        "lengths": [bytes.len(), stderr.len()],
        "truncated": state.truncated,
        "exitCode": status,
    });
    bytes.extend(stderr);
    Ok(Reply { json, bytes })
}

/// Waits for the end of a run, or for the moment when it must end.
fn wait(
    shared: &SharedRun,
    call: &Call,
    until: Option<Instant>,
) -> Result<Result<End, WarmError>, Failure> {
    loop {
        let runs = |state: &mut State| state.ended.is_none();
        let waited = shared.changed.wait_timeout_while(shared.lock(), TICK, runs);
        if let Some(ended) = waited.unwrap_or_else(PoisonError::into_inner).0.ended.take() {
            return Ok(ended);
        }
        if call.stop.is_set() {
            return Err(Failure::stopped("the run was stopped by its host"));
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(Failure::timeout("the run took longer than its time limit"));
        }
    }
}
