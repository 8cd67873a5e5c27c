//! Page layers in blobs, and stacks of them.

pub(crate) mod blob_sink;
pub(crate) mod layer;
pub(crate) mod stack;
