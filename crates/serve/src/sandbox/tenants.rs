//! Budgets and use of tenants, and the admission of sandboxes and calls against them.

pub(crate) mod accounts;
pub(crate) mod admission;
pub(crate) mod budgets;
pub(crate) mod charge;
pub(crate) mod cpu_scheduler;
pub(crate) mod entry_size;
pub(crate) mod idle_processors;
pub(crate) mod memory;
pub(crate) mod processor_metrics;
pub(crate) mod quota;
#[cfg(test)]
mod scheduler_model;
mod scheduler_state;
pub(crate) mod state_charges;
pub(crate) mod stored_blobs;
pub(crate) mod tenant_queue;
pub(crate) mod totals;
pub(crate) mod usage;
