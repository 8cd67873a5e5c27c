//! Metrics of the scheduler of processors, by tenant.
//!
//! Promises: their labels are those of [`Account::label`](super::accounts::Account::label), so
//! their number is bounded.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::labels::{Labels, escape};

/// Bounds of the histogram in seconds: from a part of a turn to the time limit of a call.
const BOUNDS: [f64; 14] =
    [1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0];

#[derive(Clone, Debug)]
struct Bounds;

impl MetricConstructor<Histogram> for Bounds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BOUNDS)
    }
}

/// The waits of calls for processors, and their refusals.
pub(crate) struct ProcessorMetrics {
    waits: Family<Labels, Histogram, Bounds>,
    refused: Family<Labels, Counter>,
}

impl Default for ProcessorMetrics {
    fn default() -> Self {
        Self { waits: Family::new_with_constructor(Bounds), refused: Family::default() }
    }
}

impl ProcessorMetrics {
    /// The times that calls of a tenant wait.
    pub(crate) fn waits(&self, label: &str) -> Histogram {
        self.waits.get_or_create_owned(&labels(label))
    }

    /// Counts a call that was refused because no processor became free.
    pub(crate) fn count_refusal(&self, label: &str) {
        self.refused.get_or_create(&labels(label)).inc();
    }

    /// Shows them in the metrics of tenants.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Time that a call waited for processors, at its beginning and between its turns";
        registry.register_with_unit("processor_wait", help, Unit::Seconds, self.waits.clone());
        let help = "Calls refused because no processor became free in time";
        registry.register("processor_refused", help, self.refused.clone());
    }

    /// Each of them for one tenant, for the reference.
    pub(crate) fn sample() -> Self {
        let sample = Self::default();
        sample.waits("tenant");
        drop(sample.refused.get_or_create(&labels("tenant")));
        sample
    }
}

fn labels(label: &str) -> Labels {
    vec![("tenant", escape(label))]
}
