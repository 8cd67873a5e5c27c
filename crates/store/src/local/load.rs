//! Opening the snapshots of a store by name.

use crate::seal::access::Access;
use crate::snapshots::open::open_snapshot;
use crate::{OpenError, Sha256, Snapshot, Store};

impl Store {
    /// Opens the snapshot with the name `name`, a tag or a digest.
    ///
    /// Reads and checks the manifest, the configuration and the index of every layer, and no page.
    ///
    /// # Errors
    /// [`OpenError`] by cause.
    pub fn load(&self, name: &str) -> Result<Snapshot, OpenError> {
        self.load_with(name, &Access::new())
    }

    /// Opens the snapshot whose manifest has digest `id`.
    ///
    /// # Errors
    /// [`OpenError`] by cause.
    pub fn load_id(&self, id: Sha256) -> Result<Snapshot, OpenError> {
        Ok(open_snapshot(self, id, &Access::new())?.in_directory(self.root()))
    }

    /// Opens the snapshot `name` if it meets the demands of `access`: signed by a trusted key,
    /// sealed with the given one, within limits. Only the manifest is read before the signature is
    /// verified.
    ///
    /// # Errors
    /// [`OpenError::Seal`] by cause, and those of [`Store::load`].
    pub fn load_with(&self, name: &str, access: &Access) -> Result<Snapshot, OpenError> {
        // Takes no lock, so that a `gc` or a save under way holds up no guest. A blob that `gc`
        // removes at the same time had lost its name before, so the name means another snapshot by
        // then.
        let (mut id, mut named) = self.resolve_named(name)?;
        loop {
            match open_snapshot(self, id, access) {
                Err(error) if error.is_missing_file() => {
                    let now = self.resolve_named(name).ok().filter(|(now, _)| *now != id);
                    (id, named) = now.ok_or(error)?;
                }
                // A digest never changes its target.
                opened => {
                    let snapshot = opened?.in_directory(self.root());
                    return Ok(match &named {
                        Some(name) => snapshot.with_name(self.root(), name),
                        None => snapshot,
                    });
                }
            }
        }
    }
}
