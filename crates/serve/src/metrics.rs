//! Metrics in the text format of Prometheus.
//!
//! Promises: counting a request takes no lock that other guests' requests want.

use std::sync::Mutex;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::audit::AuditLog;
use crate::health_check::Check;
use crate::labels::{Labels, gauge, labels, two};
use crate::lock::lock;
use crate::pool_metrics::{PoolMetrics, Pools};
use crate::resident::resident_bytes;
#[cfg(feature = "fleet")]
use crate::store_metrics::StoreRetries;

/// Bounds of the histograms in seconds: from a warm call to a long computation.
const BOUNDS: [f64; 15] = [
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 0.5, 2.5, 10.0,
    60.0,
];

#[derive(Clone, Debug)]
struct Bounds;

impl MetricConstructor<Histogram> for Bounds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BOUNDS)
    }
}

/// The statuses that requests usually end with.
const COMMON_STATUSES: [u16; 9] = [200, 400, 404, 408, 413, 429, 500, 503, 504];

/// Everything that a server counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    seconds: Family<Labels, Histogram, Bounds>,
    failures: Family<Labels, Counter>,
    running: Family<Labels, Gauge>,
    waiting: Family<Labels, Gauge>,
    pub(crate) pools: Pools,
    sandboxes: Family<Labels, Gauge>,
    healthy: Family<Labels, Gauge>,
    pub(crate) connections: Gauge,
    pub(crate) buffered: Gauge,
    resident: Gauge,
    /// Requests and connections refused for a limit of their address.
    pub(crate) refused_addresses: Counter,
    pub(crate) reloads: Counter,
    pub(crate) failed_reloads: Counter,
}

/// Number of requests of each guest whose times are kept.
const MAX_RECENT_REQUESTS: usize = 512;

/// The times of the last requests.
#[derive(Debug)]
struct DurationWindow {
    requests: u64,
    microseconds: Vec<f32>,
}

/// Times of the last requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RecentRequests {
    /// The total number.
    pub(crate) requests: u64,
    /// The median of the last ones, in microseconds; `None` without requests.
    pub(crate) median: Option<f32>,
    pub(crate) p99: Option<f32>,
}

