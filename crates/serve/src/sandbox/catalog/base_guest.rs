//! The guest that a sandbox is restarted from.

use std::sync::Arc;

use crate::sandbox::catalog::template::Warm;
use crate::sandbox::records::store::StoredSnapshot;

/// The guest that a sandbox is restarted from.
pub(crate) enum BaseGuest {
    /// That of a template of the configuration.
    Template(Arc<Warm>),
    /// That of a build, and the template whose options it has.
    Build(Arc<Warm>, Box<StoredSnapshot>),
}
