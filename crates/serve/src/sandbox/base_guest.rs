//! The guest that a sandbox is restarted from.

use std::sync::Arc;

use super::store::StoredSnapshot;
use super::template::Warm;

/// The guest that a sandbox is restarted from.
pub(super) enum BaseGuest {
    /// That of a template of the configuration.
    Template(Arc<Warm>),
    /// That of a build, and the template whose options it has.
    Build(Arc<Warm>, Box<StoredSnapshot>),
}
