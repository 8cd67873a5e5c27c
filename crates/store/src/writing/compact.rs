//! Compaction: a stack of layers becomes one.

use afresh_sys::PageRange;

use crate::format::index::{Encoding, Role};
use crate::format::manifest::{Config, encode_state, root_text};
use crate::writing::layer_writer::{Plan, write_layer};
use crate::writing::save::{descriptor, write_snapshot};
use crate::{Pages, SaveError, Sha256, Snapshot, Store};

/// Options of a compaction.
#[derive(Clone, Debug)]
pub struct CompactOptions {
    /// Encoding of the layer.
    pub encoding: Encoding,
    /// Whether the working set is kept.
    pub working_set: bool,
}

impl Default for CompactOptions {
    fn default() -> Self {
        Self { encoding: Encoding::Raw, working_set: true }
    }
}

impl Store {
    /// Writes `snapshot` as a single layer and tags the result `name`. It has no pages that upper
    /// layers hide, and the snapshot names no parent.
    ///
    /// If the name is that of `snapshot`, turns and saves that arrive in the meantime are not lost:
    /// the result is refused.
    ///
    /// # Errors
    /// [`SaveError::Moved`] for those; [`SaveError`] by cause; the name is unchanged then.
    pub fn compact(
        &self,
        name: &str,
        snapshot: &Snapshot,
        options: &CompactOptions,
    ) -> Result<Sha256, SaveError> {
        let mut shelf = self.stage_for(name)?;
        let expected = self.replaced_by(name, snapshot);
        let mut plan = Plan {
            role: Role::Base,
            encoding: options.encoding,
            candidates: snapshot.occupied(),
            below: None,
            parent: [0; 32],
            key: snapshot.key(),
        };
        let base = write_layer(&mut shelf, snapshot, &plan)?;
        let mut layers = vec![descriptor(&base)];
        let mut config: Config = snapshot.config().clone();
        config.parent = None;
        if snapshot.turns().is_some() {
            config.state = encode_state(snapshot.state());
            config.memory.pages = snapshot.pages() as u64;
        }
        config.memory.layers = vec![root_text(&base.index.root)];
        config.memory.working_set = None;
        let set: Vec<PageRange> = snapshot.working_set();
        if options.working_set && !set.is_empty() {
            plan.role = Role::WorkingSet;
            plan.candidates = set;
            plan.parent = base.index.root;
            let layer = write_layer(&mut shelf, snapshot, &plan)?;
            layers.push(descriptor(&layer));
            config.memory.working_set = Some(root_text(&layer.index.root));
        }
        let id = write_snapshot(&mut shelf, &config, layers, snapshot.key())?.0;
        shelf.rename(name, id, expected)?;
        Ok(id)
    }
}
