//! Saving: memory and guest state become a named snapshot.
//!
//! A save of a delta makes six syncs, in four steps: the files of the layer, the configuration and
//! the manifest; the directory of the blobs; the new `index.json`; the directory of that. The first
//! two steps run without `.index-lock`. Each step needs the one before it, and no sync can be left
//! out:
//!
//! * A blob gets its name after its bytes are durable. Another writer may use each blob that has a
//!   name, and acknowledge a snapshot with it.
//! * The names of blobs are durable before `index.json` names their manifest. ext4 and XFS write
//!   their logs in order, so a later name implies an earlier one. Btrfs logs single directories,
//!   and POSIX promises nothing.
//! * The bytes of `index.json` are durable before the rename, which replaces the old one. Only ext4
//!   writes them out at a rename (`auto_da_alloc`).
//! * The save is acknowledged after the rename is durable.
//!
//! The syncs of a step share the commit of a journaling file system ([`crate::blobs::file`]).

use std::time::{Duration, Instant};

use afresh_sys::PageRange;

use crate::format::descriptor::{CONFIG_TYPE, Descriptor};
use crate::format::index::{Encoding, Role};
use crate::format::manifest::{
    Config, MAX_LAYERS, MAX_STATE, Manifest, Memory, encode_state, layer_type, print, root_text,
    sealed_type,
};
use crate::layers::blob_sink::BlobSink;
use crate::seal::SealKey;
use crate::writing::layer_writer::{Plan, WrittenLayer, write_base, write_layer};
use crate::{
    FoldOptions, GuestBuild, NameCondition, Pages, SaveError, SealError, Sha256, Snapshot, Store,
};

/// Options of writing a snapshot.
#[derive(Clone, Debug)]
pub struct SnapshotOptions {
    /// Encoding of the pages: raw ones can be mapped, compressed ones are smaller.
    pub encoding: Encoding,
    /// Write a delta on this snapshot instead of the whole memory. Layers of it that are not in the
    /// same store are copied. If it has the maximum number of layers, the memory is written whole.
    pub parent: Option<Snapshot>,
    /// With a parent: the only pages that can differ from it, in order and without overlap. Without
    /// it all pages are compared.
    pub changed: Option<Vec<PageRange>>,
    /// The pages in `changed` were compared and differ from the parent. They are stored, and the
    /// parent is not read.
    pub compared: bool,
    /// Pages to copy into a working-set layer, which is read first. In order and without overlap.
    pub working_set: Vec<PageRange>,
    /// The target that the name must have.
    pub condition: NameCondition,
    /// Seal the snapshot with this key. A delta is always sealed with the key of its parent.
    #[cfg(feature = "seal")]
    pub seal: Option<SealKey>,
    /// Sign the snapshot.
    #[cfg(feature = "seal")]
    pub sign: Option<crate::seal::SigningKey>,
}

impl Default for SnapshotOptions {
    /// A whole snapshot with raw pages, neither signed nor sealed.
    fn default() -> Self {
        Self {
            encoding: Encoding::Raw,
            parent: None,
            changed: None,
            compared: false,
            working_set: Vec::new(),
            condition: NameCondition::default(),
            #[cfg(feature = "seal")]
            seal: None,
            #[cfg(feature = "seal")]
            sign: None,
        }
    }
}

/// A snapshot to write: its guest, and options.
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// The guest build the memory belongs to.
    pub guest: GuestBuild,
    /// The guest's own state: at most 64 MiB.
    pub state: Vec<u8>,
    /// Options of writing it.
    pub options: SnapshotOptions,
}

/// The time that a save takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveTimes {
    /// Time before the first write of a blob, in which pages are read and compared.
    pub before_write: Duration,
    /// Time from then until the name has its new target on disk.
    pub write: Duration,
}

impl SaveRequest {
    /// A whole, raw snapshot of `guest` without state.
    #[must_use]
    pub fn new(guest: GuestBuild) -> Self {
        Self { guest, state: Vec::new(), options: SnapshotOptions::default() }
    }
}

impl SnapshotOptions {
    /// The key that the new snapshot is sealed with.
    fn key(&self) -> Result<Option<&SealKey>, SealError> {
        #[cfg(feature = "seal")]
        let wanted = self.seal.as_ref();
        #[cfg(not(feature = "seal"))]
        let wanted = None;
        match (wanted, &self.parent) {
            (wanted, None) => Ok(wanted),
            (None, Some(parent)) => Ok(parent.key()),
            (wanted, Some(parent)) if wanted == parent.key() => Ok(wanted),
            _ => Err(SealError::Mixed),
        }
    }
}

