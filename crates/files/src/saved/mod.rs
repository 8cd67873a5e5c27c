//! Trees and stored layers as bytes, and back.

pub(crate) mod description;
pub(crate) mod footprint;
pub(crate) mod soundness;
pub(crate) mod stored_layers;
pub(crate) mod wire;
