//! Blobs by digest: in files, and in any store of blobs.

pub(crate) mod file;
pub(crate) mod source;
