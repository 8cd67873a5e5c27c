//! Sandboxes of Linux programs: their commands, their background work, and connections into them.
//!
//! A sandbox runs only within these functions and within calls. Each lets it run for a slice of
//! time at most, and takes Python's lock between two slices, so that callbacks, signals and time
//! limits are those of Python code.

use std::time::{Duration, Instant};

use afresh::linux::InboundConnection;
use afresh_interpreter::{COMMAND, proceed};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::call::{CallState, Stop};
use crate::error::{self, SessionError, StoppedError};
use crate::session::{Session, Stopper};

/// Maximum time of a wait for the next event in a program.
const MAX_WAIT: Duration = Duration::from_millis(50);
/// Time between two looks at what may end a wait.
const TICK: Duration = Duration::from_millis(5);

/// The output of a command since the last time: standard output, standard error, whether some was
/// dropped, its exit status if it has ended, and how often the sandbox went to another state.
type TakenOutput<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, bool, Option<i32>, u64);

/// The cost of a command: wall-clock seconds, CPU seconds, peak of memory, bytes of output, and
/// those of them that were dropped.
pub(crate) type CostParts = (f64, f64, Option<u64>, u64, u64);

/// Refuses sandboxes that are not of Linux programs.
fn check(session: &Session) -> PyResult<()> {
    match session.is_linux() {
        true => Ok(()),
        false => Err(SessionError::new_err(
            "this sandbox has no processes, as its guest is Wasm: `afresh.linux` and `afresh.image` make those that do",
        )),
    }
}

/// An operation on commands, as the guest's half reads it (JSON). The outcome is that of code.
#[pyfunction]
#[pyo3(signature = (session, wanted, stopper))]
pub(crate) fn command<'py>(
    py: Python<'py>,
    session: &Session,
    wanted: &str,
    stopper: Option<&Bound<'py, Stopper>>,
) -> PyResult<Bound<'py, PyTuple>> {
    check(session)?;
    let outcome = session.evaluate(py, COMMAND, wanted, "<command>", None, None, stopper, None)?;
    outcome.into_python(py, false)
}

/// Starts a command: the outcome, and the serial number of the command.
#[pyfunction]
#[pyo3(signature = (session, wanted, stopper))]
pub(crate) fn start_command<'py>(
    py: Python<'py>,
    session: &Session,
    wanted: &str,
    stopper: Option<&Bound<'py, Stopper>>,
) -> PyResult<(Bound<'py, PyTuple>, u64)> {
    session.commands().begin();
    let outcome = command(py, session, wanted, stopper);
    let serial = session.commands().started_serial();
    Ok((outcome?, serial.unwrap_or_default()))
}

/// The serial number of a command that runs already.
#[pyfunction]
pub(crate) fn adopt_command(session: &Session, number: u32) -> u64 {
    session.commands().adopt(number, false)
}

/// The output of a command since the last time; `None` if it does not exist any more.
#[pyfunction]
pub(crate) fn take_output<'py>(
    py: Python<'py>,
    session: &Session,
    number: u32,
    serial: u64,
) -> Option<TakenOutput<'py>> {
    let (output, moves) = session.commands().take(number, serial)?;
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| PyBytes::new(py, bytes));
    Some((stdout, stderr, output.truncated, output.ended, moves))
}

/// The cost of a command so far; `None` if it does not exist any more.
#[pyfunction]
pub(crate) fn command_cost(session: &Session, number: u32, serial: u64) -> Option<CostParts> {
    let cost = session.commands().cost(number, serial)?;
    let (wall, cpu) = (cost.wall.as_secs_f64(), cost.cpu.as_secs_f64());
    Some((wall, cpu, cost.peak_memory, cost.output_bytes, cost.dropped_bytes))
}

/// Begins a wait of several slices, which `Session.stop` ends from now on.
#[pyfunction]
pub(crate) fn begin_wait(session: &Session) -> PyResult<()> {
    check(session)?;
    session.begin();
    Ok(())
}

