//! Read-only layers: host directories, archives and OCI images. They know no tree.

pub(crate) mod archive;
pub(crate) mod detect;
pub(crate) mod docker_archive;
#[cfg(target_os = "linux")]
pub(crate) mod host;
#[cfg(not(target_os = "linux"))]
#[path = "host_absent.rs"]
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod item;
pub(crate) mod layer;
pub(crate) mod layer_bytes;
pub(crate) mod name_lookup;
pub(crate) mod oci_document;
pub(crate) mod packed;
pub(crate) mod regular_file;
pub(crate) mod stack;
pub(crate) mod tar;
pub(crate) mod zip;
