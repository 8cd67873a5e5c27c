//! An opened snapshot: its configuration, its stack of layers, its pages.

use std::io;
use std::sync::Arc;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::index::Role;
use crate::manifest::{Config, Manifest, parse_root, print};
use crate::seal::SealKey;
use crate::{GuestBuild, Layer, LayerError, OpenError, Origin, PageMap, Pages, SaveError, Sha256};

/// An opened snapshot. Cheap to clone; its files stay open, and readable even after `gc` removed
/// their names, until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Snapshot {
    id: Sha256,
    manifest: Arc<Manifest>,
    body: Arc<Body>,
    seal: Option<Arc<Seal>>,
}

/// What a sealed snapshot was opened with.
#[derive(Debug)]
struct Seal {
    key: SealKey,
    /// The configuration as it is stored.
    config: Vec<u8>,
}

/// All but the manifest.
#[derive(Debug)]
struct Body {
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
        let body = Arc::new(Body { config, state, layers, working_set, map });
        Ok(Self { id, manifest: Arc::new(manifest), body, seal: None })
    }

    /// Notes how the snapshot was unsealed.
    pub(crate) fn with_seal(self, key: SealKey, config: Vec<u8>) -> Self {
        Self { seal: Some(Arc::new(Seal { key, config })), ..self }
    }

    /// What the snapshot is sealed with.
    pub(crate) fn key(&self) -> Option<&SealKey> {
        self.seal.as_ref().map(|seal| &seal.key)
    }

    /// The same snapshot under another manifest.
    #[cfg(feature = "seal")]
    pub(crate) fn with_manifest(&self, manifest: Manifest) -> Result<Self, SaveError> {
        let id = Sha256::of(&print("the manifest", &manifest)?);
        Ok(Self { id, manifest: Arc::new(manifest), ..self.clone() })
    }

    /// Digest of the manifest, which names the snapshot for ever.
    #[must_use]
    pub fn id(&self) -> Sha256 {
        self.id
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(crate) fn config(&self) -> &Config {
        &self.body.config
    }

    /// The bytes of the manifest, which have the digest [`Snapshot::id`].
    pub(crate) fn manifest_blob(&self) -> Result<Vec<u8>, SaveError> {
        reprint("the manifest", self.manifest(), self.id())
    }

    /// The bytes of the configuration, as the manifest names it.
    pub(crate) fn config_blob(&self) -> Result<Vec<u8>, SaveError> {
        if let Some(seal) = &self.seal {
            return Ok(seal.config.clone());
        }
        let digest = self.manifest().config.digest("the manifest")?;
        reprint("the configuration", self.config(), digest)
    }

    /// The guest build the snapshot belongs to.
    #[must_use]
    pub fn guest(&self) -> &GuestBuild {
        &self.body.config.guest
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
        &self.body.state
    }

    /// Digest of the manifest of the snapshot this one was made from, as text.
    #[must_use]
    pub fn parent(&self) -> Option<&str> {
        self.body.config.parent.as_deref()
    }

    /// Number of pages, zero ones included.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.body.map.pages()
    }

    /// Where each page is.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        &self.body.map
    }

    /// The page layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.body.layers
    }

    /// The working-set layer.
    #[must_use]
    pub fn working_set_layer(&self) -> Option<&Layer> {
        self.body.working_set.as_ref()
    }

    /// The recorded working set: the pages that runs touch first, in address order.
    #[must_use]
    pub fn working_set(&self) -> Vec<PageRange> {
        let Some(layer) = &self.body.working_set else { return Vec::new() };
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
        let Some(layer) = &self.body.working_set else { return Ok(()) };
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
        for run in self.body.map.within(range) {
            let part = &mut out[(run.pages.start - first) * PAGE_SIZE..][..run.pages.byte_len()];
            match run.origin {
                Origin::Zero => part.fill(0),
                Origin::Layer { layer, stored } => self.body.layers[layer].read(stored, part)?,
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
        for layer in self.body.layers.iter().chain(&self.body.working_set) {
            layer.verify(0, layer.stored())?;
        }
        Ok(())
    }

    /// Checks every byte of every layer, whatever was checked before. `progress` is told the bytes done
    /// and the bytes in all.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first that is damaged.
    pub fn check(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), OpenError> {
        let layers = || self.layers().iter().chain(self.working_set_layer());
        let total = layers().map(Layer::size).sum();
        let mut before = 0;
        for layer in layers() {
            layer.check(&mut |done| progress(before + done, total))?;
            before += layer.size();
        }
        Ok(())
    }
}

/// Writes a JSON blob as it was. One that another program wrote in its own way is refused.
fn reprint<T: serde::Serialize>(
    what: &'static str,
    value: &T,
    digest: Sha256,
) -> Result<Vec<u8>, SaveError> {
    let bytes = print(what, value)?;
    if Sha256::of(&bytes) != digest {
        let why = "it was not written by afresh: copy the layout with an OCI tool".to_owned();
        return Err(SaveError::Json { what, why });
    }
    Ok(bytes)
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
        for run in self.body.map.runs().iter().filter(|run| run.origin != Origin::Zero) {
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
