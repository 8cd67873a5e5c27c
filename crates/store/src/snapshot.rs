//! An opened snapshot: its configuration, its stack of layers, its pages.

use std::io;
use std::sync::Arc;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::index::Role;
use crate::manifest::{Config, Manifest, parse_root};
use crate::{GuestBuild, Layer, LayerError, OpenError, Origin, PageMap, Pages, Sha256};

/// An opened snapshot. Cheap to clone; its files stay open, and readable even after `gc` removed
/// their names, until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Snapshot(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: Sha256,
    manifest: Manifest,
    config: Config,
    state: Vec<u8>,
    layers: Vec<Layer>,
    working_set: Option<Layer>,
    map: PageMap,
}

impl Snapshot {
    /// Puts a snapshot together from parts whose digests were checked: the manifest is the one that
    /// `id` names, the configuration is the one that the manifest names. `open` opens layer `n` of
    /// the manifest with the root that the configuration names.
    pub(crate) fn assemble(
        id: Sha256,
        manifest: Manifest,
        config: Config,
        open: impl Fn(usize, &[u8; 32]) -> Result<Layer, OpenError>,
    ) -> Result<Self, OpenError> {
        config.check()?;
        let state = config.state()?;
        let stack = config.memory.layers.len();
        if manifest.layers.len() != stack + usize::from(config.memory.working_set.is_some()) {
            return Err(OpenError::Json {
                what: "the manifest",
                why: "it has another number of layers than the configuration".to_owned(),
            });
        }
        let mut layers = Vec::with_capacity(stack);
        let mut below = None;
        for (number, text) in config.memory.layers.iter().enumerate() {
            let root = parse_root(text)?;
            let layer = open(number, &root)?;
            check_layer(&layer, if number == 0 { Role::Base } else { Role::Delta }, below)?;
            if layer.index().pages > config.memory.pages {
                return Err(OpenError::Layer {
                    digest: layer.digest(),
                    source: LayerError::Field { field: "pages", value: layer.index().pages },
                });
            }
            below = Some(root);
            layers.push(layer);
        }
        let working_set = match &config.memory.working_set {
            None => None,
            Some(text) => {
                let layer = open(stack, &parse_root(text)?)?;
                check_layer(&layer, Role::WorkingSet, below)?;
                Some(layer)
            }
        };
        let pages = config.memory.pages as usize;
        let map = PageMap::new(pages, layers.iter().map(Layer::index));
        Ok(Self(Arc::new(Inner { id, manifest, config, state, layers, working_set, map })))
    }

    /// Digest of the manifest, which names the snapshot for ever.
    #[must_use]
    pub fn id(&self) -> Sha256 {
        self.0.id
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    pub(crate) fn config(&self) -> &Config {
        &self.0.config
    }

    /// The guest build the snapshot belongs to.
    #[must_use]
    pub fn guest(&self) -> &GuestBuild {
        &self.0.config.guest
    }

    /// Refuses another guest build, by name.
    ///
    /// # Errors
    /// [`OpenError::Guest`] with the first difference.
    pub fn check_guest(&self, here: &GuestBuild) -> Result<(), OpenError> {
        Ok(self.guest().accept(here)?)
    }

    /// The guest's own state, as it was saved.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        &self.0.state
    }

    /// Digest of the manifest of the snapshot this one was made from, as text.
    #[must_use]
    pub fn parent(&self) -> Option<&str> {
        self.0.config.parent.as_deref()
    }

