//! Errors of guests, sessions and saves.

use std::time::Duration;

use afresh_snapshot::TreeError;

use crate::{Cause, OpenError, ReferenceError};

/// No instance is available for a call. The guest itself is unharmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// All instances are in use, and the lease does not wait.
    #[error(
        "all {limit} instances of the guest are in use: raise `Limits::items`, or wait for one with \
         `LimitPolicy::Wait` or `Guest::lease_async`"
    )]
    Exhausted {
        /// The limit, [`Limits::items`](afresh_pool::Limits::items).
        limit: usize,
    },
    /// No instance came back within the time that the lease waits.
    #[error(
        "no instance of the guest came back within {waited:?}: raise `Limits::items` or the timeout"
    )]
    Timeout {
        /// The time.
        waited: Duration,
    },
    /// The guest does not support an option of the lease.
    #[error("the guest does not support an option of the lease")]
    Option(#[source] Cause),
    /// The guest failed before its first call, in a function that each new instance runs.
    #[error("an instance of the guest failed before its first call")]
    Guest(#[source] Cause),
    /// The host could not make an instance, or has no thread for its call.
    #[error("the host could not make an instance of the guest")]
    Create(#[source] Cause),
    /// The lease has no instance: an earlier call of it was dropped before its end, or panicked.
    #[error("the lease is closed, because a call of it was cut short; take another one")]
    Closed,
}

/// A call failed. The instance is reset, or dropped, when its lease ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// There was no instance to call.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The guest has no such function, or the function takes other arguments.
    #[error("the call{} does not fit the guest", named("of", function))]
    Request {
        /// The function.
        function: String,
        /// The mismatch.
        source: Cause,
    },
    /// The guest does not support an option of the call.
    #[error("the guest does not support the options of the call{}", named("of", function))]
    Option {
        /// The function.
        function: String,
        /// Which option, and why not.
        source: Cause,
    },
    /// The call exceeded its time limit: [`CallOptions::timeout`](crate::CallOptions::timeout),
    /// that of its lease, or [`Options::timeout`](crate::Options::timeout).
    #[error("the call{} ran too long", named("of", function))]
    Timeout {
        /// The function.
        function: String,
        /// The limit that stopped the call.
        source: Cause,
    },
    /// The call used its limit of CPU time,
    /// [`CallOptions::cpu_time_limit`](crate::CallOptions::cpu_time_limit) or that of its lease.
    #[error(
        "the call{} used its CPU time limit of {limit:?}: raise the limit, or give the call less \
         work",
        named("of", function)
    )]
    CpuTime {
        /// The function.
        function: String,
        /// The limit.
        limit: Duration,
    },
    /// The call was ended by the embedder's watch.
    #[error("the call{} was stopped by its host", named("of", function))]
    Stopped {
        /// The function.
        function: String,
        /// The reason.
        source: Cause,
    },
    /// The guest trapped, crashed, or ended itself with an error.
    #[error("the guest failed{}", named("in", function))]
    Guest {
        /// The function.
        function: String,
        /// How.
        source: Cause,
    },
    /// The host failed: a host function, memory that could not be fetched, the kernel.
    #[error("the call{} failed on the host's side", named("of", function))]
    Host {
        /// The function.
        function: String,
        /// How.
        source: Cause,
    },
}

/// The function of a message, behind a preposition. Nothing for a program, which has none, and for
/// the start of a command.
fn named(preposition: &str, function: &str) -> String {
    match function {
        "" | "_start" => String::new(),
        name => format!(" {preposition} `{name}`"),
    }
}

impl CallError {
    /// The error without the name of the function, for callers that did not choose it.
    #[must_use]
    pub fn without_function(mut self) -> Self {
        match &mut self {
            Self::Request { function, .. }
            | Self::Option { function, .. }
            | Self::Timeout { function, .. }
            | Self::CpuTime { function, .. }
            | Self::Stopped { function, .. }
            | Self::Guest { function, .. }
            | Self::Host { function, .. } => function.clear(),
            Self::Lease(_) => {}
        }
        self
    }

    /// The error of an option that a call cannot have.
    pub(crate) fn option(function: &str, source: Cause) -> Self {
        Self::Option { function: function.to_owned(), source }
    }

    /// Whether the guest had begun, so that the state of the instance is unknown.
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        !matches!(self, Self::Lease(_) | Self::Request { .. } | Self::Option { .. })
    }
}

/// A session could not be made, called or moved. The session is unchanged, unless the error is that
/// it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The call failed. If the guest had begun to run, the session has failed as well.
    #[error(transparent)]
    Call(#[from] CallError),
    /// An earlier call was cut short, so the state of the guest is unknown.
    #[error("the session failed earlier ({why}): roll it back, to a checkpoint or to its root")]
    Failed {
        /// How.
        why: String,
    },
    /// This kind of guest has no sessions.
    #[error("this guest has no sessions: {0}")]
    Guest(&'static str),
    /// The guest has no file tree.
    #[error("this session has no files: {0}")]
    NoFiles(&'static str),
    /// An operation on a file was refused.
    #[error("{path}: {source}")]
    Files {
        /// Which.
        path: String,
        /// Why.
        source: afresh_files::Refused,
    },
    /// A file does not fit in the rest of the budget for whole files. [`crate::SessionFiles::tree`]
    /// reads it in parts.
    #[error("{path}: {source}; read it in parts, or within a larger budget")]
    Budget {
        /// The file.
        path: String,
        /// The budget.
        source: afresh_budget::BudgetExceeded,
    },
    /// No such checkpoint.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A delta is damaged, or was made since another state.
    #[error("the delta cannot be applied")]
    Delta(#[from] afresh_store::TurnError),
    /// The present state cannot be kept, or another state cannot be reached.
    #[error("the session's state cannot be kept or changed")]
    State(#[source] Cause),
}

/// A guest could not be saved; the name is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reference has no valid place.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The place cannot be written to, or the snapshot to start from cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// This guest, or this kind of guest, has no state that can be kept.
    #[error("this guest cannot be saved: {0}")]
    Guest(&'static str),
    /// The guest's state could not be read.
    #[error("the guest cannot be frozen")]
    Freeze(#[source] Cause),
    /// A call of the recording of a working set failed.
    #[error("recording `{function}`")]
    Record {
        /// The function.
        function: String,
        /// The error.
        source: Cause,
    },
    /// The snapshot could not be written.
    #[error("saving {reference}")]
    Write {
        /// Where to.
        reference: String,
        /// The error.
        source: Cause,
    },
}

/// A verification could not be carried out. Differences are not an error: see
/// [`Verification`](crate::Verification).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// No instance is available, or the call does not fit the guest.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Memory or state could not be read.
    #[error("the guest's state cannot be compared")]
    Compare(#[source] Cause),
}
