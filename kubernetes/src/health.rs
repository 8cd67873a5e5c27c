//! The health of the controller: what `/healthz`, `/readyz` and `/metrics` report.
//!
//! Promises: a loop that stands still for [`BEAT_LIMIT`] makes the process unhealthy, and an API or
//! a server that does not answer makes it unready only. A restart would not help there.

use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::{Metrics, head};
use crate::server::{Server, ServerError};
use crate::tenant::TenantNote;

/// Time after which a loop counts as dead. Each turn of one has a time limit below it.
const BEAT_LIMIT: Duration = Duration::from_secs(60);
/// Time without an answer of the Kubernetes API after which the controller is not ready.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Interval of probes of the afresh server.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Time for one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// A loop of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    /// Takes and renews the lease.
    Lease,
    /// Takes objects from the queue. It runs while the lease is held.
    Work,
    /// Probes the afresh server.
    Probe,
}

#[derive(Debug)]
struct State {
    beats: [Instant; 3],
    /// The last answer of the API.
    answered: Option<Instant>,
    holds_lease: bool,
    /// The outcome of the last probe of the server, once there was one.
    server: Option<Result<(), String>>,
    /// The tenant of the API key, as the server reported it last.
    tenant: Option<String>,
}

/// The state of the process, and its metrics.
#[derive(Debug)]
pub struct Monitor {
    /// Counts.
    pub metrics: Metrics,
    /// The tenant of the lease.
    pub tenant: TenantNote,
    state: Mutex<State>,
}

impl Default for Monitor {
    fn default() -> Self {
        let state = State {
            beats: [Instant::now(); 3],
            answered: None,
            holds_lease: false,
            server: None,
            tenant: None,
        };
        Self {
            metrics: Metrics::default(),
            tenant: TenantNote::default(),
            state: Mutex::new(state),
        }
    }
}

impl Monitor {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A loop has begun a turn.
    pub fn beat(&self, of: Loop) {
        self.state().beats[of as usize] = Instant::now();
    }

    /// The Kubernetes API has answered.
    pub fn note_answer(&self) {
        self.state().answered = Some(Instant::now());
    }

    /// The lease was taken, renewed or lost.
    pub fn note_lease(&self, is_held: bool) {
        let mut state = self.state();
        // The work begins with it. A renewal says nothing of the work.
        if is_held && !state.holds_lease {
            state.beats[Loop::Work as usize] = Instant::now();
        }
        state.holds_lease = is_held;
    }

    /// Whether the server has answered that the key has no tenant.
    #[must_use]
    pub fn is_nameless(&self) -> bool {
        let state = self.state();
        matches!(state.server, Some(Ok(()))) && state.tenant.is_none()
    }

    /// The server has named the tenant of the key, or has failed to.
    fn note_probe(&self, outcome: Result<Option<String>, ServerError>) {
        let mut state = self.state();
        state.server = Some(match outcome {
            Ok(tenant) => {
                state.tenant = tenant;
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        });
    }

    /// Loops that stand still.
    #[must_use]
    pub fn dead_loops(&self) -> Vec<&'static str> {
        let state = self.state();
        let loops = [(Loop::Lease, "lease"), (Loop::Work, "work"), (Loop::Probe, "probe")];
        let is_dead = |of: Loop| {
            let runs = of != Loop::Work || state.holds_lease;
            runs && state.beats[of as usize].elapsed() >= BEAT_LIMIT
        };
        loops.into_iter().filter(|(of, _)| is_dead(*of)).map(|(_, name)| name).collect()
    }

    /// Each check, with its fault.
    #[must_use]
    pub fn checks(&self) -> [(&'static str, Option<String>); 3] {
        let state = self.state();
        let is_answered = state.answered.is_some_and(|at| at.elapsed() < ANSWER_LIMIT);
        let api = "the Kubernetes API does not answer, or refuses the lease; check the network \
                   and the rights of the service account";
        let server = match &state.server {
            Some(Ok(())) => None,
            Some(Err(why)) => Some(why.clone()),
            None => Some("the afresh server was not asked yet".to_owned()),
        };
        [
            ("api", (!is_answered).then(|| api.to_owned())),
            ("server", server),
            ("tenant", self.tenant.fault(state.tenant.as_deref())),
        ]
    }

    /// Whether this process holds the lease.
    #[must_use]
    pub fn holds_lease(&self) -> bool {
        self.state().holds_lease
    }

    /// The answer to `/metrics`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.metrics.write(&mut text);
        let name = "afresh_kube_lease_held";
        head(&mut text, name, "gauge", "1 where the controller works, and 0 where it stands by.");
        let _ = writeln!(text, "{name} {}", u8::from(self.holds_lease()));
        let name = "afresh_kube_healthy";
        head(&mut text, name, "gauge", "1 or 0 by check.");
        for (check, fault) in self.checks() {
            let _ = writeln!(text, "{name}{{check=\"{check}\"}} {}", u8::from(fault.is_none()));
        }
        text
    }

    /// Asks the server again and again. Ends never.
    pub async fn probe(&self, server: &Server) {
        loop {
            self.beat(Loop::Probe);
            let asked = tokio::time::timeout(PROBE_TIMEOUT, server.tenant()).await;
            let late = || Err(ServerError::Unreachable { why: "no answer in time".to_owned() });
            self.note_probe(asked.unwrap_or_else(|_| late()));
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::TENANT_ANNOTATION;

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stands_still_is_dead_and_a_standby_has_no_work() {
        let monitor = Monitor::default();
        tokio::time::advance(BEAT_LIMIT).await;
        assert_eq!(monitor.dead_loops(), ["lease", "probe"]);
        monitor.beat(Loop::Lease);
        monitor.beat(Loop::Probe);
        assert!(monitor.dead_loops().is_empty(), "it stands by");
        monitor.note_lease(true);
        assert!(monitor.dead_loops().is_empty(), "the work has just begun");
        tokio::time::advance(BEAT_LIMIT / 2).await;
        monitor.note_lease(true);
        tokio::time::advance(BEAT_LIMIT / 2).await;
        assert_eq!(monitor.dead_loops(), ["lease", "work", "probe"]);
        monitor.note_lease(false);
        assert_eq!(monitor.dead_loops(), ["lease", "probe"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_that_stops_to_answer_makes_the_process_unready() {
        let monitor = Monitor::default();
        let api = |monitor: &Monitor| monitor.checks()[0].1.is_none();
        assert!(!api(&monitor));
        monitor.note_answer();
        assert!(api(&monitor));
        tokio::time::advance(ANSWER_LIMIT).await;
        assert!(!api(&monitor));
        monitor.note_probe(Ok(Some("other".to_owned())));
        assert!(monitor.checks()[1..].iter().all(|(_, fault)| fault.is_none()));
        let noted = [(TENANT_ANNOTATION.to_owned(), "acme".to_owned())].into();
        monitor.tenant.read(Some(&noted));
        monitor.note_probe(Err(ServerError::Unreachable { why: "refused".to_owned() }));
        let text = monitor.text();
        for line in [
            "afresh_kube_lease_held 0",
            "afresh_kube_healthy{check=\"api\"} 0",
            "afresh_kube_healthy{check=\"server\"} 0",
            "afresh_kube_healthy{check=\"tenant\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
    }
}
