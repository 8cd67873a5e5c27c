//! The findings of a verification.

use std::collections::BTreeSet;

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// Calls made.
    pub calls: u64,
    /// Calls that failed. A trap counts as an answer.
    pub failed_calls: u64,
    /// Bytes of memory that differed from the warm state before a call.
    pub bytes_differ: usize,
    /// Globals, tables, segments or registers that differed.
    pub items_differ: usize,
    /// Answers that differed from those of an instance that had never run anything.
    pub answers_differ: u64,
    /// Maximum bytes that a call changed; `None` for kinds of guests that do not count them.
    pub most_bytes_changed: Option<usize>,
    /// Randomness of clones, if it was tested.
    pub clones: Option<CloneRandomness>,
    /// Up to 100 values of the answer that change from call to call in one clone and are equal in
    /// another. Each may be a random number that every clone draws.
    pub repeating: Vec<String>,
    /// Differences outside memory, without repetitions.
    pub items: BTreeSet<String>,
    /// Parts that were not compared, with the reason.
    pub unseen: BTreeSet<&'static str>,
    /// The error of the first failed call.
    pub failure: Option<String>,
}

impl Verification {
    /// Whether every call started from the warm state. It is meaningless if
    /// [`Verification::proves_nothing`].
    #[must_use]
    pub fn is_pristine(&self) -> bool {
        self.bytes_differ == 0 && self.items_differ == 0
    }

    /// The reason if the verification proves nothing, because no call succeeded.
    #[must_use]
    pub fn proves_nothing(&self) -> Option<String> {
        match &self.failure {
            _ if self.failed_calls < self.calls => None,
            None => Some("no call was made".to_owned()),
            Some(failure) => {
                Some(format!("all {} calls failed, the first thus: {failure}", self.calls))
            }
        }
    }

    /// Enters the findings of a comparison before a call.
    #[allow(dead_code, reason = "only Wasm guests are compared in detail")]
    pub(super) fn add(
        &mut self,
        bytes: usize,
        items: impl ExactSizeIterator<Item = String>,
        unseen: impl IntoIterator<Item = &'static str>,
    ) {
        self.bytes_differ += bytes;
        self.items_differ += items.len();
        self.items.extend(items);
        self.unseen.extend(unseen);
    }

    /// Enters the answer of a call.
    pub(super) fn answered(&mut self, answer: &Result<String, String>) {
        self.calls += 1;
        if let Err(failure) = answer {
            self.failed_calls += 1;
            self.failure.get_or_insert_with(|| failure.clone());
        }
    }
}

/// Randomness of clones of one warm state, from the same call twice in one clone and once in
/// another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloneRandomness {
    /// They answer differently, in every value that changes.
    Differ,
    /// Some values differ, and others are alike while they change from call to call;
    /// [`Verification::repeating`].
    Partly,
    /// The answer never changes.
    Constant,
    /// They answer alike while one clone's answers change, and the guest takes fresh entropy.
    AlikeByState,
    /// They answer alike while one clone's answers change: every clone draws the same random
    /// numbers.
    Alike,
}

impl std::fmt::Display for CloneRandomness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Differ => "clones answer differently: they draw their own random numbers",
            Self::Partly => {
                "clones answer differently in some values and alike in others that change: if those are random \
                 numbers, every clone draws the same ones; reseed each generator when a clone \
                 starts: in the export afresh_reseed (afresh-reseed in a component), or when /dev/afresh/generation is \
                 readable in a Linux program"
            }
            Self::Constant => "the answer never changes: nothing random in it",
            Self::AlikeByState => {
                "clones answer alike though they take fresh entropy: the answer depends on state, not on \
                 chance"
            }
            Self::Alike => {
                "clones answer alike while one clone's answers change: if these are random numbers, every \
                 clone draws the same ones; to give each its own, export afresh_reseed (afresh-reseed in a component), or \
                 reseed when /dev/afresh/generation is readable in a Linux program"
            }
        })
    }
}
