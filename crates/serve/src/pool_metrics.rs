//! Metrics of the guests' pools in the text format of Prometheus.
//!
//! Promises: a count never goes back, even when a guest is exchanged and its pool begins anew; the
//! sum includes the old pool's counts until its last request ended. Numbers of a removed guest are
//! not shown as if it were there.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use afresh::pool::{PoolStats, ResetStats};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};

use crate::labels::{Labels, gauge, labels, two};
use crate::lock::lock;

type Count = Counter<u64, AtomicU64>;

/// Resets by the pages that they copied back. The pools count them; this shows their sums.
#[derive(Clone, Debug, Default)]
struct PageCounts(Arc<Mutex<ResetStats>>);

impl TypedMetric for PageCounts {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for PageCounts {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let sums = *lock(&self.0);
        let bounds = ResetStats::BOUNDS.into_iter().map(|bound| bound as f64).chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(sums.by_pages).collect();
        encoder.encode_histogram::<Labels>(sums.pages as f64, sums.count(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Metrics of all pools.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pools {
    alive: Family<Labels, Gauge>,
    idle: Family<Labels, Gauge>,
    resident: Family<Labels, Gauge>,
    about: Family<Labels, Gauge>,
    pages: Family<Labels, PageCounts>,
    created: Family<Labels, Count>,
    returned: Family<Labels, Count>,
    grown: Family<Labels, Count>,
    discarded: Family<Labels, Count>,
    replaced: Family<Labels, Count>,
    trimmed: Family<Labels, Count>,
    dropped: Family<Labels, Count>,
    quarantined: Family<Labels, Count>,
}

impl Pools {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let pools = Self::default();
        registry.register("pool_alive", "Instances alive", pools.alive.clone());
        registry.register("pool_idle", "Instances that are warm and idle", pools.idle.clone());
        registry.register_with_unit(
            "pool_resident",
            "Private memory that idle instances keep",
            Unit::Bytes,
            pools.resident.clone(),
        );
        let help = "Kind, isolation and reset strategy of each guest; always 1";
        registry.register("guest_info", help, pools.about.clone());
        let help = "Resets, by pages copied back";
        registry.register("reset_pages", help, pools.pages.clone());
        for (name, help, family) in [
            ("pool_created", "Instances made", &pools.created),
            ("pool_returned", "Instances reset", &pools.returned),
            ("pool_grown", "Resets of instances whose memory a call had grown", &pools.grown),
            (
                "pool_discarded",
                "Resets of instances by discarding pages instead of copying them",
                &pools.discarded,
            ),
            (
                "pool_replaced",
                "Instances whose memory came back and whose rest was made anew",
                &pools.replaced,
            ),
            ("pool_trimmed", "Instances that gave memory up for the pool's budget", &pools.trimmed),
            ("pool_dropped", "Instances put out of use, by reason", &pools.dropped),
            (
                "pool_quarantined",
                "Instances that could not be reset, by reason",
                &pools.quarantined,
            ),
        ] {
            registry.register(name, help, family.clone());
        }
        pools
    }
}

/// Metrics of one guest's pool. They are dropped with the pool.
#[derive(Debug)]
pub(crate) struct PoolMetrics {
    pools: Pools,
    guest: String,
    about: Labels,
    /// The last counts; later ones are still to be added.
    seen: Mutex<PoolStats>,
}

impl PoolMetrics {
    pub(crate) fn new(
        pools: &Pools,
        guest: &str,
        (kind, mode, strategy): (&str, &str, &str),
    ) -> Self {
        let mut about = labels(guest);
        for (name, value) in [("kind", kind), ("mode", mode), ("strategy", strategy)] {
            about.push((name, value.to_owned()));
        }
        let (pools, guest) = (pools.clone(), guest.to_owned());
        Self { pools, guest, about, seen: Mutex::new(PoolStats::default()) }
    }

    /// Adds the present state of the pool.
    pub(crate) fn show(&self, stats: PoolStats) {
        let labels = labels(&self.guest);
        self.pools.about.get_or_create(&self.about).set(1);
        self.pools.alive.get_or_create(&labels).set(gauge(stats.alive));
        self.pools.idle.get_or_create(&labels).set(gauge(stats.idle));
        self.pools.resident.get_or_create(&labels).set(gauge(stats.resident_bytes));
        self.add(stats);
    }

    /// Adds the counts since the last time.
    fn add(&self, now: PoolStats) {
        let mut seen = lock(&self.seen);
        let labels = labels(&self.guest);
        let (resets, before) = (&now.resets, &seen.resets);
        for (family, now, before) in [
            (&self.pools.created, now.created, seen.created),
            (&self.pools.returned, now.returned, seen.returned),
            (&self.pools.grown, resets.grown, before.grown),
            (&self.pools.discarded, resets.discarded, before.discarded),
            (&self.pools.replaced, resets.replaced, before.replaced),
            (&self.pools.trimmed, now.trimmed, seen.trimmed),
        ] {
            family.get_or_create(&labels).inc_by(now.saturating_sub(before));
        }
        for (reason, now, before) in [
            ("quarantined", now.quarantined, seen.quarantined),
            ("abandoned", now.abandoned, seen.abandoned),
            ("beyond_limit", now.on_demand, seen.on_demand),
            ("evicted", now.evicted, seen.evicted),
        ] {
            let labels = two(&self.guest, "reason", reason);
            self.pools.dropped.get_or_create(&labels).inc_by(now.saturating_sub(before));
        }
        for (reason, count) in &now.quarantines {
            let before = seen.quarantines.get(reason).copied().unwrap_or(0);
            let labels = two(&self.guest, "reason", reason);
            self.pools.quarantined.get_or_create(&labels).inc_by(count.saturating_sub(before));
        }
        let pages = self.pools.pages.get_or_create_owned(&labels);
        lock(&pages.0).join(&resets.since(before));
        *seen = now;
    }

    /// Records the last counts of a pool before it is dropped.
    pub(crate) fn end(&self, stats: PoolStats) {
        self.add(stats);
        let labels = labels(&self.guest);
        // Another guest of this name shows its own with the next reading.
        self.pools.about.remove(&self.about);
        for family in [&self.pools.alive, &self.pools.idle, &self.pools.resident] {
            family.remove(&labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn counters_survive_the_replacement_of_a_guest_and_its_gauges_do_not() {
        let mut registry = Registry::default();
        let pools = Pools::register(&mut registry);
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        let pool = |created, quarantined| {
            let mut stats = PoolStats::default();
            (stats.created, stats.alive) = (created, 3);
            stats.quarantines.insert("system", quarantined);
            stats.resets.by_pages = [1, 0, 0, 5, 0, 0, 0, 0, 0, 2];
            (stats.resets.pages, stats.resets.grown) = (80_000, 1);
            stats
        };
        let about = ("module", "fresh", "write-set-uffd");
        let old = PoolMetrics::new(&pools, "g", about);
        old.show(pool(5, 0));
        old.show(pool(7, 1));
        let new = PoolMetrics::new(&pools, "g", about);
        new.show(pool(2, 1));
        old.end(pool(8, 1));
        let shown = text(&registry);
        for line in [
            r#"pool_created_total{guest="g"} 10"#,
            r#"pool_quarantined_total{guest="g",reason="system"} 2"#,
            r#"pool_grown_total{guest="g"} 2"#,
            r#"reset_pages_sum{guest="g"} 160000"#,
            r#"reset_pages_count{guest="g"} 16"#,
            r#"reset_pages_bucket{le="0.0",guest="g"} 2"#,
            r#"reset_pages_bucket{le="16.0",guest="g"} 12"#,
            r#"reset_pages_bucket{le="16384.0",guest="g"} 12"#,
            r#"reset_pages_bucket{le="+Inf",guest="g"} 16"#,
        ] {
            assert!(shown.contains(line), "{line} is not in\n{shown}");
        }
        assert!(!shown.contains("pool_alive{"), "{shown}");
        new.show(pool(2, 1));
        let shown = text(&registry);
        assert!(shown.contains(r#"pool_alive{guest="g"} 3"#), "{shown}");
        assert!(
            shown.contains(
                r#"guest_info{guest="g",kind="module",mode="fresh",strategy="write-set-uffd"} 1"#
            ),
            "{shown}"
        );
    }
}