/// Metrics of one guest.
#[derive(Debug)]
pub(crate) struct GuestMetrics {
    times: Mutex<DurationWindow>,
    usual: [Counter; COMMON_STATUSES.len()],
    other: Family<Labels, Counter>,
    pub(crate) seconds: Histogram,
    failures: Family<Labels, Counter>,
    guest: String,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("afresh");
        let requests = Family::<Labels, Counter>::default();
        registry.register("requests", "Requests that ended, by status", requests.clone());
        let seconds = Family::<Labels, Histogram, Bounds>::new_with_constructor(Bounds);
        registry.register_with_unit(
            "request",
            "Time from a request's head to its answer's",
            Unit::Seconds,
            seconds.clone(),
        );
        let failures = Family::<Labels, Counter>::default();
        registry.register(
            "failures",
            "Failed calls, by kind: guest, request, instance, host or timeout",
            failures.clone(),
        );
        let running = Family::<Labels, Gauge>::default();
        registry.register("running", "Requests that a guest is answering", running.clone());
        let waiting = Family::<Labels, Gauge>::default();
        registry.register("waiting", "Requests that wait for a place", waiting.clone());
        let pools = Pools::register(&mut registry);
        let sandboxes = Family::<Labels, Gauge>::default();
        registry.register("sandboxes", "Sandboxes, by where they live", sandboxes.clone());
        let healthy = Family::<Labels, Gauge>::default();
        let help =
            "Whether the lease, the directory and the fleet's store work and calls end: 1 or 0";
        registry.register("healthy", help, healthy.clone());
        let connections = Gauge::default();
        registry.register("connections", "Open connections", connections.clone());
        let buffered = Gauge::default();
        registry.register_with_unit(
            "buffered",
            "Requests and answers held in memory",
            Unit::Bytes,
            buffered.clone(),
        );
        let resident = Gauge::default();
        registry.register_with_unit(
            "process_resident",
            "Resident memory of the server process, including images",
            Unit::Bytes,
            resident.clone(),
        );
        #[cfg(feature = "fleet")]
        registry.register_collector(Box::new(StoreRetries));
        let refused_addresses = Counter::default();
        let help = "Requests and connections refused for a limit of their client's address";
        registry.register("refused_addresses", help, refused_addresses.clone());
        let reloads = Counter::default();
        registry.register("reloads", "Times that the guests were exchanged", reloads.clone());
        let failed_reloads = Counter::default();
        registry.register(
            "failed_reloads",
            "Reloads that were refused, so that the previous configuration stays in effect",
            failed_reloads.clone(),
        );
        Self {
            registry,
            requests,
            seconds,
            failures,
            running,
            waiting,
            pools,
            sandboxes,
            connections,
            buffered,
            resident,
            healthy,
            refused_addresses,
            reloads,
            failed_reloads,
        }
    }

    /// Adds the metrics of a fleet.
    #[cfg(feature = "fleet")]
    pub(crate) fn count_fleet(&mut self, counts: &crate::fleet::Counts) {
        let fleet = self.registry.sub_registry_with_prefix("fleet");
        let all = [
            ("calls_held", "Calls that went to a host that holds what they need", &counts.held),
            ("calls_elsewhere", "Calls that went to a host that does not", &counts.elsewhere),
            ("calls_forwarded", "Calls that another host answered", &counts.forwarded),
            ("taken", "Sandboxes that were taken over", &counts.taken),
            (
                "lost",
                "Sandboxes that ended, or were lost before they were ever saved",
                &counts.lost,
            ),
            (
                "unreadable",
                "Times that a list left out an entry that cannot be read",
                &counts.unreadable,
            ),
            ("unswept", "Sandboxes of lost hosts that were not released yet", &counts.unswept),
            ("adverts", "Heartbeats received from hosts", &counts.adverts),
        ];
        for (name, help, counter) in all {
            fleet.register(name, help, counter.clone());
        }
    }

    /// Adds the metrics of traces.
    #[cfg(feature = "otel")]
    pub(crate) fn count_traces(&mut self, counts: &crate::otel::Counts) {
        let spans = self.registry.sub_registry_with_prefix("spans");
        spans.register("exported", "Spans that a collector took", counts.exported.clone());
        spans.register("dropped", "Spans that no collector has", counts.dropped.clone());
    }

    /// The metrics of the guest of this name.
    pub(crate) fn guest(&self, name: &str) -> GuestMetrics {
        let requests = |code| self.requests.get_or_create_owned(&two(name, "code", code));
        GuestMetrics {
            times: Mutex::new(DurationWindow {
                requests: 0,
                microseconds: Vec::with_capacity(MAX_RECENT_REQUESTS),
            }),
            usual: COMMON_STATUSES.map(requests),
            other: self.requests.clone(),
            seconds: self.seconds.get_or_create_owned(&labels(name)),
            failures: self.failures.clone(),
            guest: name.to_owned(),
        }
    }

    /// Sets how many requests of a guest run and wait.
    pub(crate) fn set(&self, name: &str, (running, waiting): (usize, usize)) {
        let labels = labels(name);
        self.running.get_or_create(&labels).set(gauge(running));
        self.waiting.get_or_create(&labels).set(gauge(waiting));
    }

    /// Sets whether a part that the server relies on is healthy.
    pub(crate) fn set_healthy(&self, check: Check, is_healthy: bool) {
        let labels = vec![("check", check.name().to_owned())];
        self.healthy.get_or_create(&labels).set(i64::from(is_healthy));
    }

    /// The number of sandboxes in this process, and in the store.
    pub(crate) fn set_sandboxes(&self, live: usize, saved: usize) {
        for (place, count) in [("live", live), ("saved", saved)] {
            let labels = vec![("place", place.to_owned())];
            self.sandboxes.get_or_create(&labels).set(gauge(count));
        }
    }

    /// Adds the metrics of the audit log.
    pub(crate) fn count_audit(&mut self, log: &AuditLog) {
        let audit = self.registry.sub_registry_with_prefix("audit");
        audit.register("records", "Lines written to the audit log", log.records.clone());
        let help = "Lines that could not be written to the audit log, and failed reopens";
        audit.register("failures", help, log.failures.clone());
    }

    /// The text format with one sample of each metric, for the reference.
    pub(crate) fn sample(&self) -> String {
        let guest = self.guest("guest");
        guest.ended(200, 0.0);
        guest.failed("guest");
        self.set("guest", (0, 0));
        self.set_sandboxes(0, 0);
        self.set_healthy(Check::Directory, true);
        self.set_healthy(Check::Calls, true);
        let mut stats = afresh::pool::PoolStats::default();
        stats.quarantines.insert("reason", 0);
        PoolMetrics::new(&self.pools, "guest", ("kind", "mode", "strategy")).show(stats);
        self.text("").trim_end_matches("# EOF\n").to_owned()
    }

    /// Everything, as Prometheus reads it. `further` are metrics that are not counted here.
    pub(crate) fn text(&self, further: &str) -> String {
        self.resident.set(gauge(resident_bytes()));
        let mut text = String::new();
        // Writing to a string never fails.
        let _ = encode_registry(&mut text, &self.registry);
        text.push_str(further);
        let _ = encode_eof(&mut text);
        text
    }
}

