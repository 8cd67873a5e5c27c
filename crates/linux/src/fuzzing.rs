//! Entry points of fuzz targets, under `cfg(fuzzing)` only.

pub use crate::frozen::read_state;
pub use crate::load::parse_program;
