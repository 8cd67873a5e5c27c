//! Facts for the generated reference: the keys of the configuration, and the metrics.
//!
//! Not a part of the interface: the command's tests compare `docs/reference/all.md` with it.

use crate::audit::{AuditConfig, AuditLog};
use crate::metrics::Metrics;

/// A metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name in the text format.
    pub name: String,
    /// Its type.
    pub kind: String,
    /// Its meaning.
    pub help: String,
}

/// Every metric of a server with all features of this build, by name.
///
/// # Panics
/// Without `/dev/null`.
#[must_use]
pub fn metrics() -> Vec<Metric> {
    let mut metrics = Metrics::new();
    #[cfg(feature = "fleet")]
    metrics.count_fleet(&crate::fleet::Counts::default());
    #[cfg(feature = "otel")]
    metrics.count_traces(&crate::otel::Counts::default());
    let log = AuditLog::open(&AuditConfig::new("/dev/null")).expect("it can be opened");
    metrics.count_audit(&log);
    let text = metrics.sample() + &crate::sandbox::sample_tenant_metrics();
    let mut all = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let kind = lines.next().and_then(|line| line.rsplit(' ').next()).unwrap_or_default();
        let suffix = if kind == "counter" { "_total" } else { "" };
        let help = help.trim_end_matches('.').to_owned();
        all.push(Metric { name: format!("{name}{suffix}"), kind: kind.to_owned(), help });
    }
    all.sort_by(|one, two| one.name.cmp(&two.name));
    all
}

pub use crate::manifest::keys;
