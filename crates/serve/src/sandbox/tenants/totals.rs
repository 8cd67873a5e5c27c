//! The totals of a tenant for bills, as the server counts them and as its file has them.

use serde::{Deserialize, Serialize};

use crate::sandbox::request_body::unknown_fields::UnknownFields;

/// Totals of one tenant since its first use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Totals {
    /// CPU time of its sandboxes.
    pub(crate) cpu_seconds: f64,
    /// Memory of its live sandboxes over time.
    pub(crate) memory_byte_seconds: f64,
    /// Its saved states over time.
    pub(crate) stored_byte_seconds: f64,
    /// Bytes of its requests.
    pub(crate) received_bytes: u64,
    /// Bytes of answers to it.
    pub(crate) sent_bytes: u64,
    /// Bytes that its programs sent to servers outside.
    pub(crate) outbound_bytes: u64,
    /// Operations of its sandboxes.
    pub(crate) calls: u64,
    /// Sandboxes that it made.
    pub(crate) sandboxes: u64,
}

impl Totals {
    /// Adds those of another tenant.
    pub(crate) fn add(&mut self, other: &Self) {
        self.cpu_seconds += other.cpu_seconds;
        self.memory_byte_seconds += other.memory_byte_seconds;
        self.stored_byte_seconds += other.stored_byte_seconds;
        self.received_bytes += other.received_bytes;
        self.sent_bytes += other.sent_bytes;
        self.outbound_bytes += other.outbound_bytes;
        self.calls += other.calls;
        self.sandboxes += other.sandboxes;
    }
}

/// The totals of one tenant in the file.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct StoredTotals {
    #[serde(flatten)]
    pub(crate) totals: Totals,
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};

    #[test]
    fn the_file_of_totals_is_read_and_written_as_it_was() {
        let totals = Totals {
            cpu_seconds: 1.5,
            memory_byte_seconds: 2.5,
            stored_byte_seconds: 3.5,
            received_bytes: 4,
            sent_bytes: 5,
            outbound_bytes: 6,
            calls: 7,
            sandboxes: 8,
        };
        let stored = StoredTotals { totals, ..StoredTotals::default() };
        let file = BTreeMap::from([("acme".to_owned(), stored)]);
        check_goldens("usage", &file);
        check_unknown_fields::<BTreeMap<String, StoredTotals>>("usage", 2);
    }
}
