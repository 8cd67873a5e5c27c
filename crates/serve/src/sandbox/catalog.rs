//! Sources of sandboxes: templates, builds and snapshots.

pub(crate) mod base_guest;
pub(crate) mod base_state;
pub(crate) mod build;
pub(crate) mod build_image;
mod build_layers;
pub(crate) mod build_log;
pub(crate) mod build_request;
pub(crate) mod builds;
pub(crate) mod image_name;
pub(crate) mod snapshots;
mod step_environment;
pub(crate) mod template;
pub(crate) mod template_identity;
pub(crate) mod template_list;
pub(crate) mod template_source;
pub(crate) mod templates;