impl Store {
    /// Saves `memory` under `name` and returns its id. An existing name changes its target once
    /// everything is on disk. Programs that have the old snapshot open keep it.
    ///
    /// # Errors
    /// [`SaveError`] by cause, [`SaveError::Moved`] where the name has another target than
    /// [`SnapshotOptions::condition`]; the name is unchanged then.
    pub fn save(
        &self,
        name: &str,
        memory: &dyn Pages,
        request: &SaveRequest,
    ) -> Result<Sha256, SaveError> {
        self.save_timed(name, memory, request).map(|(id, _)| id)
    }

    /// As [`Store::save`], with the times that it took.
    ///
    /// # Errors
    /// As [`Store::save`].
    pub fn save_timed(
        &self,
        name: &str,
        memory: &dyn Pages,
        request: &SaveRequest,
    ) -> Result<(Sha256, SaveTimes), SaveError> {
        let began = Instant::now();
        let mut staging = self.stage_for(name)?;
        let (id, _) = write_memory(&mut staging, memory, request)?;
        staging.rename(name, id, request.options.condition.0)?;
        let total = began.elapsed();
        let first_write = staging.first_write().unwrap_or(began);
        let before_write = first_write.saturating_duration_since(began);
        Ok((id, SaveTimes { before_write, write: total.saturating_sub(before_write) }))
    }

    /// Records a working set with a snapshot that exists: writes the compact copy of `pages` and
    /// tags the snapshot with it `name`. Layers are shared with the old one.
    ///
    /// # Errors
    /// [`SaveError`] by cause; the name is unchanged then.
    pub fn set_working_set(
        &self,
        name: &str,
        snapshot: &Snapshot,
        pages: &[PageRange],
    ) -> Result<Sha256, SaveError> {
        let mut shelf = self.stage_for(name)?;
        let expected = self.replaced_by(name, snapshot);
        // The result of turns is in none of the layers.
        let snapshot = &self.fold_here(&mut shelf, snapshot, &FoldOptions::default())?;
        let stack = snapshot.layers().len();
        shelf.keep_all(snapshot.layers())?;
        let mut layers = snapshot.manifest().layers[..stack].to_vec();
        let mut config = snapshot.config().clone();
        config.memory.working_set = None;
        let encoding = snapshot.layers().last().map_or(Encoding::Raw, |layer| layer.encoding());
        if !pages.is_empty() {
            let plan = Plan {
                role: Role::WorkingSet,
                encoding,
                candidates: clip(pages, snapshot.pages()),
                below: None,
                parent: snapshot.layers().last().map_or([0; 32], |layer| *layer.root()),
                key: snapshot.key(),
            };
            let layer = write_layer(&mut shelf, snapshot, &plan)?;
            layers.push(descriptor(&layer));
            config.memory.working_set = Some(root_text(&layer.index.root));
        }
        let id = write_snapshot(&mut shelf, &config, layers, snapshot.key())?.0;
        shelf.rename(name, id, expected)?;
        Ok(id)
    }
}

