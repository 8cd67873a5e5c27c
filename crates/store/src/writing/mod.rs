//! Writing snapshots: layers, saves, compaction and folded turns.

pub(crate) mod compact;
pub(crate) mod fold;
pub(crate) mod layer_writer;
pub(crate) mod save;
#[cfg(feature = "remote")]
pub(crate) mod transcode;
