//! An opened snapshot: its configuration, its stack of layers, its pages.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::format::manifest::{Config, Document, Manifest, print};
use crate::layers::stack::{OpenBlob, Stack};
use crate::seal::SealKey;
use crate::seal::access::Access;
use crate::snapshots::turns::SnapshotWithTurns;
use crate::{
    GuestBuild, Layer, LayerError, Limits, OpenError, Origin, PageMap, Pages, SaveError, Sha256,
};

/// An opened snapshot. Cheap to clone; its files stay open, and readable even after `gc` removed
/// their names, until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Snapshot {
    id: Sha256,
    manifest: Arc<Manifest>,
    body: Arc<Body>,
    seal: Option<Arc<Seal>>,
    /// The result of session turns.
    turned: Option<Arc<SnapshotWithTurns>>,
    /// The store and the name that it was opened by.
    opened_by: Option<Arc<(PathBuf, String)>>,
    /// The directory of the store that it was opened in.
    directory: Option<Arc<Path>>,
}

/// The key and the configuration that opened a sealed snapshot.
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
    stack: Stack,
    limits: Limits,
}

impl Snapshot {
    /// Puts a snapshot together from parts whose digests were checked: the manifest is the one that
    /// `id` names, the configuration is the one that the manifest names. `blob` opens the blob of a
    /// layer.
    ///
    /// For a snapshot of a session it is the base, without its turns.
    pub(crate) fn assemble(
        id: Sha256,
        manifest: Manifest,
        config: Config,
        access: &Access,
        key: Option<&SealKey>,
        blob: &mut OpenBlob<'_>,
    ) -> Result<Self, OpenError> {
        let stack = Stack::open(&manifest, &config, access, key, blob)?;
        let state = config.state()?;
        let body = Body { config, state, stack, limits: *access.limits() };
        let (manifest, body) = (Arc::new(manifest), Arc::new(body));
        Ok(Self { id, manifest, body, seal: None, turned: None, opened_by: None, directory: None })
    }

    /// Notes how the snapshot was unsealed.
    pub(crate) fn with_seal(self, key: SealKey, config: Vec<u8>) -> Self {
        Self { seal: Some(Arc::new(Seal { key, config })), ..self }
    }

    /// Notes the store and the name that it was opened by.
    pub(crate) fn with_name(self, root: &Path, name: &str) -> Self {
        Self { opened_by: Some(Arc::new((root.to_owned(), name.to_owned()))), ..self }
    }

    /// The store and the name that it was opened by.
    pub(crate) fn opened_by(&self) -> Option<(&Path, &str)> {
        self.opened_by.as_deref().map(|(root, name)| (&**root, &**name))
    }

    /// Notes the directory of the store.
    pub(crate) fn in_directory(self, root: &Path) -> Self {
        Self { directory: Some(root.into()), ..self }
    }

    /// The directory of the store that it was opened in. `None` for a remote one or an archive.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The key that seals the snapshot.
    pub(crate) fn key(&self) -> Option<&SealKey> {
        self.seal.as_ref().map(|seal| &seal.key)
    }

    /// The same snapshot under another manifest.
    #[cfg(feature = "seal")]
    pub(crate) fn with_manifest(&self, manifest: Manifest) -> Result<Self, SaveError> {
        let id = Sha256::of(&print(&manifest)?);
        Ok(Self { id, manifest: Arc::new(manifest), ..self.clone() })
    }