/// Writes all of a snapshot, and returns digest and length of its manifest.
pub(crate) fn write_memory(
    shelf: &mut dyn BlobSink,
    memory: &dyn Pages,
    request: &SaveRequest,
) -> Result<(Sha256, u64), SaveError> {
    let SaveRequest { guest, state: bytes, options } = request;
    let state = bytes.len() as u64;
    if state > MAX_STATE {
        return Err(SaveError::TooLarge { what: "a guest state", size: state, limit: MAX_STATE });
    }
    let key = options.key()?;
    let mut layers = Vec::new();
    let mut roots = Vec::new();
    let mut below = [0; 32];
    // A stack that is full begins anew: the whole memory becomes its bottom. The result of its
    // turns is in none of its layers.
    let parent = options.parent.as_ref().filter(|parent| parent.layers().len() < MAX_LAYERS);
    let below_turns = parent.filter(|parent| parent.turns().is_some()).map(Snapshot::base);
    let parent = below_turns.as_ref().or(parent);
    if let Some(parent) = parent {
        let stack = parent.layers().len();
        if memory.pages() < parent.pages() {
            return Err(SaveError::Shrunk { pages: memory.pages(), parent: parent.pages() });
        }
        shelf.keep_all(parent.layers())?;
        layers.extend_from_slice(&parent.manifest().layers[..stack]);
        roots.extend_from_slice(&parent.config().memory.layers);
        below = parent.layers().last().map_or(below, |layer| *layer.root());
    }
    let mut changed = options.changed.clone();
    let compared = options.compared && changed.is_some() && below_turns.is_none();
    if let (Some(changed), Some(_), Some(turned)) = (&mut changed, &below_turns, &options.parent) {
        // The difference to the turns is not the difference to the layers below them.
        changed.extend(turned.turned_pages());
        *changed = PageRange::merge(std::mem::take(changed));
    }
    let plan = Plan {
        role: if parent.is_some() { Role::Delta } else { Role::Base },
        encoding: options.encoding,
        candidates: candidates(memory, parent, changed.as_deref()),
        below: parent.filter(|_| !compared),
        parent: below,
        key,
    };
    let written = match plan.role {
        Role::Base => write_base(shelf, memory, &plan)?,
        _ => vec![write_layer(shelf, memory, &plan)?],
    };
    layers.extend(written.iter().map(descriptor));
    roots.extend(written.iter().map(|layer| root_text(&layer.index.root)));
    let top = written.last().map_or(below, |top| top.index.root);
    let mut working_set = None;
    if !options.working_set.is_empty() {
        let plan = Plan {
            role: Role::WorkingSet,
            encoding: options.encoding,
            candidates: clip(&options.working_set, memory.pages()),
            below: None,
            parent: top,
            key,
        };
        let layer = write_layer(shelf, memory, &plan)?;
        layers.push(descriptor(&layer));
        working_set = Some(root_text(&layer.index.root));
    }
    let config = Config {
        schema: Config::SCHEMA,
        guest: guest.clone(),
        memory: Memory {
            page_size: afresh_sys::PAGE_SIZE as u64,
            pages: memory.pages() as u64,
            layers: roots,
            working_set,
        },
        parent: options.parent.as_ref().map(|parent| parent.id().to_string()),
        state: encode_state(bytes),
    };
    #[cfg_attr(not(feature = "seal"), allow(unused_mut, reason = "nothing signs it"))]
    let mut manifest = write_config(shelf, &config, layers, key)?;
    #[cfg(feature = "seal")]
    if let Some(key) = &options.sign {
        manifest.sign(key)?;
    }
    shelf.put(print(&manifest)?)
}

/// Writes configuration and manifest, and returns digest and length of the manifest.
pub(crate) fn write_snapshot(
    shelf: &mut dyn BlobSink,
    config: &Config,
    layers: Vec<Descriptor>,
    key: Option<&SealKey>,
) -> Result<(Sha256, u64), SaveError> {
    let manifest = write_config(shelf, config, layers, key)?;
    shelf.put(print(&manifest)?)
}

/// Writes the configuration, sealed with `key` if there is one, and returns the manifest.
fn write_config(
    shelf: &mut dyn BlobSink,
    config: &Config,
    layers: Vec<Descriptor>,
    key: Option<&SealKey>,
) -> Result<Manifest, SaveError> {
    let mut blob = shelf.begin(None)?.sealed(key)?;
    blob.push(print(config)?)?;
    let (digest, size) = shelf.hold(blob)?;
    let media_type = sealed_type(CONFIG_TYPE, key.is_some());
    Ok(Manifest::new(Descriptor::new(&media_type, digest, size), layers))
}

pub(crate) fn descriptor(layer: &WrittenLayer) -> Descriptor {
    let media_type = layer_type(layer.index.role, layer.index.encoding);
    Descriptor::new(&sealed_type(media_type, layer.sealed), layer.digest, layer.size)
}

/// The ranges cut to an index space of `pages` pages.
fn clip(ranges: &[PageRange], pages: usize) -> Vec<PageRange> {
    let all = PageRange::new(0, pages);
    ranges.iter().filter_map(|range| range.intersect(all)).collect()
}

/// The pages the new layer must look at: those given, or all that may hold something in the memory
/// or in the parent.
fn candidates(
    memory: &dyn Pages,
    parent: Option<&Snapshot>,
    changed: Option<&[PageRange]>,
) -> Vec<PageRange> {
    let Some(parent) = parent else { return memory.occupied() };
    if let Some(changed) = changed {
        return clip(changed, memory.pages());
    }
    let mut both = memory.occupied();
    both.extend(clip(&parent.occupied(), memory.pages()));
    PageRange::merge(both)
}
