//! The parts of a state that version 19 of snapshots added.
//!
//! Promises: a state without them, of an older version, has their defaults. A state whose parts
//! [`Kernel::check_extensions`] refuses is neither saved nor opened. May break it: a field that is
//! added after the golden of version 19 was written.

use std::collections::{BTreeMap, BTreeSet};

use afresh_files::Node;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::async_files::AsyncFiles;
use crate::sentry::kernel::cpu_time::system::SystemTimes;
use crate::sentry::kernel::exit_statuses::ExitStatuses;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::keys::Keys;
use crate::sentry::kernel::queue_notices::QueueNotices;
use crate::sentry::kernel::shared_parts::SharedParts;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::timer_slack::DefaultSlacks;
use crate::sentry::kernel::tracing::Tracing;
use crate::sentry::mm::layout::traits::PackedTraits;

/// The error of parts that processes share.
const SHARING: &str = "processes share descriptors or directories that they cannot";

/// The part of a state that version 19 of snapshots added.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedExtensions {
    /// Rules of mappings, by the owner of the memory.
    traits: Vec<(u32, PackedTraits)>,
    /// Segments of shared memory that are locked.
    locked_segments: Vec<u32>,
    /// Lists of mappings that were opened, and their memories.
    map_files: Vec<(Node, u32)>,
    /// Owners of open files.
    async_files: AsyncFiles,
    /// Timer slacks that processes began with.
    slacks: DefaultSlacks,
    /// Statuses of reaped processes.
    exits: ExitStatuses,
    /// Notices of messages in named queues.
    queue_notices: QueueNotices,
    /// System times of processes.
    system_times: SystemTimes,
    /// Processes that use the descriptors of another, and those.
    shared_tables: BTreeMap<u32, u32>,
    /// Other parts that processes share.
    shared_parts: SharedParts,
    /// Tracers and tracees.
    tracing: Tracing,
    keys: Keys,
}

impl Kernel {
    pub(crate) fn pack_extensions(&self) -> PackedExtensions {
        let traits = self.memories().into_iter();
        let traits = traits.map(|(id, layout)| (id, layout.packed_traits()));
        let map_files = self.map_files.iter().filter(|(node, _)| self.tree.stat(**node).is_ok());
        PackedExtensions {
            traits: traits.filter(|(_, packed)| !packed.is_empty()).collect(),
            locked_segments: self.system_v.packed_locks(),
            map_files: map_files.map(|(node, memory)| (*node, *memory)).collect(),
            async_files: self.table.async_files.clone(),
            slacks: self.slacks.clone(),
            exits: self.exits.clone(),
            queue_notices: self.queue_notices.clone(),
            system_times: self.system_times.clone(),
            shared_tables: self.table.sharing(),
            shared_parts: self.shared_parts.clone(),
            tracing: self.processes.tracing.clone(),
            keys: self.keys.clone(),
        }
    }

    /// Takes the parts into a state that has everything else. [`Self::check_extensions`] comes
    /// next.
    ///
    /// # Errors
    /// The reason why they have no place in the state.
    pub(crate) fn unpack_extensions(
        &mut self,
        extensions: PackedExtensions,
    ) -> Result<(), &'static str> {
        let PackedExtensions {
            traits,
            locked_segments,
            map_files,
            async_files,
            slacks,
            exits,
            queue_notices,
            system_times,
            shared_tables,
            shared_parts,
            tracing,
            keys,
        } = extensions;
        if !self.system_v.unpack_locks(&locked_segments) {
            return Err("a segment of shared memory is locked that does not exist");
        }
        if map_files.iter().any(|(node, _)| self.tree.stat(*node).is_err()) {
            return Err("a list of mappings is no file");
        }
        self.map_files = map_files.into_iter().collect();
        for (memory, packed) in traits {
            if !self.layout_of_mut(memory).is_some_and(|layout| layout.unpack_traits(packed)) {
                return Err("a mapping has rules that it cannot have");
            }
        }
        if !self.table.thaw_sharing(shared_tables, self.processes.current_id()) {
            return Err(SHARING);
        }
        self.table.async_files = async_files.thawed();
        (self.system_times, self.shared_parts) = (system_times, shared_parts);
        (self.processes.tracing, self.keys) = (tracing, keys);
        (self.slacks, self.exits, self.queue_notices) = (slacks, exits, queue_notices);
        Ok(())
    }

    /// The first error of these parts, if a guest cannot have them.
    pub(in crate::sentry) fn check_extensions(&self) -> Result<(), &'static str> {
        let ensure = |holds: bool, error| if holds { Ok(()) } else { Err(error) };
        let lives = |process| self.processes.lives(process);
        let exists = |process| self.processes.exists(process);
        let is_open = |id| self.table.description(id).is_some();
        let owners = self.table.async_files.is_sound(is_open);
        ensure(owners, "the owner of an open file is invalid")?;
        ensure(self.slacks.is_sound(lives), "the timer slack of a process is invalid")?;
        let described = self.table.descriptions().filter_map(|(_, found)| match found.open {
            FileObject::Process(id) => Some(id),
            _ => None,
        });
        let described: BTreeSet<u32> = described.collect();
        let has_ended = |process| !exists(process) && described.contains(&process);
        ensure(self.exits.is_sound(has_ended), "the status of a process is invalid")?;
        let notices = self.queue_notices.is_sound(|queue| self.is_queue_asked(queue));
        ensure(notices, "the notice of a queue is invalid")?;
        ensure(self.system_times.is_sound(exists), "the system time of a process is invalid")?;
        let shares = self.table.is_sharing_sound(lives) && self.shared_parts.is_sound(lives);
        ensure(shares, SHARING)?;
        let next = self.processes.current.threads.next();
        let home = |thread| self.home_of_thread(thread);
        let traces = self.processes.tracing.is_sound(home, lives, next);
        ensure(traces, "a trace of a thread is invalid")?;
        ensure(self.keys.is_sound(lives, |thread| home(thread).is_some()), "a key is invalid")
    }
}
