//! The snapshots of a store, by name.

use crate::blobs::source::read_manifest;
use crate::format::manifest::Manifest;
use crate::{OpenError, SaveError, Sha256, Store, Tag};

/// A name in a list, and what was found behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry<E> {
    /// The name and the snapshot it means.
    pub tag: Tag,
    /// Its manifest, or why that cannot be read.
    pub extent: Result<Extent, E>,
}

/// How large a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Layers, the working set among them.
    pub layers: usize,
    /// Bytes of its layers and configuration. Snapshots share layers, so these do not add up.
    pub bytes: u64,
}

impl Extent {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        let sizes = manifest.layers.iter().map(|layer| layer.size);
        Self {
            layers: manifest.layers.len(),
            bytes: sizes.fold(manifest.config.size, u64::saturating_add),
        }
    }
}

impl Store {
    /// Every name, in order, and how large what it means is. Layers are not looked at.
    ///
    /// # Errors
    /// A damaged `index.json`.
    pub fn list(&self) -> Result<Vec<ListEntry<OpenError>>, OpenError> {
        let entry = |tag: Tag| {
            let extent = read_manifest(self, tag.id).map(|manifest| Extent::of(&manifest));
            ListEntry { tag, extent }
        };
        Ok(self.tags()?.into_iter().map(entry).collect())
    }

    /// Removes a name and returns what it meant. Blobs that only that name reached stay until the
    /// next [`Store::gc`].
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
