//! The parts of a state that version 19 of snapshots added.
//!
//! Promises: a state without them, of an older version, has their defaults. May break it: a field
//! that is added after the golden of version 19 was written.

use std::collections::BTreeMap;

use afresh_files::Node;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::async_files::AsyncFiles;
use crate::sentry::kernel::cpu_time::system::SystemTimes;
use crate::sentry::kernel::exit_statuses::ExitStatuses;
use crate::sentry::kernel::keys::Keys;
use crate::sentry::kernel::queue_notices::QueueNotices;
use crate::sentry::kernel::shared_parts::SharedParts;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::timer_slack::DefaultSlacks;
use crate::sentry::kernel::tracing::Tracing;
use crate::sentry::mm::layout::traits::PackedTraits;

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

    /// Takes the parts into a state that has everything else.
    ///
    /// # Errors
    /// The reason why they do not fit the state.
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
        let is_open = |id| self.table.description(id).is_some();
        let async_files =
            async_files.thawed(is_open).ok_or("the owner of an open file is invalid")?;
        self.table.async_files = async_files;
        if !slacks.is_sound(|process| self.processes.lives(process)) {
            return Err("the timer slack of a process is invalid");
        }
        let has_ended = |process| !self.processes.exists(process) && self.is_described(process);
        if !exits.is_sound(has_ended) {
            return Err("the status of a process is invalid");
        }
        if !queue_notices.is_sound(|queue| self.is_queue_asked(queue)) {
            return Err("the notice of a queue is invalid");
        }
        if !system_times.is_sound(|process| self.processes.exists(process)) {
            return Err("the system time of a process is invalid");
        }
        self.system_times = system_times;
        let lives = |process| self.processes.lives(process);
        let own = self.processes.current_id();
        if !self.table.thaw_sharing(shared_tables, own, lives) || !shared_parts.is_sound(lives) {
            return Err("processes share descriptors or directories that they cannot");
        }
        self.shared_parts = shared_parts;
        let next = self.processes.current.threads.next();
        let lives = |process| self.processes.lives(process);
        if !tracing.is_sound(|thread| self.home_of_thread(thread), lives, next) {
            return Err("a trace of a thread is invalid");
        }
        let is_thread = |thread| self.home_of_thread(thread).is_some();
        if !keys.is_sound(lives, is_thread) {
            return Err("a key is invalid");
        }
        (self.processes.tracing, self.keys) = (tracing, keys);
        (self.slacks, self.exits, self.queue_notices) = (slacks, exits, queue_notices);
        Ok(())
    }
}
