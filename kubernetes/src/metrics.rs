//! Metrics of the controller, in the text format of Prometheus.
//!
//! Promises: labels have fixed values, so the number of series is fixed, and no name of an object
//! or a namespace is in them.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::resource::{ClaimKind, Kind, PoolKind, SandboxKind};

/// Upper bounds of the histogram of times to `Ready`, in seconds.
const BOUNDS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// An enumeration whose members are the values of a label.
trait Label: Copy + 'static {
    /// All members with their values, in their order.
    const ALL: &'static [(Self, &'static str)];

    /// The place in [`Label::ALL`].
    fn place(self) -> usize;
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$member_doc:meta])* $member:ident = $value:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$member_doc])* $member,)*
        }

        impl Label for $name {
            const ALL: &'static [(Self, &'static str)] = &[$((Self::$member, $value)),*];

            fn place(self) -> usize {
                self as usize
            }
        }
    };
}

label! {
    /// A kind of object that is reconciled.
    ReconciledKind {
        /// `Sandbox`.
        Sandbox = SandboxKind::KIND,
        /// `SandboxClaim`.
        Claim = ClaimKind::KIND,
        /// `SandboxWarmPool`.
        Pool = PoolKind::KIND,
    }
}

impl ReconciledKind {
    fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, value)| *value == name).map(|(kind, _)| *kind)
    }
}

label! {
    /// The result of one reconciliation.
    ReconcileResult {
        /// The object is as it should be, or waits for others.
        Success = "success",
        /// It changed meanwhile, and is reconciled again.
        Conflict = "conflict",
        /// It failed, and is tried again.
        Failure = "failure",
        /// The work on it panicked.
        Panic = "panic",
    }
}

label! {
    /// An event of a sandbox.
    SandboxEvent {
        /// The server made it for an object.
        Made = "made",
        /// It existed, and no status named it.
        Adopted = "adopted",
        /// The controller ended it.
        Ended = "ended",
        /// The server does not have it any more, and its object is finished.
        Lost = "lost",
    }
}

label! {
    /// Where an error comes from.
    ErrorSource {
        /// The Kubernetes API.
        Kubernetes = "kubernetes",
        /// The afresh server.
        Server = "server",
        /// Another object of the cluster, or the specification.
        Object = "object",
        /// The lease, which another controller has.
        Lease = "lease",
    }
}

/// A time distribution.
#[derive(Debug, Default)]
struct Histogram {
    /// Times below each bound and above the one before.
    buckets: [AtomicU64; BOUNDS.len()],
    count: AtomicU64,
    microseconds: AtomicU64,
}

impl Histogram {
    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(at) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.buckets[at].fetch_add(1, Ordering::Relaxed);
        }
        let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn write(&self, name: &str, labels: &str, text: &mut String) {
        // Read first: no bucket may have more.
        let mut below = 0;
        let buckets = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        let count = self.count.load(Ordering::Relaxed).max(buckets.iter().sum());
        for (bound, bucket) in BOUNDS.iter().zip(buckets) {
            below += bucket;
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let sum = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}");
        let _ = writeln!(text, "{name}_count{{{labels}}} {count}");
    }
}

/// Counts of this process.
#[derive(Debug, Default)]
pub struct Metrics {
    reconciles: [[AtomicU64; ReconcileResult::ALL.len()]; ReconciledKind::ALL.len()],
    ready: [Histogram; ReconciledKind::ALL.len()],
    sandboxes: [AtomicU64; SandboxEvent::ALL.len()],
    errors: [AtomicU64; ErrorSource::ALL.len()],
    /// Objects that wait for their turn, are at work, and wait after a failure.
    queue: [AtomicU64; 3],
}

