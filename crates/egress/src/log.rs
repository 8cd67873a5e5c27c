//! The log of connections: every one that a guest makes or is refused, through `tracing` and to a
//! receiver.
//!
//! Promises: a record has no secret, no query and no content. A guest that connects in a loop
//! cannot fill the log: after [`MAX_RECORDS`] at once, refusals and failures are recorded once a
//! second, and the others ten times. Records in between are counted.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::destination::DestinationQuery;

/// Records of one log at once: of refusals and failures, and as many of granted connections and
/// requests.
pub const MAX_RECORDS: u32 = 100;
/// Time between two records beyond those. Refusals need no server, so that they have no other
/// limit.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(1);
const GRANT_INTERVAL: Duration = Duration::from_millis(100);
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
    /// Records before this one that were dropped, since there were too many.
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

    /// The record of its refusal.
    #[must_use]
    pub fn refused(self, reason: impl Into<String>) -> Self {
        Self { outcome: Outcome::Refused, ..self }.reason(reason)
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

/// Records that may be written now.
#[derive(Debug)]
struct RecordRate {
    left: u32,
    /// When it last gained one.
    since: Instant,
}

impl Default for RecordRate {
    fn default() -> Self {
        Self { left: MAX_RECORDS, since: Instant::now() }
    }
}

impl RecordRate {
    /// Whether one more record may be written.
    fn admits(&mut self, interval: Duration) -> bool {
        let gained = self.since.elapsed().as_nanos() / interval.as_nanos();
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(gained).min(MAX_RECORDS);
        self.since =
            if self.left == MAX_RECORDS { Instant::now() } else { self.since + interval * gained };
        let admits = self.left > 0;
        self.left = self.left.saturating_sub(1);
        admits
    }
}

#[derive(Debug, Default)]
struct LogRates {
    refusals: RecordRate,
    grants: RecordRate,
    dropped: u64,
}

#[derive(Default)]
struct LogState {
    guest: String,
    receiver: Option<Arc<dyn ConnectionReceiver>>,
    /// Whether it has all requests of rules, and not only those of rules that log them.
    takes_requests: bool,
    rates: Mutex<LogRates>,
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
        Self(Arc::new(LogState { guest, receiver, ..LogState::default() }))
    }

    /// The same with all requests of rules, and not only those of rules that log them.
    #[must_use]
    pub fn of_requests(guest: impl Into<String>, receiver: Arc<dyn ConnectionReceiver>) -> Self {
        let (guest, receiver) = (guest.into(), Some(receiver));
        let state = LogState { guest, receiver, takes_requests: true, ..LogState::default() };
        Self(Arc::new(state))
    }

    pub(crate) fn takes_requests(&self) -> bool {
        self.0.takes_requests
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
            let mut rates = self.0.rates.lock().unwrap_or_else(PoisonError::into_inner);
            let admits = match record.outcome {
                Outcome::Allowed => rates.grants.admits(GRANT_INTERVAL),
                Outcome::Refused | Outcome::Failed => rates.refusals.admits(REFUSAL_INTERVAL),
            };
            if !admits {
                rates.dropped += 1;
                return;
            }
            std::mem::take(&mut rates.dropped)
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
    fn a_rate_regains_one_record_in_an_interval() {
        let hour = Duration::from_secs(3600);
        let mut rate = RecordRate::default();
        assert_eq!((0..500).filter(|_| rate.admits(hour)).count(), MAX_RECORDS as usize);
        rate.since = rate.since.checked_sub(hour * 2).unwrap_or(rate.since);
        assert!((0..500).filter(|_| rate.admits(hour)).count() <= 2);
        assert!((0..500).filter(|_| rate.admits(Duration::from_nanos(1))).count() >= 100);
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
        log.record(ConnectionRecord::new("a", 1, Outcome::Allowed));
        let all = records.0.lock().unwrap();
        let counted = (all.len() - 1) as u64 + all.iter().map(|record| record.dropped).sum::<u64>();
        assert!(first < 2 * MAX_RECORDS as usize && counted == 2 * u64::from(MAX_RECORDS));
    }
}
