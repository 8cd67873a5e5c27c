//! Leases whose output is logged.

use std::sync::Arc;

use afresh::wasm::{LeaseOptions, Output};

use crate::config::GuestConfig;
use crate::guest_log::{GuestLog, LoggedCall};
use crate::reuse::{ReusePool, UsedLease};

/// The method of logging the output of a guest.
#[derive(Clone)]
pub(crate) struct LogOptions {
    guest: Arc<str>,
    /// Whether the owner has left the output of Wasm guests to the server.
    pub(crate) is_ours: bool,
}

/// A lease, and the log of its output.
pub(crate) struct LoggedLease<L> {
    pub(crate) lease: L,
    log: Arc<GuestLog>,
}

impl LogOptions {
    pub(crate) fn of(config: &GuestConfig) -> Self {
        let is_ours = matches!(config.wasm.wasi.output, Output::Discard);
        Self { guest: config.name.as_str().into(), is_ours }
    }

    pub(crate) fn log(&self) -> Arc<GuestLog> {
        GuestLog::new(self.guest.clone())
    }

    /// A new lease with a new log, which begins with `request`.
    pub(crate) async fn lease<L, E>(
        &self,
        request: &str,
        lease: impl AsyncFnOnce(LeaseOptions) -> Result<L, E>,
    ) -> Result<(LoggedLease<L>, LoggedCall), E> {
        let log = self.log();
        let logged = log.begin(request);
        let mut options = LeaseOptions::new();
        if self.is_ours {
            options = options.output(Output::Handler(log.handler()));
        }
        let lease = lease(options).await?;
        Ok((LoggedLease { lease, log }, logged))
    }

    /// A lease that may answer another request, or else a new one, with the log of `request`.
    pub(crate) async fn take<L, E>(
        &self,
        shelf: &ReusePool<LoggedLease<L>>,
        request: &str,
        lease: impl AsyncFnOnce(LeaseOptions) -> Result<L, E>,
    ) -> Result<(UsedLease<LoggedLease<L>>, LoggedCall), E> {
        if let Some(used) = shelf.take() {
            let logged = used.lease.log.begin(request);
            return Ok((used, logged));
        }
        let (lease, logged) = self.lease(request, lease).await?;
        Ok((ReusePool::fresh(lease), logged))
    }
}