    /// Number of pages, zero ones included.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.0.map.pages()
    }

    /// Where each page is.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        &self.0.map
    }

    /// The page layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.0.layers
    }

    /// The working-set layer.
    #[must_use]
    pub fn working_set_layer(&self) -> Option<&Layer> {
        self.0.working_set.as_ref()
    }

    /// The recorded working set: the pages that runs touch first, in address order.
    #[must_use]
    pub fn working_set(&self) -> Vec<PageRange> {
        let Some(layer) = &self.0.working_set else { return Vec::new() };
        let pages = self.pages();
        let mut set: Vec<PageRange> = Vec::new();
        for extent in &layer.index().extents {
            let range = PageRange::new(extent.first as usize, extent.len as usize);
            match set.last_mut() {
                Some(last) if last.end() == range.start => last.len += range.len,
                _ => set.push(range),
            }
        }
        set.retain(|range| range.end() <= pages);
        set
    }

    /// Reads the pages of the working set from their compact copy, one call of `each` for every run,
    /// in address order.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when the copy does not have its digest; whatever `each` returns.
    pub fn read_working_set<E: From<OpenError>>(
        &self,
        mut each: impl FnMut(PageRange, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        const BATCH: u64 = 512;
        let Some(layer) = &self.0.working_set else { return Ok(()) };
        if layer.is_distant() {
            return Self::read_distant_set(layer, each);
        }
        let mut buffer = Vec::new();
        for extent in &layer.index().extents {
            for skip in (0..extent.len).step_by(BATCH as usize) {
                let len = BATCH.min(extent.len - skip) as usize;
                buffer.clear();
                buffer.resize(len * PAGE_SIZE, 0);
                if let Some(stored) = extent.stored {
                    layer.read(stored + skip, &mut buffer)?;
                }
                each(PageRange::new((extent.first + skip) as usize, len), &buffer)?;
            }
        }
        Ok(())
    }

    /// Reads whole pages from `first` on. Each group of pages is checked when it is first used.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when pages do not have their digest, [`OpenError::Range`] past the end;
    /// nothing of `out` may be used then.
    pub fn read(&self, first: usize, out: &mut [u8]) -> Result<(), OpenError> {
        let count = out.len() / PAGE_SIZE;
        let range = PageRange::new(first, count);
        if first.checked_add(count).is_none_or(|end| end > self.pages()) {
            return Err(OpenError::Range {
                first,
                end: first.saturating_add(count),
                pages: self.pages(),
            });
        }
        if self.is_distant() {
            return self.read_distant(range, out);
        }
        for run in self.0.map.within(range) {
            let part = &mut out[(run.pages.start - first) * PAGE_SIZE..][..run.pages.byte_len()];
            match run.origin {
                Origin::Zero => part.fill(0),
                Origin::Layer { layer, stored } => self.0.layers[layer].read(stored, part)?,
            }
        }
        Ok(())
    }

    /// As [`Snapshot::read`], but pages past the end read as zero.
    pub(crate) fn read_padded(&self, first: usize, out: &mut [u8]) -> Result<(), OpenError> {
        let inside = self.pages().saturating_sub(first).min(out.len() / PAGE_SIZE) * PAGE_SIZE;
        out[inside..].fill(0);
        if inside > 0 { self.read(first, &mut out[..inside]) } else { Ok(()) }
    }

    /// Checks every page group of every layer.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first that is damaged.
    pub fn verify(&self) -> Result<(), OpenError> {
        for layer in self.0.layers.iter().chain(&self.0.working_set) {
            layer.verify(0, layer.stored())?;
        }
        Ok(())
    }
}

/// A layer must lie where its role and parent say.
fn check_layer(layer: &Layer, role: Role, below: Option<[u8; 32]>) -> Result<(), OpenError> {
    let bad = |source| Err(OpenError::Layer { digest: layer.digest(), source });
    if layer.role() != role {
        return bad(LayerError::Field { field: "role", value: layer.role() as u64 });
    }
    if layer.index().parent != below.unwrap_or([0; 32]) {
        return bad(LayerError::Parent);
    }
    Ok(())
}

impl Pages for Snapshot {
    fn pages(&self) -> usize {
        Snapshot::pages(self)
    }

    fn occupied(&self) -> Vec<PageRange> {
        let mut ranges: Vec<PageRange> = Vec::new();
        for run in self.0.map.runs().iter().filter(|run| run.origin != Origin::Zero) {
            match ranges.last_mut() {
                Some(last) if last.end() == run.pages.start => last.len += run.pages.len,
                _ => ranges.push(run.pages),
            }
        }
        ranges
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        Snapshot::read(self, first, out).map_err(io::Error::other)
    }
}
