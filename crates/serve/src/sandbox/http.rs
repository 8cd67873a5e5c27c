//! Requests about sandboxes in E2B's shape, and who may make them: keys, tokens, signatures,
//! routes, lists and the extensions.

pub(crate) mod authorization;
pub(crate) mod control;
pub(crate) mod extensions;
pub(crate) mod keys;
pub(crate) mod listing;
pub(crate) mod overview;
pub(crate) mod request_record;
pub(crate) mod response;
pub(crate) mod routes;
pub(crate) mod session_error;
pub(crate) mod signature;
pub(crate) mod token_search;
pub(crate) mod usage_report;
pub(crate) mod user;
