//! The frozen state of a guest, which its resets return to.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use afresh_files::Node;
use afresh_memory::Image;
use serde::{Deserialize, Serialize};

use crate::platform::{Origin, Registers, Segments};
use crate::sentry::{InputSource, Kernel, Layout, SharedMapping, StoppedClock};

/// The wait of a frozen guest for its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IdleWait {
    /// In a read of its only thread: where to, and how much at most.
    Read { to: u64, wanted: u64 },
    /// All threads wait; the state has the reasons.
    Parked(InputSource),
    /// A thread waits for the caller, and others could run.
    Resting(InputSource),
}

/// The memory of a guest process without its content, and the registers of a process with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryPart {
    /// PID of the owner of the memory.
    pub(crate) memory: u32,
    /// PID of the process with these registers, which uses this memory.
    pub(crate) holds: u32,
    pub(crate) segments: Segments,
    pub(crate) registers: Registers,
}

/// Frozen memory with its content.
#[derive(Clone, Debug)]
pub(crate) struct FrozenMemory {
    pub(crate) image: Image,
    pub(crate) part: Arc<MemoryPart>,
}

impl FrozenMemory {
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.image.same(&other.image) && Arc::ptr_eq(&self.part, &other.part)
    }

    /// The same without the shared mappings of files `live` in `layout`.
    pub(crate) fn without_shares(self, layout: &Layout, live: &BTreeSet<Node>) -> Self {
        if !self.part.segments.show_shares(layout, live) {
            return self;
        }
        let segments = self.part.segments.cut(layout.own_mappings(live));
        let part = Arc::new(MemoryPart { segments, ..MemoryPart::clone(&self.part) });
        Self { part, ..self }
    }
}

/// All of a frozen guest.
#[derive(Clone, Debug)]
pub(crate) struct FrozenState {
    /// The content of each part, in the same order.
    pub(crate) images: Arc<[Image]>,
    pub(crate) rest: Arc<FrozenKernel>,
}

/// All of it but the content of its memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FrozenKernel {
    /// Memories by their owners; the first is the first process's.
    pub(crate) parts: Vec<Arc<MemoryPart>>,
    pub(crate) state: Arc<Kernel>,
    pub(crate) wait: IdleWait,
    /// Its clocks.
    pub(crate) clock: StoppedClock,
    /// Whether the program is notified of each new generation.
    pub(crate) watches_generation: bool,
    /// The template for processes with the first memory.
    pub(crate) origin: Origin,
    /// Files whose shared mappings are in none of the segments: the tree has their bytes.
    pub(crate) live: BTreeSet<Node>,
}

impl IdleWait {
    /// Time until the next event in a guest with this wait.
    pub(crate) fn due(self, state: &Kernel, now: u64) -> Option<Duration> {
        match self {
            Self::Read { .. } => None,
            Self::Parked(_) => state.due(now).map(Duration::from_nanos),
            Self::Resting(_) => Some(Duration::ZERO),
        }
    }
}

impl FrozenKernel {
    /// Zero if the guest has an event to come, else `None`. Its time passes only once it runs.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.wait.due(&self.state, self.clock.now()).map(|_| Duration::ZERO)
    }
}

impl Kernel {
    /// The first error unless these are its memories, and hold the registers of processes that use
    /// them; those of all other processes and threads are here.
    pub(crate) fn check_contexts(&self, parts: &[&MemoryPart]) -> Result<(), &'static str> {
        const OTHERS: &str = "its memories are not its processes'";
        let of = |memory: u32| parts.iter().find(|part| part.memory == memory);
        let known = |part: &&MemoryPart| {
            self.processes.info(part.holds).is_some_and(|info| info.memory == part.memory)
        };
        let ids = parts.iter().map(|part| part.memory);
        if !ids.eq(self.memories().into_keys()) || !parts.iter().all(known) {
            return Err(OTHERS);
        }
        for process in self.processes.iter() {
            let (info, threads) = (&process.info, &process.threads);
            let part = of(info.memory).ok_or(OTHERS)?;
            if threads.current().context.is_none() != (part.holds == info.id) {
                return Err(OTHERS);
            }
            let mut contexts = threads.iter().filter_map(|(_, thread)| thread.context.as_ref());
            contexts.try_for_each(|context| context.check(&part.registers))?;
        }
        Ok(())
    }
}

impl FrozenState {
    pub(crate) fn new(
        grounds: Vec<FrozenMemory>,
        state: Arc<Kernel>,
        wait: IdleWait,
        clock: StoppedClock,
    ) -> Self {
        let (images, parts): (Vec<_>, Vec<Arc<MemoryPart>>) =
            grounds.into_iter().map(|ground| (ground.image, ground.part)).unzip();
        let (watches_generation, origin) = (state.watches_generation(), Origin::default());
        let live = parts
            .iter()
            .zip(state.memories())
            .flat_map(|(part, (_, layout))| unstored_shares(&part.segments, layout))
            .collect();
        let rest = FrozenKernel { parts, state, wait, clock, watches_generation, origin, live };
        Self { images: images.into(), rest: Arc::new(rest) }
    }

    /// The memory of process `memory`.
    pub(crate) fn ground(&self, memory: u32) -> Option<FrozenMemory> {
        let index = self.rest.parts.binary_search_by_key(&memory, |part| part.memory).ok()?;
        let (image, part) = (self.images.get(index)?.clone(), Arc::clone(&self.rest.parts[index]));
        Some(FrozenMemory { image, part })
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        let images = self.images.iter().zip(other.images.iter()).all(|(one, two)| one.same(two));
        images && Arc::ptr_eq(&self.rest, &other.rest)
    }

    /// Pages that it has mapped, and those of them that take memory.
    pub(crate) fn pages(&self) -> (usize, usize) {
        let mapped = self.rest.parts.iter().map(|part| part.segments.pages()).sum();
        (mapped, self.images.iter().map(Image::stored_pages).sum())
    }
}

/// Files with a shared mapping in `layout` that `segments` do not cover.
pub(crate) fn unstored_shares(segments: &Segments, layout: &Layout) -> Vec<Node> {
    let shared = layout.shared().into_iter();
    let unstored = shared.filter(|shared| segments.within(shared.range.clone()).next().is_none());
    unstored.map(|shared| shared.share.node).collect()
}

impl Segments {
    /// Whether some of them are shared mappings of files `live` in `layout`.
    pub(crate) fn show_shares(&self, layout: &Layout, live: &BTreeSet<Node>) -> bool {
        let live = |shared: &SharedMapping| live.contains(&shared.share.node);
        let mut shared = layout.shared().into_iter().filter(live);
        shared.any(|shared| self.within(shared.range).next().is_some())
    }
}