impl GuestMetrics {
    /// A request ended.
    pub(crate) fn ended(&self, status: u16, seconds: f64) {
        match COMMON_STATUSES.iter().position(|usual| *usual == status) {
            Some(place) => self.usual[place].inc(),
            None => self.other.get_or_create(&two(&self.guest, "code", status)).inc(),
        };
        self.seconds.observe(seconds);
        let mut times = lock(&self.times);
        let place = usize::try_from(times.requests % MAX_RECENT_REQUESTS as u64).unwrap_or(0);
        let microseconds = (seconds * 1e6) as f32;
        match times.microseconds.get_mut(place) {
            Some(old) => *old = microseconds,
            None => times.microseconds.push(microseconds),
        }
        times.requests += 1;
    }

    /// Times of the last requests.
    pub(crate) fn recent(&self) -> RecentRequests {
        let times = lock(&self.times);
        let (requests, mut sorted) = (times.requests, times.microseconds.clone());
        drop(times);
        sorted.sort_by(f32::total_cmp);
        let of = |share: usize| sorted.get(sorted.len().saturating_sub(1) * share / 100).copied();
        RecentRequests { requests, median: of(50), p99: of(99) }
    }

    /// A call failed.
    pub(crate) fn failed(&self, kind: &'static str) {
        self.failures.get_or_create(&two(&self.guest, "kind", kind)).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_requests_are_remembered_and_no_more() {
        let guest = Metrics::new().guest("g");
        assert_eq!(guest.recent(), RecentRequests { requests: 0, median: None, p99: None });
        for request in 0..1000 {
            guest.ended(200, f64::from(request) * 1e-6);
        }
        let recent = guest.recent();
        assert_eq!(recent.requests, 1000);
        let median = recent.median.unwrap();
        assert!((700.0..800.0).contains(&median), "{median}");
        assert!(recent.p99.unwrap() > 990.0);
    }

    #[test]
    fn counters_are_exposed_in_the_prometheus_text_format() {
        let metrics = Metrics::new();
        let guest = metrics.guest("a \"guest\"");
        guest.ended(200, 0.0001);
        guest.ended(200, 3.0);
        guest.ended(418, 0.0);
        guest.failed("timeout");
        metrics.set("a \"guest\"", (1, 2));
        let text = metrics.text("");
        for line in [
            r#"afresh_requests_total{guest="a \"guest\"",code="200"} 2"#,
            r#"afresh_requests_total{guest="a \"guest\"",code="418"} 1"#,
            r#"afresh_request_seconds_count{guest="a \"guest\""} 3"#,
            r#"afresh_request_seconds_bucket{le="0.0001",guest="a \"guest\""} 2"#,
            r#"afresh_failures_total{guest="a \"guest\"",kind="timeout"} 1"#,
            r#"afresh_running{guest="a \"guest\""} 1"#,
            r#"afresh_waiting{guest="a \"guest\""} 2"#,
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
