//! The layers below a guest's files, as an image: in its snapshots once, however often it is saved.
//!
//! Promises: later saves of a guest or its sessions reuse the same pages, which cost nothing more.
//! An opened guest reads only the pages that its calls read. May break it: as for any snapshot, an
//! unreadable page: the read fails with its reason.

use std::sync::Arc;

use afresh_files::{Budget, LayerBytes, Refused, Tree, TreeError};
use afresh_memory::{Image, ImageBuilder, ImageError, PAGE_SIZE, PageRange, page_align_up};
use serde::{Deserialize, Serialize};

/// Maximum length of a description: half a million files with long names.
const MAX_DESCRIPTION: usize = 64 << 20;

/// Layers could not be made pages, or pages layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// A layer cannot be read, or what was kept of it is damaged.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// Pages cannot be stored or fetched.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The description is longer than any that is written.
    #[error("the description of the layers is too long, take fewer files into the guest: {0}")]
    Description(#[from] afresh_budget::BudgetExceeded),
}

/// Charges a description of `bytes` bytes, before it is allocated.
fn charge_description(
    bytes: usize,
) -> Result<afresh_budget::Charge, afresh_budget::BudgetExceeded> {
    afresh_budget::Budget::new("layer description", MAX_DESCRIPTION).charge(bytes)
}

impl From<Refused> for LayersError {
    fn from(error: Refused) -> Self {
        Self::Tree(error.into())
    }
}

/// Layers as pages: those of their description, and then those of their files.
#[derive(Clone, Debug)]
pub struct LayerImage {
    described: usize,
    pages: Image,
}

/// The mark that distinguishes the two in a snapshot.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SavedLayers {
    /// Bytes of the description.
    described: u64,
    /// Pages of files.
    pages: u64,
}

impl LayerImage {
    /// Those of a tree. From then on every tree over the host directories shows the content that
    /// was kept here.
    ///
    /// # Errors
    /// [`LayersError`].
    pub fn of(tree: &Tree) -> Result<Self, LayersError> {
        loop {
            let kept = tree.stored_layers()?;
            let described = kept.description().len();
            // Readers refuse longer ones.
            charge_description(described)?;
            let first = page_align_up(described) / PAGE_SIZE;
            let mut image = ImageBuilder::new(first + kept.pages() as usize);
            image.segment(0, kept.description())?;
            kept.read(|page, bytes| {
                let at = (first + page as usize) * PAGE_SIZE;
                image.segment(at, bytes).map(drop).map_err(LayersError::from)
            })?;
            let layers = Self { described, pages: image.build()? };
            // Where another has kept them meanwhile, its bytes count, and are there the next time.
            if kept.settle(&layers.bytes()) {
                return Ok(layers);
            }
        }
    }

    /// The pages.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.pages
    }

    /// Their other properties.
    #[must_use]
    pub fn saved(&self) -> SavedLayers {
        let pages = self.pages.pages() - page_align_up(self.described) / PAGE_SIZE;
        SavedLayers { described: self.described as u64, pages: pages as u64 }
    }

    /// An empty tree over them. Bytes from strangers are checked.
    ///
    /// # Errors
    /// [`LayersError`] where they are damaged or cannot be fetched.
    pub fn tree(&self, budget: Budget) -> Result<Tree, LayersError> {
        let charge = charge_description(self.described)?;
        let first = page_align_up(self.described) / PAGE_SIZE;
        self.pages.resolve(PageRange::new(0, first))?;
        let mut description = vec![0; self.described];
        self.pages.read(0, &mut description);
        let pages = self.pages.pages() - first;
        let tree = Tree::with_stored_layers(budget, &description, pages as u64, &self.bytes());
        drop(charge);
        Ok(tree?)
    }

    /// The files' bytes.
    fn bytes(&self) -> Arc<dyn LayerBytes> {
        let first = page_align_up(self.described) / PAGE_SIZE;
        let files = PageRange::new(first, self.pages.pages() - first);
        Arc::new(Bytes(self.pages.slice(files)))
    }
}

impl SavedLayers {
    /// Bytes of the pages; more than any snapshot has where they do not add up.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        let described = self.described.checked_next_multiple_of(PAGE_SIZE as u64);
        let files = self.pages.checked_mul(PAGE_SIZE as u64);
        described.zip(files).and_then(|(a, b)| a.checked_add(b)).unwrap_or(u64::MAX)
    }

    /// Takes the pages, as many as [`SavedLayers::page_bytes`] counts, out of a snapshot.
    #[must_use]
    pub fn take(self, pages: Image) -> LayerImage {
        LayerImage { described: self.described as usize, pages }
    }
}

/// Files' bytes in an image, whose pages may still be arriving.
#[derive(Debug)]
struct Bytes(Image);

impl LayerBytes for Bytes {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<(), String> {
        let outside = || "it is outside of its pages".to_owned();
        let at = usize::try_from(at).map_err(|_| outside())?;
        let end = at.checked_add(out.len()).filter(|end| *end <= self.0.pages() * PAGE_SIZE);
        let (first, end) = (at / PAGE_SIZE, end.ok_or_else(outside)?.div_ceil(PAGE_SIZE));
        self.0.resolve(PageRange::new(first, end - first)).map_err(|e| e.to_string())?;
        self.0.read(at, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static METER: afresh_budget::meter::Meter = afresh_budget::meter::Meter;

    #[test]
    fn a_description_of_holes_is_refused_before_it_is_allocated() {
        const CLAIM: usize = 2 << 30;
        let pages = ImageBuilder::new(CLAIM / PAGE_SIZE).build().unwrap();
        let claimed = SavedLayers { described: CLAIM as u64, pages: 0 }.take(pages);
        let budget = Budget { bytes: 1 << 20, files: 100 };
        let (refused, peak) = afresh_budget::meter::within(1 << 20, || claimed.tree(budget));
        assert!(matches!(refused, Err(LayersError::Description(_))), "{refused:?}");
        assert!(peak < 1 << 20, "{peak} bytes were allocated");
    }
}
