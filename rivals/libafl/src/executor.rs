//! A LibAFL executor over an instance of a warm Linux program.
//!
//! Each input is a call that starts from the warm state: memory, registers and files. The map of
//! edges is plain memory of the program; it is read when the program waits for more input, or has
//! crashed, and before the reset. So the program needs no shared memory, and the map needs no
//! clearing.

use afresh_linux::{CallError, Instance, Warm};
use libafl::Error;
use libafl::executors::{Executor, ExitKind, HasObservers};
use libafl::inputs::{BytesInput, HasTargetBytes};
use libafl::observers::{HitcountsMapObserver, OwnedMapObserver};
use libafl::state::HasExecutions;
use libafl_bolts::tuples::RefIndexable;

/// The map of edges, on our side.
pub type Edges = HitcountsMapObserver<OwnedMapObserver<u8>>;

/// Runs inputs in an instance that is reset before each.
#[derive(Debug)]
pub struct WarmExecutor<OT> {
    instance: Instance,
    /// The address of the map in the program.
    map: u64,
    /// The observer of the map, and others.
    observers: (Edges, OT),
}

impl<OT> WarmExecutor<OT> {
    /// Runs inputs in a new instance of `warm`, which returns the address of its map for an empty
    /// input.
    ///
    /// # Errors
    /// When the program cannot be run, or its map has another length than the observer's.
    pub fn new(warm: &Warm, edges: Edges, others: OT) -> Result<Self, Error> {
        let mut instance = warm.instance();
        let told = instance.call_pristine(&framed(&[])).map_err(failed)?;
        let told = String::from_utf8_lossy(&told).into_owned();
        let mut numbers = told.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(map)), Some(Ok(len))) if len == edges.len() as u64 => {
                Ok(Self { instance, map, observers: (edges, others) })
            }
            _ => Err(Error::illegal_state(format!("no map of {} bytes: {told:?}", edges.len()))),
        }
    }
}

/// An input as the program reads it: behind its length.
fn framed(input: &[u8]) -> Vec<u8> {
    [&(input.len() as u32).to_le_bytes(), input].concat()
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::unknown(error.to_string())
}

impl<OT> HasObservers for WarmExecutor<OT> {
    type Observers = (Edges, OT);

    fn observers(&self) -> RefIndexable<&Self::Observers, Self::Observers> {
        RefIndexable::from(&self.observers)
    }

    fn observers_mut(&mut self) -> RefIndexable<&mut Self::Observers, Self::Observers> {
        RefIndexable::from(&mut self.observers)
    }
}

impl<OT, EM, S, Z> Executor<EM, BytesInput, S, Z> for WarmExecutor<OT>
where
    S: HasExecutions,
{
    fn run_target(
        &mut self,
        _: &mut Z,
        state: &mut S,
        _: &mut EM,
        input: &BytesInput,
    ) -> Result<ExitKind, Error> {
        *state.executions_mut() += 1;
        let bytes = input.target_bytes();
        let kind = match self.instance.call_pristine(&framed(&bytes)) {
            Ok(_) => ExitKind::Ok,
            Err(CallError::Ended { .. }) => ExitKind::Crash,
            // Its process has ended, with all its state.
            Err(CallError::Late { .. }) => return Ok(ExitKind::Timeout),
            Err(error) => return Err(failed(error)),
        };
        self.instance.read_memory(self.map, &mut self.observers.0[..]).map_err(failed)?;
        Ok(kind)
    }
}
