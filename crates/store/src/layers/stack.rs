//! A stack of layers from a manifest and a configuration. This is the only place that compares the
//! three with each other, and with the limits of the reader.
//!
//! Promises: in a [`Stack`] every extent of every layer and of the working set is inside the memory
//! that the configuration names, and points inside the pages that its layer stores. Readers of the
//! map and the set can use its ranges unchecked.

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::format::blob::BlobRead;
use crate::format::index::{Encoding, Role};
use crate::format::manifest::{Config, Manifest, layer_type, parse_root, sealed_type};
use crate::format::map::MapRun;
use crate::seal::SealKey;
use crate::seal::access::Access;
use crate::{Layer, LayerError, OpenError, Origin, PageMap, Sha256};

/// Layers that fit together, and where each page of the memory is in them.
#[derive(Debug)]
pub(crate) struct Stack {
    /// Bottom first.
    pub(crate) layers: Vec<Layer>,
    pub(crate) working_set: Option<Layer>,
    pub(crate) map: PageMap,
    /// The pages of the working set, in order, neighbours joined.
    pub(crate) set: Vec<PageRange>,
}

/// Opens the blob of layer `n` of the manifest, with this digest and length.
pub(crate) type OpenBlob<'a> =
    dyn FnMut(usize, Sha256, u64) -> Result<Box<dyn BlobRead>, OpenError> + 'a;

impl Stack {
    /// Opens the layers that `manifest` lists and `config` describes. `key` is that of a sealed
    /// snapshot.
    pub(crate) fn open(
        manifest: &Manifest,
        config: &Config,
        access: &Access,
        key: Option<&SealKey>,
        blob: &mut OpenBlob<'_>,
    ) -> Result<Self, OpenError> {
        config.check()?;
        let memory = &config.memory;
        let limits = access.limits();
        limits.check_memory(memory.pages * PAGE_SIZE as u64)?;
        let stack = memory.layers.len();
        if manifest.layers.len() != stack + usize::from(memory.working_set.is_some()) {
            return Err(OpenError::Json {
                what: "the manifest",
                why: "it has another number of layers than the configuration".to_owned(),
            });
        }
        let mut layers: Vec<Layer> = Vec::with_capacity(manifest.layers.len());
        let mut indexes = 0u64;
        let mut below = [0; 32];
        for (number, root) in memory.layers.iter().chain(&memory.working_set).enumerate() {
            let there = &manifest.layers[number];
            let root = parse_root(root)?;
            let digest = there.digest("the manifest")?;
            let opened = blob(number, digest, there.size)?;
            let layer = Layer::from_stored(opened, digest, there.size, &root, key, limits)?;
            indexes = indexes.saturating_add(layer.index().bytes());
            limits.check_index(indexes)?;
            let wanted = sealed_type(layer_type(layer.role(), layer.encoding()), key.is_some());
            if there.media_type != wanted {
                let found = there.media_type.clone();
                return Err(OpenError::MediaType { what: "a layer", found });
            }
            let role = match number {
                n if n == stack => Role::WorkingSet,
                0 => Role::Base,
                _ => Role::Delta,
            };
            check_place(&layer, role, &below, memory.pages)?;
            if role != Role::WorkingSet {
                below = root;
            }
            layers.push(layer);
        }
        let stored = layers.iter().map(Layer::stored).fold(0, u64::saturating_add);
        let blobs = manifest.layers.iter().map(|it| it.size).fold(0, u64::saturating_add);
        let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64);
        limits.check_expansion(bytes(stored), blobs)?;
        let working_set = if memory.working_set.is_some() { layers.pop() } else { None };
        let map = PageMap::new(memory.pages as usize, layers.iter().map(Layer::index));
        let filled = map.runs().iter().filter(|run| run.origin != Origin::Zero);
        let content = bytes(filled.map(|run| run.pages.len as u64).sum());
        limits.check_content(content)?;
        limits.check_expansion(content, blobs)?;
        limits.check_groups(group_bytes(&layers, map.runs()), blobs)?;
        let set = working_set.as_ref().map_or_else(Vec::new, runs_of);
        Ok(Self { layers, working_set, map, set })
    }
}

/// Bytes of the compressed groups that a reader of `runs` decompresses. Each run costs all of its
/// groups.
pub(crate) fn group_bytes<'a>(layers: &[Layer], runs: impl IntoIterator<Item = &'a MapRun>) -> u64 {
    let groups = runs.into_iter().map(|run| match run.origin {
        Origin::Layer { layer, stored } if layers[layer].encoding() == Encoding::Zstd => {
            let each = layers[layer].group_pages() as u64;
            let last = (stored + run.pages.len as u64).saturating_sub(1) / each;
            (last - stored / each + 1) * each
        }
        _ => 0,
    });
    groups.fold(0, u64::saturating_add).saturating_mul(PAGE_SIZE as u64)
}

/// A layer must be what its place in the stack says, and span no more than the memory.
fn check_place(layer: &Layer, role: Role, below: &[u8; 32], pages: u64) -> Result<(), OpenError> {
    let bad = |source| Err(OpenError::Layer { digest: layer.digest(), source });
    if layer.role() != role {
        return bad(LayerError::Field { field: "role", value: layer.role() as u64 });
    }
    if layer.index().parent != *below {
        return bad(LayerError::Parent);
    }
    // Layers below may be from when the memory was smaller. A working set is of this very memory.
    let own = layer.index().pages;
    if own > pages || (role == Role::WorkingSet && own != pages) {
        return bad(LayerError::Span { layer: own, memory: pages });
    }
    Ok(())
}

/// The pages that a layer names.
fn runs_of(layer: &Layer) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for extent in &layer.index().extents {
        let range = PageRange::new(extent.first as usize, extent.len as usize);
        match runs.last_mut() {
            Some(last) if last.end() == range.start => last.len += range.len,
            _ => runs.push(range),
        }
    }
    runs
}
