//! Calls of guests: the path into their code, the limits of a call, and its values.

pub(crate) mod bytes_entry;
pub(crate) mod dynamic;
pub(crate) mod entry;
pub(crate) mod lease_options;
pub(crate) mod scope;
pub(crate) mod store_calls;
pub(crate) mod stores;
pub(crate) mod unsatisfied;
pub(crate) mod values;
