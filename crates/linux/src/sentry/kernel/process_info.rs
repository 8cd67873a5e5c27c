//! The identity of a guest process: its PID, relatives and program, with the program's arguments.
//!
//! Promises: nothing in here comes from the host except the program's parameters. A frozen one is
//! checked before use.

mod names;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::prctl_state::PrctlState;
use crate::sentry::kernel::resource_limits::ResourceLimits;

/// The PID that adopts orphans (`init`), and never reaps them.
pub(in crate::sentry) const INIT_PID: u32 = 1;

/// Maximum bytes of arguments, of variables, and of a path.
pub(in crate::sentry) const MAX_ARGUMENT_BYTES: usize = (crate::sentry::STACK_LEN / 4) as usize;

/// Arguments and variables that a program was started with, each with a zero behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArgumentStrings {
    // Shared by forks and states: they never change.
    #[serde(with = "crate::packed_bytes")]
    args: Arc<[u8]>,
    #[serde(with = "crate::packed_bytes")]
    env: Arc<[u8]>,
    /// The auxiliary vector behind them on the stack: pairs of words.
    #[serde(with = "crate::packed_bytes")]
    vector: Arc<[u8]>,
}

impl ArgumentStrings {
    pub(crate) fn new(args: &[Vec<u8>], env: &[Vec<u8>]) -> Self {
        let ended = |list: &[Vec<u8>]| -> Vec<u8> {
            list.iter().flat_map(|string| string.iter().copied().chain([0])).collect()
        };
        Self { args: ended(args).into(), env: ended(env).into(), vector: Arc::default() }
    }

    /// In a saved state, the strings that process `id` has: a vector that no program has.
    pub(in crate::sentry) fn same_as(id: u32) -> Self {
        Self { args: Arc::default(), env: Arc::default(), vector: id.to_le_bytes().into() }
    }

    /// The process that has these strings, if they are those of [`Self::same_as`].
    pub(in crate::sentry) fn referent(&self) -> Option<u32> {
        let id = <[u8; 4]>::try_from(&self.vector[..]).ok()?;
        (self.args.is_empty() && self.env.is_empty()).then(|| u32::from_le_bytes(id))
    }

    /// Whether both are in the same memory, as those of a process and its forks are.
    pub(in crate::sentry) fn shares_memory_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.args, &other.args)
            && Arc::ptr_eq(&self.env, &other.env)
            && Arc::ptr_eq(&self.vector, &other.vector)
    }

    pub(in crate::sentry) fn args(&self) -> &[u8] {
        &self.args
    }

    pub(in crate::sentry) fn env(&self) -> &[u8] {
        &self.env
    }

    pub(in crate::sentry) fn vector(&self) -> &[u8] {
        &self.vector
    }
}

/// The program of a process, for `/proc`.
#[derive(Debug)]
pub(crate) struct Executable {
    /// The path of its program, without links.
    pub(crate) program: Vec<u8>,
    /// Its name; 15 bytes are shown.
    pub(crate) name: Vec<u8>,
    pub(crate) strings: ArgumentStrings,
}

/// The identity of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessInfo {
    pub(crate) id: u32,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) session: u32,
    /// The owner of the memory that it uses: itself, or a parent that waits for its `exec`
    /// (`vfork`).
    pub(crate) memory: u32,
    /// The signal that stopped it, if it is stopped.
    pub(crate) stopped: Option<u8>,
    /// A stop or continuation that its parent has not waited for.
    pub(crate) news: Option<ChildEvent>,
    /// The path of its program.
    #[serde(with = "crate::packed_bytes")]
    pub(crate) program: Vec<u8>,
    pub(crate) strings: ArgumentStrings,
    pub(crate) limits: ResourceLimits,
    pub(crate) traits: PrctlState,
    /// Nanoseconds of CPU time that it and its reaped children have used.
    pub(crate) spent: u64,
    pub(crate) children: u64,
}

/// A change of a child that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ChildEvent {
    Stopped(u8),
    Continued,
    /// A stop of a tracee, with its event. No process has it as its news.
    Traced(u32),
}

impl ChildEvent {
    /// As `wait4` returns it.
    pub(in crate::sentry) fn status(self) -> i32 {
        match self {
            Self::Stopped(signal) => i32::from(signal) << 8 | 0x7f,
            Self::Continued => 0xffff,
            Self::Traced(code) => (code << 8 | 0x7f) as i32,
        }
    }
}

impl ProcessInfo {
    /// The guest's first.
    pub(in crate::sentry) fn first() -> Self {
        let (id, parent) = (FIRST, INIT_PID);
        let (stopped, news) = (None, None);
        let (program, strings, limits, traits) = Default::default();
        let (group, session, memory) = (id, id, id);
        let (spent, children) = (0, 0);
        Self {
            id,
            parent,
            group,
            session,
            memory,
            stopped,
            news,
            program,
            strings,
            limits,
            traits,
            spent,
            children,
        }
    }

    /// Whether a guest could have these settings.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        let by = match self.news {
            Some(ChildEvent::Stopped(by)) => Some(by),
            _ => None,
        };
        let strings = &self.strings;
        let short = [&self.program[..], strings.args(), strings.env(), strings.vector()];
        let is_own = !matches!(self.news, Some(ChildEvent::Traced(_)));
        is_own
            && self.stopped.into_iter().chain(by).all(|signal| (1..=64).contains(&signal))
            && self.limits.is_sound()
            && self.traits.is_sound()
            && short.iter().all(|bytes| bytes.len() <= MAX_ARGUMENT_BYTES)
    }
}