/// Refuses to continue a wait that was stopped.
#[pyfunction]
#[pyo3(signature = (session, stopper))]
pub(crate) fn check_wait(session: &Session, stopper: Option<&Bound<'_, Stopper>>) -> PyResult<()> {
    check_stops(&session.stops(stopper))
}

fn check_stops(stops: &[Stop]) -> PyResult<()> {
    match stops.iter().any(Stop::is_set) {
        true => Err(StoppedError::new_err("the wait was stopped by its host")),
        false => Ok(()),
    }
}

/// Lets background work run for a slice of time, once its next event is due, or waits `wait`
/// seconds without one. Returns whether something may still happen by itself. `moved` is whether
/// bytes of a connection have passed since the last slice, so that a program may run though no
/// event is due.
#[pyfunction]
#[pyo3(signature = (session, wait, stopper, moved = false))]
pub(crate) fn drive(
    py: Python<'_>,
    session: &Session,
    wait: f64,
    stopper: Option<&Bound<'_, Stopper>>,
    moved: bool,
) -> PyResult<bool> {
    check(session)?;
    let wait = Duration::try_from_secs_f64(wait.max(0.0)).unwrap_or(MAX_WAIT).min(MAX_WAIT);
    let stops = session.stops(stopper);
    let commands = session.commands().clone();
    session.with(py, move |live| {
        check_stops(&stops)?;
        let due = if moved { Some(Duration::ZERO) } else { live.due() };
        let Some(due) = due else { return Ok(false) };
        if !sleep(due.min(wait), &stops) || due > wait {
            return Ok(true);
        }
        live.with(|lease| {
            let slice = CallState::slice(stops, commands.clone());
            let (proceeded, cost) = lease.measure(|lease| proceed(lease, slice).0);
            commands.charge(&cost);
            Ok(proceeded?)
        })
        .map_err(|error| error::of_session(&error))?;
        Ok(live.due().is_some())
    })
}

/// Sleeps; `false` if that was stopped.
fn sleep(length: Duration, stops: &[Stop]) -> bool {
    let until = Instant::now() + length;
    loop {
        if stops.iter().any(Stop::is_set) {
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(TICK));
    }
}

/// A connection into a sandbox.
#[pyclass(frozen, module = "afresh._native")]
pub(crate) struct Connection(InboundConnection);

/// Connects to the listener on a port within the sandbox; `None` without one.
#[pyfunction]
pub(crate) fn dial(py: Python<'_>, session: &Session, port: u16) -> PyResult<Option<Connection>> {
    check(session)?;
    let dialed = session.with(py, |live| {
        live.with(|lease| Ok(lease.dial(port)?)).map_err(|error| error::of_session(&error))
    })?;
    Ok(dialed.map(Connection))
}

/// Passes bytes on, and takes at most `room` bytes: how many were passed on, the bytes, and whether
/// it has ended.
#[pyfunction]
pub(crate) fn exchange<'py>(
    py: Python<'py>,
    session: &Session,
    connection: &Connection,
    bytes: &[u8],
    room: usize,
) -> PyResult<(usize, Bound<'py, PyBytes>, bool)> {
    check(session)?;
    let done = session.with(py, |live| {
        live.with(|lease| Ok(lease.exchange(connection.0, bytes, room)?))
            .map_err(|error| error::of_session(&error))
    })?;
    Ok((done.taken, PyBytes::new(py, &done.given), done.ended))
}

/// Writes no more to a connection; with `both` it is closed.
#[pyfunction]
pub(crate) fn hang_up(
    py: Python<'_>,
    session: &Session,
    connection: &Connection,
    both: bool,
) -> PyResult<()> {
    check(session)?;
    session.with(py, |live| {
        live.with(|lease| Ok(lease.hang_up(connection.0, both)?))
            .map_err(|error| error::of_session(&error))
    })
}
