//! Who a process of the guest's is: its number, relatives, and the program that it runs, with what that was started with.
//!
//! Promises: nothing in here is the host's but what the program was given. A frozen one is checked before it counts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::State;
use super::control_calls::Traits;
use super::family::FIRST;
use super::limits::Limits;

/// Who takes children over whose parent has ended (`init`), and never asks for them.
pub(super) const NOBODY: u32 = 1;
/// Most bytes of arguments, and of variables, as of a path.
const LONGEST: usize = 1 << 20;

/// Arguments and variables that a program was started with, each with a zero behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(Vec<u8>, Vec<u8>)", into = "(Vec<u8>, Vec<u8>)")]
pub(crate) struct Strings {
    // Shared by all who were forked since, and by states: they never change.
    args: Arc<[u8]>,
    env: Arc<[u8]>,
}

impl From<(Vec<u8>, Vec<u8>)> for Strings {
    fn from((args, env): (Vec<u8>, Vec<u8>)) -> Self {
        Self { args: args.into(), env: env.into() }
    }
}

impl From<Strings> for (Vec<u8>, Vec<u8>) {
    fn from(strings: Strings) -> Self {
        (strings.args.to_vec(), strings.env.to_vec())
    }
}

impl Strings {
    pub(crate) fn new(args: &[Vec<u8>], env: &[Vec<u8>]) -> Self {
        let ended = |list: &[Vec<u8>]| -> Vec<u8> {
            list.iter().flat_map(|string| string.iter().copied().chain([0])).collect()
        };
        (ended(args), ended(env)).into()
    }

    pub(super) fn args(&self) -> &[u8] {
        &self.args
    }

    pub(super) fn env(&self) -> &[u8] {
        &self.env
    }
}

/// What a process is known by, whatever runs it.
#[derive(Debug)]
pub(crate) struct Known {
    /// The path of its program, without links.
    pub(crate) program: Vec<u8>,
    /// What it is called, of which 15 bytes are told.
    pub(crate) name: Vec<u8>,
    pub(crate) strings: Strings,
}

impl State {
    /// Tells everybody which program the current process runs.
    pub(crate) fn be_known(&mut self, known: Known) {
        let thread = self.threads.current_mut();
        let told = known.name.len().min(thread.name.len() - 1);
        thread.name = Default::default();
        thread.name[..told].copy_from_slice(&known.name[..told]);
        self.family.own.program = known.program;
        self.family.own.strings = known.strings;
    }
}

/// Who a process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kin {
    pub(crate) id: u32,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) session: u32,
    /// Whose memory it uses: its own, or that of a parent who waits until it runs another program (`vfork`).
    pub(crate) memory: u32,
    /// Whether it was stopped, and by which signal.
    pub(crate) stopped: Option<u8>,
    /// What its parent was not told yet: that it was stopped, or goes on.
    pub(crate) news: Option<News>,
    /// The path of its program.
    pub(crate) program: Vec<u8>,
    pub(crate) strings: Strings,
    pub(crate) limits: Limits,
    pub(crate) traits: Traits,
    /// Nanoseconds of processor time that it has spent, and that children have which it was told of.
    pub(crate) spent: u64,
    pub(crate) children: u64,
}

/// What becomes of a process that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum News {
    Stopped(u8),
    Continued,
}

impl News {
    /// As `wait4` tells it.
    pub(super) fn status(self) -> i32 {
        match self {
            Self::Stopped(signal) => i32::from(signal) << 8 | 0x7f,
            Self::Continued => 0xffff,
        }
    }
}

impl Kin {
    /// The guest's first.
    pub(super) fn first() -> Self {
        let (id, parent) = (FIRST, NOBODY);
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

    /// Whether what it says of itself is what a guest could have.
    pub(super) fn is_sound(&self) -> bool {
        let by = match self.news {
            Some(News::Stopped(by)) => Some(by),
            _ => None,
        };
        let short = [&self.program[..], self.strings.args(), self.strings.env()];
        self.stopped.into_iter().chain(by).all(|signal| (1..=64).contains(&signal))
            && self.limits.is_sound()
            && self.traits.is_sound()
            && short.iter().all(|bytes| bytes.len() <= LONGEST)
    }
}
