//! Bodies of requests, decoded within a budget. These files use nothing else of the server, so that
//! a fuzz target compiles them alone.

pub(crate) mod checkpoint_requests;
pub(crate) mod multipart;
pub(crate) mod network_rules;
pub(crate) mod requests;
pub(crate) mod template_requests;
pub(crate) mod unknown_fields;
pub(crate) mod weight;
