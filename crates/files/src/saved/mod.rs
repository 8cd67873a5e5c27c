//! Trees and kept layers as bytes, and back.

pub(crate) mod description;
pub(crate) mod footprint;
pub(crate) mod kept;
pub(crate) mod soundness;
pub(crate) mod wire;
