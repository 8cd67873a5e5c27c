//! The log of connections: every one that a guest makes or is refused, through `tracing` and to a receiver.
//!
//! Promises: a record has no secret, no query and no content. A guest that connects in a loop cannot fill the log:
//! beyond [`MAX_RECORDS`] a second, records are counted instead.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::destination::DestinationQuery;

/// Records of one receiver in a second. Later ones are counted.
pub const MAX_RECORDS: u32 = 100;
/// Maximum characters of a path in a record.
const MAX_PATH: usize = 256;

/// The result of a connection or a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was granted.
    Allowed,
    /// No grant covers it, or its form is refused.
    Refused,
    /// It was granted, and its server or guest failed.
    Failed,
}

impl Outcome {
    /// Its word in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// A connection or a request of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionRecord {
    /// The name that the guest connected to, or the address that stands for none.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Its result.
    pub outcome: Outcome,
    /// The reason, unless it was granted.
    pub reason: Option<String>,
    /// The method and the path, without its query, of a request.
    pub request: Option<(String, String)>,
    /// Records before this one that were dropped, since there were too many in a second.
    pub dropped: u64,
}

impl ConnectionRecord {
    /// A record of a connection.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16, outcome: Outcome) -> Self {
        Self { host: host.into(), port, outcome, reason: None, request: None, dropped: 0 }
    }

    /// A record of a connection to `asked`.
    #[must_use]
    pub fn of(asked: DestinationQuery<'_>, port: u16, outcome: Outcome) -> Self {
        let host = match asked {
            DestinationQuery::Name(name) => name.to_owned(),
            DestinationQuery::Address(address) => IpAddr::to_string(&address),
        };
        Self::new(host, port, outcome)
    }

    /// With a reason.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// The record of its failure.
    #[must_use]
    pub fn failed(self, reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Failed, ..self }.reason(reason)
    }

    /// With a request.
    #[must_use]
    pub fn request(mut self, method: &str, path: &str) -> Self {
        self.request = Some((method.to_owned(), path.chars().take(MAX_PATH).collect()));
        self
    }
}

/// Receives the records of connections, in addition to `tracing`.
pub trait ConnectionReceiver: Send + Sync {
    /// Takes a record. It may be called from any thread.
    fn record(&self, record: &ConnectionRecord);
}

/// The records of the last second.
#[derive(Debug, Default)]
struct RecordRate {
    since: Option<Instant>,
    count: u32,
    dropped: u64,
}

#[derive(Default)]
struct LogState {
    guest: String,
    receiver: Option<Arc<dyn ConnectionReceiver>>,
    rate: Mutex<RecordRate>,
}

/// The log of the connections of one guest. Clones share its rate.
#[derive(Clone, Default)]
pub struct ConnectionLog(Arc<LogState>);

impl fmt::Debug for ConnectionLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionLog").finish_non_exhaustive()
    }
}

thread_local! {
    /// The log of the guest that runs on this thread.
    static PRESENT: RefCell<Option<ConnectionLog>> = const { RefCell::new(None) };
}

impl ConnectionLog {
    /// A log through `tracing`, where the guest has the name `guest`, and to `receiver`.
    #[must_use]
    pub fn new(guest: impl Into<String>, receiver: Arc<dyn ConnectionReceiver>) -> Self {
        let (guest, receiver) = (guest.into(), Some(receiver));
        Self(Arc::new(LogState { guest, receiver, rate: Mutex::default() }))
    }

    /// A log through `tracing` alone, where the guest has the name `guest`.
    #[must_use]
    pub fn named(guest: impl Into<String>) -> Self {
        Self(Arc::new(LogState { guest: guest.into(), ..LogState::default() }))
    }

    /// The log of the guest that runs on this thread, if its caller has set one.
    #[must_use]
    pub fn present() -> Option<Self> {
        PRESENT.with(|present| present.borrow().clone())
    }

    /// Runs a guest, whose connections go to this log.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Restore(Option<ConnectionLog>);
        impl Drop for Restore {
            fn drop(&mut self) {
                PRESENT.with(|present| *present.borrow_mut() = self.0.take());
            }
        }
        let before = PRESENT.with(|present| present.borrow_mut().replace(self.clone()));
        let _restore = Restore(before);
        run()
    }

    /// Writes a record.
    pub fn record(&self, mut record: ConnectionRecord) {
        let dropped = {
            let mut rate = self.0.rate.lock().unwrap_or_else(PoisonError::into_inner);
            if rate.since.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
                (rate.since, rate.count) = (Some(Instant::now()), 0);
            }
            if rate.count >= MAX_RECORDS {
                rate.dropped += 1;
                return;
            }
            rate.count += 1;
            std::mem::take(&mut rate.dropped)
        };
        record.dropped = dropped;
        let guest = &*self.0.guest;
        let (host, port, outcome) = (&*record.host, record.port, record.outcome.as_str());
        let reason = record.reason.as_deref().unwrap_or_default();
        let (method, path) = match &record.request {
            Some((method, path)) => (&**method, &**path),
            None => ("", ""),
        };
        match record.outcome {
            Outcome::Allowed => tracing::info!(
                guest,
                host,
                port,
                outcome,
                method,
                path,
                dropped,
                "a guest's connection"
            ),
            Outcome::Refused | Outcome::Failed => tracing::warn!(
                guest,
                host,
                port,
                outcome,
                reason,
                method,
                path,
                dropped,
                "a guest's connection"
            ),
        }
        if let Some(receiver) = &self.0.receiver {
            receiver.record(&record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Records(Mutex<Vec<ConnectionRecord>>);

    impl ConnectionReceiver for Records {
        fn record(&self, record: &ConnectionRecord) {
            self.0.lock().unwrap().push(record.clone());
        }
    }

    #[test]
    fn a_loop_of_connections_does_not_fill_the_log() {
        let records = Arc::new(Records::default());
        let log = ConnectionLog::new("guest", records.clone());
        log.within(|| {
            let log = ConnectionLog::present().unwrap();
            (0..MAX_RECORDS * 2).for_each(|port| {
                log.record(ConnectionRecord::new("a", port as u16, Outcome::Refused))
            });
        });
        assert!(ConnectionLog::present().is_none());
        let first = records.0.lock().unwrap().len();
        log.0.rate.lock().unwrap().since = None;
        log.record(ConnectionRecord::new("a", 1, Outcome::Allowed));
        let all = records.0.lock().unwrap();
        let counted = (all.len() - 1) as u64 + all.iter().map(|record| record.dropped).sum::<u64>();
        assert!(first < 2 * MAX_RECORDS as usize && counted == 2 * u64::from(MAX_RECORDS));
    }
}
