//! Metrics of the object stores and registries that this process uses.

use std::fmt;

use afresh::store::remote::RetryCounts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;

/// Retries of requests, read at each scrape.
#[derive(Debug)]
pub(crate) struct StoreRetries;

impl Collector for StoreRetries {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = RetryCounts::of_process();
        let all = [
            ("store_retries", "Requests sent to a store again", counts.retries),
            (
                "store_retries_refused",
                "Retries refused because most requests to the store fail",
                counts.refused,
            ),
        ];
        for (name, help, count) in all {
            let counter = ConstCounter::new(count);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}