impl Metrics {
    /// Counts a reconciliation of an object of a kind.
    pub fn count_reconcile(&self, kind: &str, result: ReconcileResult) {
        if let Some(kind) = ReconciledKind::of(kind) {
            self.reconciles[kind.place()][result.place()].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds the time from the first sight of an object to its readiness.
    pub fn observe_ready(&self, kind: &str, time: Duration) {
        if let Some(kind) = ReconciledKind::of(kind) {
            self.ready[kind.place()].observe(time);
        }
    }

    /// Counts an event of a sandbox.
    pub fn count_sandbox(&self, event: SandboxEvent) {
        self.sandboxes[event.place()].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an error.
    pub fn count_error(&self, source: ErrorSource) {
        self.errors[source.place()].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the objects that wait for their turn, and those at work.
    pub fn note_queue(&self, waiting: usize, running: usize) {
        self.queue[0].store(waiting as u64, Ordering::Relaxed);
        self.queue[1].store(running as u64, Ordering::Relaxed);
    }

    /// Notes the objects that failed, and were not reconciled since.
    pub fn note_failing(&self, failing: usize) {
        self.queue[2].store(failing as u64, Ordering::Relaxed);
    }

    /// Writes them as text.
    pub fn write(&self, text: &mut String) {
        let name = "afresh_kube_reconciles_total";
        head(text, name, "counter", "Reconciliations of objects.");
        for (kind, kind_name) in ReconciledKind::ALL {
            let labels = format!("kind=\"{kind_name}\"");
            write_counts::<ReconcileResult>(
                text,
                name,
                &labels,
                "result",
                &self.reconciles[kind.place()],
            );
        }
        let name = "afresh_kube_ready_seconds";
        let what = "Time from the first sight of an object to its readiness.";
        head(text, name, "histogram", what);
        // A pool makes no sandbox.
        for kind in [ReconciledKind::Sandbox, ReconciledKind::Claim] {
            let labels = format!("kind=\"{}\"", ReconciledKind::ALL[kind.place()].1);
            self.ready[kind.place()].write(name, &labels, text);
        }
        let name = "afresh_kube_sandboxes_total";
        head(text, name, "counter", "Sandboxes of the server, by event.");
        write_counts::<SandboxEvent>(text, name, "", "event", &self.sandboxes);
        let name = "afresh_kube_errors_total";
        head(text, name, "counter", "Errors, by their source.");
        write_counts::<ErrorSource>(text, name, "", "source", &self.errors);
        let gauges = [
            ("afresh_kube_waiting", "Objects that wait for their turn."),
            ("afresh_kube_running", "Objects at work."),
            ("afresh_kube_failing", "Objects whose last reconciliation failed."),
        ];
        for ((name, what), value) in gauges.into_iter().zip(&self.queue) {
            head(text, name, "gauge", what);
            let _ = writeln!(text, "{name} {}", value.load(Ordering::Relaxed));
        }
    }
}

/// The lines above the samples of a metric.
pub(crate) fn head(text: &mut String, name: &str, kind: &str, what: &str) {
    let _ = writeln!(text, "# HELP {name} {what}\n# TYPE {name} {kind}");
}

/// Counts by the values of the label `L`, after the `labels` that all have.
fn write_counts<L: Label>(
    text: &mut String,
    name: &str,
    labels: &str,
    label: &str,
    counts: &[AtomicU64],
) {
    let comma = if labels.is_empty() { "" } else { "," };
    for ((_, value), count) in L::ALL.iter().zip(counts) {
        let count = count.load(Ordering::Relaxed);
        let _ = writeln!(text, "{name}{{{labels}{comma}{label}=\"{value}\"}} {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_series_from_the_beginning_and_counts() {
        let metrics = Metrics::default();
        let text = || {
            let mut text = String::new();
            metrics.write(&mut text);
            text
        };
        let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
        let before = text();
        // Reconciliations, two histograms, events, errors and gauges.
        assert_eq!(series(&before), 3 * 4 + 2 * (BOUNDS.len() + 3) + 4 + 4 + 3);
        metrics.count_reconcile(ClaimKind::KIND, ReconcileResult::Success);
        metrics.count_reconcile("Pod", ReconcileResult::Success);
        metrics.observe_ready(ClaimKind::KIND, Duration::from_millis(40));
        metrics.observe_ready(ClaimKind::KIND, Duration::from_secs(500));
        metrics.count_sandbox(SandboxEvent::Adopted);
        metrics.count_error(ErrorSource::Server);
        metrics.note_queue(5, 6);
        metrics.note_failing(7);
        let after = text();
        assert_eq!(series(&after), series(&before));
        for line in [
            "afresh_kube_reconciles_total{kind=\"SandboxClaim\",result=\"success\"} 1",
            "afresh_kube_ready_seconds_bucket{kind=\"SandboxClaim\",le=\"0.025\"} 0",
            "afresh_kube_ready_seconds_bucket{kind=\"SandboxClaim\",le=\"0.05\"} 1",
            "afresh_kube_ready_seconds_bucket{kind=\"SandboxClaim\",le=\"60\"} 1",
            "afresh_kube_ready_seconds_bucket{kind=\"SandboxClaim\",le=\"+Inf\"} 2",
            "afresh_kube_ready_seconds_sum{kind=\"SandboxClaim\"} 500.04",
            "afresh_kube_ready_seconds_count{kind=\"Sandbox\"} 0",
            "afresh_kube_sandboxes_total{event=\"adopted\"} 1",
            "afresh_kube_errors_total{source=\"server\"} 1",
            "afresh_kube_waiting 5",
            "afresh_kube_running 6",
            "afresh_kube_failing 7",
        ] {
            assert!(after.lines().any(|found| found == line), "{line} is not in:\n{after}");
        }
    }
}