    /// Digest of the manifest, which is the permanent name of the snapshot.
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
        reprint(self.manifest(), self.id())
    }

    /// The bytes of the configuration, as the manifest names it.
    pub(crate) fn config_blob(&self) -> Result<Vec<u8>, SaveError> {
        if let Some(seal) = &self.seal {
            return Ok(seal.config.clone());
        }
        let digest = self.manifest().config.digest("the manifest")?;
        reprint(self.config(), digest)
    }

    /// The guest build the snapshot belongs to.
    #[must_use]
    pub fn guest(&self) -> &GuestBuild {
        &self.body.config.guest
    }

    /// Checks that the snapshot fits a guest build.
    ///
    /// # Errors
    /// [`OpenError::Guest`] with the first difference.
    pub fn check_guest(&self, here: &GuestBuild) -> Result<(), OpenError> {
        Ok(self.guest().accept(here)?)
    }

    /// The guest's own state, as it was saved.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        self.turned().map_or(&self.body.state, |turned| turned.space.state())
    }

    /// Digest of the manifest of the snapshot this one was made from, as text.
    #[must_use]
    pub fn parent(&self) -> Option<&str> {
        self.body.config.parent.as_deref()
    }

    /// Number of pages, zero ones included.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.map().pages()
    }

    /// The limits with which the snapshot was opened.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.body.limits
    }

    /// The location of each page.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        self.turned().map_or(&self.body.stack.map, |turned| &turned.map)
    }

    /// The result of the turns, if it has any.
    pub(crate) fn turned(&self) -> Option<&SnapshotWithTurns> {
        self.turned.as_deref()
    }

    /// The turns that follow on the snapshot in `path`, applied.
    pub(crate) fn with_turns(self, turned: SnapshotWithTurns) -> Self {
        Self { turned: Some(Arc::new(turned)), ..self }
    }

    /// The snapshot without its turns.
    pub(crate) fn base(&self) -> Self {
        Self { turned: None, ..self.clone() }
    }

    /// The page layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.body.stack.layers
    }

    /// The working-set layer.
    #[must_use]
    pub fn working_set_layer(&self) -> Option<&Layer> {
        self.body.stack.working_set.as_ref()
    }

    /// The recorded working set: the pages that runs touch first, in address order.
    #[must_use]
    pub fn working_set(&self) -> Vec<PageRange> {
        match self.turned() {
            None => self.body.stack.set.clone(),
            Some(turned) => turned.set.clone(),
        }
    }

    /// Reads the pages of the working set from their compact copy, one call of `each` for every
    /// run, in address order.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when the copy does not match its digest, and any error of `each`.
    pub fn read_working_set<E: From<OpenError>>(
        &self,
        mut each: impl FnMut(PageRange, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        const BATCH: u64 = 512;
        // Pages that one read takes at least. Few enough to stay in the processor's cache.
        const MIN_READ_PAGES: u64 = 64;
        if let Some(turned) = self.turned() {
            // The compact copy is of the pages as they were.
            return self.read_each(&turned.set, each);
        }
        let Some(layer) = &self.body.stack.working_set else { return Ok(()) };
        if layer.is_distant() {
            return Self::read_distant_set(layer, each);
        }
        // Most runs are short and stored one behind the other: those are read many at once.
        let (mut buffer, mut has) = (Vec::new(), 0..0);
        let mut zeros = Vec::new();
        for extent in &layer.index().extents {
            for skip in (0..extent.len).step_by(BATCH as usize) {
                let len = BATCH.min(extent.len - skip);
                let bytes = len as usize * PAGE_SIZE;
                let run = match extent.stored.map(|stored| stored + skip) {
                    Some(stored) => {
                        if stored < has.start || stored + len > has.end {
                            has =
                                stored..layer.index().stored.min(stored + len.max(MIN_READ_PAGES));
                            buffer.resize((has.end - has.start) as usize * PAGE_SIZE, 0);
                            layer.read(stored, &mut buffer)?;
                        }
                        &buffer[(stored - has.start) as usize * PAGE_SIZE..][..bytes]
                    }
                    None => {
                        zeros.resize(bytes, 0);
                        &zeros[..]
                    }
                };
                each(PageRange::new((extent.first + skip) as usize, len as usize), run)?;
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
        for run in self.map().within(range) {
            let part = &mut out[(run.pages.start - first) * PAGE_SIZE..][..run.pages.byte_len()];
            match run.origin {
                Origin::Zero => part.fill(0),
                Origin::Layer { layer, stored } => {
                    self.body.stack.layers[layer].read(stored, part)?
                }
                Origin::Turn { page } => self.read_turned(page, part)?,
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

    /// Checks every page group of every layer, and that the working set is a copy of the pages it
    /// names.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first that is damaged.
    pub fn verify(&self) -> Result<(), OpenError> {
        for layer in self.body.stack.layers.iter().chain(&self.body.stack.working_set) {
            layer.verify(0, layer.stored())?;
        }
        self.compare_working_set()
    }

    /// Compares the working set with the pages that it is a copy of. The maker of a snapshot can
    /// make the set differ, and then a guest depends on the way it is restored.
    fn compare_working_set(&self) -> Result<(), OpenError> {
        const BATCH: usize = 512;
        let Some(layer) = &self.body.stack.working_set else { return Ok(()) };
        if self.turned.is_some() {
            return self.base().compare_working_set();
        }
        let mut pages = Vec::new();
        self.read_working_set(|run, copy| {
            for (number, copy) in copy.chunks(BATCH * PAGE_SIZE).enumerate() {
                let first = run.start + number * BATCH;
                pages.resize(copy.len(), 0);
                self.read(first, &mut pages)?;
                let both = pages.chunks(PAGE_SIZE).zip(copy.chunks(PAGE_SIZE));
                if let Some(page) = { both }.position(|(page, copy)| page != copy) {
                    let source = LayerError::Copy((first + page) as u64);
                    return Err(OpenError::Layer { digest: layer.digest(), source });
                }
            }
            Ok(())
        })
    }

    /// As [`Snapshot::verify`], every byte of every layer, whatever was checked before. `progress`
    /// receives the bytes done and the bytes in all.
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
        self.compare_working_set()
    }
}

/// Writes a JSON blob as it was. One that another program wrote in its own way is refused.
fn reprint<T: Document>(value: &T, digest: Sha256) -> Result<Vec<u8>, SaveError> {
    let bytes = print(value)?;
    if Sha256::of(&bytes) != digest {
        let why = "it was not written by afresh: copy the layout with an OCI tool".to_owned();
        return Err(SaveError::Json { what: T::NAME, why });
    }
    Ok(bytes)
}

impl Pages for Snapshot {
    fn pages(&self) -> usize {
        Snapshot::pages(self)
    }

    fn occupied(&self) -> Vec<PageRange> {
        let mut ranges: Vec<PageRange> = Vec::new();
        for run in self.map().runs().iter().filter(|run| run.origin != Origin::Zero) {
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
