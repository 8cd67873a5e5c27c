//! Opened snapshots: their pages, images, differences and turns.

pub(crate) mod diff;
mod identity;
pub(crate) mod image;
pub(crate) mod inspect;
pub(crate) mod open;
pub(crate) mod range_reader;
pub(crate) mod raw;
pub(crate) mod snapshot;
pub(crate) mod turns;
