//! Guest memory for a virtual machine monitor: Firecracker's userfaultfd handshake.
//!
//! The VMM connects to a Unix socket and sends one message: a JSON array of its memory mappings,
//! and a userfaultfd it has registered them with. From then on the pager answers the faults of its
//! guest from a [`PageSource`](crate::PageSource), and streams ahead in another thread: the
//! recorded working set first. Pages that are zero take no memory. A range that the VMM discards (a
//! balloon, for instance) reads as zero afterwards, whether the VMM says so or not.
//!
//! Promises:
//! * A page that cannot be filled is poisoned, so that touching it raises SIGBUS; where the VMM did
//!   not allow that, the VMM is ended by SIGBUS. It never reads zeros, and waits no longer than the
//!   source takes to answer or to fail.
//! * A hostile message is refused by name before anything is done with it. A VMM with a userfaultfd
//!   would never get the pages of the call that loads it, so it is ended.
//! * A VMM's message costs no more memory than the page states of the source, and delays no other
//!   VMM.
//!
//! May break it: a VMM that reports mappings it has not registered. Filling those fails, which ends
//! it as above.

mod connection;
mod control;
mod fill;
mod freeze;
mod handshake;
mod host;
mod host_error;
mod listener;
mod memory;
mod metrics;
mod page;
mod pages;
mod ranges;
mod registration;
mod request;
mod request_error;
mod serve;
mod service;
mod stream_budget;
mod vm;
mod watch;
mod watch_end;
mod watchdog;
mod watches;

use std::io;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use afresh_budget::{Budget, BudgetExceeded};
use afresh_sys::SysError;

use crate::SourceError;

pub use control::{Cause, ControlClient, ControlServer, Snapshots};
pub use freeze::{FrozenMemory, PreparedMemory};
pub use handshake::{Mapping, parse_mappings};
pub use host::{EndpointInfo, EndpointOptions, EndpointTotals, HostEvent, VmmHost};
pub use host_error::HostError;
pub use listener::{ListenError, Listener};
pub use metrics::MetricsServer;
pub use request::{Request, parse_mode, parse_owner, parse_request};
pub use request_error::RequestError;
pub use serve::{ServeCounts, serve};
pub use stream_budget::StreamBudget;
pub use vm::{TouchedPages, Vm, VmSaveOptions, VmState, VmStats};
pub use watch_end::{LossReason, WatchEnd, WatchId};
pub use watchdog::{Watchdog, run_watchdog};

pub use afresh_sys::socket::SocketAccess;

/// Bytes of such a budget by default: what a VMM with a source far away streams at a time.
const STREAM_BUDGET: usize = 48 << 20;

/// Options of serving a VMM.
#[derive(Debug)]
pub struct VmmOptions<'a> {
    /// Pages filled on a fault. A source that is far away is asked for 64 at least.
    pub window: usize,
    /// Whether pages are streamed ahead.
    pub stream: bool,
    /// Whether a fault fills its own page only and nothing is streamed, so that the touched pages
    /// show: [`Vm::working_set`].
    pub record: bool,
    /// Charged for the pages of the VMM, if it is limited.
    pub budget: Option<Budget>,
    /// Room for pages that are streamed ahead, which VMMs can share.
    pub stream_budget: StreamBudget,
    /// Closes the VMM's memory if this process is killed.
    pub watchdog: Option<Watchdog>,
    /// Time limit of the handshake.
    pub handshake: Duration,
    /// Ends the service when set. Pages that are missing then are closed as after a failure.
    pub stop: &'a AtomicBool,
    /// Whether a VMM whose memory cannot be filled nor poisoned, or whose handshake is refused
    /// while it waits for pages, is ended by SIGBUS. Otherwise its wait never ends, as with any
    /// dead pager.
    pub end_on_failure: bool,
}

impl<'a> VmmOptions<'a> {
    /// The usual options.
    #[must_use]
    pub fn new(stop: &'a AtomicBool) -> Self {
        Self {
            window: 64,
            stream: true,
            record: false,
            budget: None,
            stream_budget: StreamBudget::new(STREAM_BUDGET),
            watchdog: None,
            handshake: Duration::from_secs(5),
            stop,
            end_on_failure: true,
        }
    }
}

/// A VMM could not be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The socket failed or the VMM went away.
    #[error("the VMM's socket: {0}")]
    Socket(#[from] io::Error),
    /// The VMM sent something else than the handshake.
    #[error("the VMM's handshake is refused: {0}")]
    Handshake(String),
    /// A call on the VMM's socket, process or userfaultfd failed.
    #[error("serving the VMM: {0}")]
    Sys(#[from] SysError),
    /// The VMM exceeds its budget.
    #[error("the VMM is refused: {0}; raise the budget of its endpoint")]
    Budget(#[from] BudgetExceeded),
    /// The watchdog has ended.
    #[error("the process that would close the VMM's memory has ended: restart the pager ({0})")]
    Watchdog(io::Error),
    /// Pages could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The service was ended while pages were missing; they raise SIGBUS now.
    #[error(
        "the pager was ended before {0} pages of the VMM were filled; touching them raises SIGBUS"
    )]
    Stopped(usize),
}
