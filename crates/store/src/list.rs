//! What a store holds, by name.

use crate::manifest::Manifest;
use crate::{OpenError, SaveError, Sha256, Store, Tag};

/// A snapshot in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Digest of its manifest.
    pub id: Sha256,
    /// Layers, the working set among them.
    pub layers: usize,
    /// Bytes of its layers and configuration. Snapshots share layers, so these do not add up.
    pub bytes: u64,
}

impl Listed {
    pub(crate) fn new(tag: Tag, manifest: &Manifest) -> Self {
        Self {
            name: tag.name,
            id: tag.id,
            layers: manifest.layers.len(),
            bytes: manifest
                .layers
                .iter()
                .map(|layer| layer.size)
                .fold(manifest.config.size, u64::saturating_add),
        }
    }
}

impl Store {
    /// Every name, in order, and what it means; an entry is an error when its manifest can not be read.
    /// Layers are not looked at.
    ///
    /// # Errors
    /// A damaged `index.json`.
    pub fn list(&self) -> Result<Vec<(String, Result<Listed, OpenError>)>, OpenError> {
        let entry = |tag: Tag| {
            let name = tag.name.clone();
            (name, self.read_manifest(tag.id).map(|manifest| Listed::new(tag, &manifest)))
        };
        Ok(self.tags()?.into_iter().map(entry).collect())
    }

    /// Removes a name and returns what it meant. What only that name reached stays until the next
    /// [`Store::gc`].
    ///
    /// # Errors
    /// [`OpenError::NoSuchName`] with the names there are; an I/O error, and the name stays then.
    pub fn untag(&self, name: &str) -> Result<Sha256, SaveError> {
        let tags = self.tags()?;
        match tags.iter().find(|tag| tag.name == name) {
            Some(tag) => {
                self.tag(name, None)?;
                Ok(tag.id)
            }
            None => Err(OpenError::NoSuchName {
                name: name.to_owned(),
                known: tags.into_iter().map(|tag| tag.name).collect(),
            }
            .into()),
        }
    }
}
