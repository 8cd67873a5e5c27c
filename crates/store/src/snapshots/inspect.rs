//! The parts of a snapshot, for people and tools.

use afresh_sys::PageRange;

use crate::format::index::{Encoding, Role};
use crate::format::manifest::root_text;
use crate::{GuestBuild, Origin, Sha256, Snapshot, Turns};

/// The parts of a snapshot.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Digest of its manifest.
    pub id: Sha256,
    /// Manifest digest of its parent.
    pub parent: Option<String>,
    /// The guest build it belongs to.
    pub guest: GuestBuild,
    /// Bytes of guest state.
    pub state_bytes: u64,
    /// Pages in the index space.
    pub pages: usize,
    /// Pages that are zero and stored nowhere.
    pub zero_pages: usize,
    /// Pages that share their stored copy with another page.
    pub shared_pages: usize,
    /// Runs of pages that are contiguous where they are stored.
    pub runs: usize,
    /// Pages in the working set.
    pub working_set_pages: usize,
    /// Pages that the turns of a session changed.
    pub turned_pages: usize,
    /// The turns of a session after the layers, if it is a session.
    pub turns: Option<Turns>,
    /// Every layer, bottom first, the working set last.
    pub layers: Vec<LayerInspection>,
}

/// The content of a layer.
#[derive(Clone, Debug)]
pub struct LayerInspection {
    /// Digest of the blob.
    pub digest: Sha256,
    /// `blake3:` root of its content.
    pub root: String,
    /// Its purpose.
    pub role: Role,
    /// Encoding of the pages.
    pub encoding: Encoding,
    /// Length of the blob.
    pub bytes: u64,
    /// Pages stored.
    pub stored: u64,
    /// Pages of the snapshot that are read from it.
    pub used: usize,
}

/// The kind of a page, for a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageKind {
    /// Zero, stored nowhere.
    Zero,
    /// Stored once.
    Stored,
    /// Its stored copy serves several pages.
    Shared,
    /// In the working set.
    Hot,
}

impl Snapshot {
    /// The parts of the snapshot. Reads no page.
    #[must_use]
    pub fn inspect(&self) -> Inspection {
        let mut shared_pages = 0;
        self.each_stored(|_, shared| shared_pages += usize::from(shared));
        let mut used = vec![0; self.layers().len()];
        let (mut zero_pages, mut turned_pages) = (0, 0);
        for run in self.map().runs() {
            match run.origin {
                Origin::Zero => zero_pages += run.pages.len,
                Origin::Layer { layer, .. } => used[layer] += run.pages.len,
                Origin::Turn { .. } => turned_pages += run.pages.len,
            }
        }
        let working_set_pages = self.working_set().iter().map(|r| r.len).sum();
        used.push(working_set_pages);
        let layers = self
            .layers()
            .iter()
            .chain(self.working_set_layer())
            .zip(used)
            .map(|(layer, used)| LayerInspection {
                digest: layer.digest(),
                root: root_text(layer.root()),
                role: layer.role(),
                encoding: layer.encoding(),
                bytes: layer.size(),
                stored: layer.stored(),
                used,
            })
            .collect();
        Inspection {
            id: self.id(),
            parent: self.parent().map(str::to_owned),
            guest: self.guest().clone(),
            state_bytes: self.state().len() as u64,
            pages: self.pages(),
            zero_pages,
            shared_pages,
            runs: self.map().runs().len(),
            working_set_pages,
            turned_pages,
            turns: self.turns(),
            layers,
        }
    }

    /// Calls `each` with every stored page and whether its stored copy serves several pages.
    fn each_stored(&self, mut each: impl FnMut(usize, bool)) {
        let mut uses: Vec<Vec<u8>> =
            self.layers().iter().map(|layer| vec![0; layer.stored() as usize]).collect();
        let mut walk = |visit: &mut dyn FnMut(usize, &mut u8)| {
            for run in self.map().runs() {
                if let Origin::Layer { layer, stored } = run.origin {
                    let stored = stored as usize..stored as usize + run.pages.len;
                    for (n, count) in uses[layer][stored].iter_mut().enumerate() {
                        visit(run.pages.start + n, count);
                    }
                }
            }
        };
        walk(&mut |_, count| *count = count.saturating_add(1));
        walk(&mut |page, count| each(page, *count > 1));
    }

    /// A summary of the pages: at most `cells` cells, in order, each with the first kind among its
    /// pages in this order: hot, shared, stored, zero.
    #[must_use]
    pub fn page_summary(&self, cells: usize) -> Vec<(PageRange, PageKind)> {
        let per_cell = self.pages().div_ceil(cells.max(1)).max(1);
        let mut page_summary = vec![PageKind::Zero; self.pages().div_ceil(per_cell)];
        self.each_stored(|page, shared| {
            let kind = if shared { PageKind::Shared } else { PageKind::Stored };
            let cell = &mut page_summary[page / per_cell];
            *cell = kind.max(*cell);
        });
        for range in self.working_set() {
            page_summary[range.start / per_cell..range.end().div_ceil(per_cell)]
                .fill(PageKind::Hot);
        }
        let cell = |n: usize| {
            let first = n * per_cell;
            PageRange::new(first, per_cell.min(self.pages() - first))
        };
        for run in self.map().runs() {
            if let Origin::Turn { .. } = run.origin {
                let (first, last) =
                    (run.pages.start / per_cell, run.pages.end().div_ceil(per_cell));
                page_summary[first..last]
                    .iter_mut()
                    .for_each(|cell| *cell = (*cell).max(PageKind::Stored));
            }
        }
        page_summary.iter().enumerate().map(|(n, kind)| (cell(n), *kind)).collect()
    }
}
