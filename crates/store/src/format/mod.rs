//! The bytes and documents of a snapshot: codecs, limits and errors. It imports no other room.

pub(crate) mod blob;
pub(crate) mod descriptor;
pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod guest;
pub(crate) mod index;
pub(crate) mod json;
pub(crate) mod layout;
pub(crate) mod limits;
pub(crate) mod manifest;
pub(crate) mod map;
pub(crate) mod pages;
pub(crate) mod redacted_url;
