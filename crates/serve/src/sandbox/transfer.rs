//! Files of a sandbox on their way in and out.

pub(crate) mod downloads;
pub(crate) mod file_access;
pub(crate) mod file_body;
pub(crate) mod file_entry;
pub(crate) mod file_metadata;
pub(crate) mod file_transfer;
