//! The snapshots of a store, by name.

use crate::blobs::source::read_manifest;
use crate::format::manifest::Manifest;
use crate::{OpenError, SaveError, Sha256, Store, Tag};

/// A name in a list, with its snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry<E> {
    /// The name and its snapshot.
    pub tag: Tag,
    /// The sizes from its manifest, or the error of reading it.
    pub extent: Result<Extent, E>,
}

/// Sizes of a snapshot.
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
    /// Lists every name in order, with the size of its snapshot. Layers are not read.
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

    /// Removes a name and returns its snapshot. Blobs that become unreachable stay until the next
    /// [`Store::gc`].
    ///
    /// # Errors
    /// [`OpenError::NoSuchName`] with the existing names, or an I/O error; the name stays then.
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
