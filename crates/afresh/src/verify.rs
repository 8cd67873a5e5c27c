//! Many calls, and before each the proof that nothing of the one before is left.
//!
//! Before every call the instance that the pool would hand out is compared with the warm state, byte by
//! byte and global by global. The answer of a module's call is compared with that of an instance that has
//! never run anything; of other guests, with the first call's. Two clones of a module are watched for
//! drawing the same random numbers.

use std::collections::BTreeSet;

use crate::error::describe;
#[cfg(feature = "wasm")]
use crate::guest::Ready;
use crate::{Call, CallError, Guest, Lease, VerifyError};

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// Calls made.
    pub calls: u64,
    /// Calls that failed. A guest that traps is an answer like another.
    pub failed_calls: u64,
    /// Bytes of memory that differed from the warm state before a call.
    pub bytes_differ: usize,
    /// Globals, tables, segments or registers that did.
    pub items_differ: usize,
    /// Answers that differed from those of an instance that had never run anything.
    pub answers_differ: u64,
    /// The most bytes that a call changed.
    pub most_bytes_changed: usize,
    /// How clones stand to randomness, where that was tried.
    pub clones: Option<Clones>,
    /// What differed beside memory, each once.
    pub items: BTreeSet<String>,
    /// What was not compared, and why it need not be.
    pub unseen: BTreeSet<&'static str>,
    /// How the first call that failed did.
    pub failure: Option<String>,
}

impl Verification {
    /// Whether every call started from the warm state. Means nothing where
    /// [`Verification::proves_nothing`].
    #[must_use]
    pub fn is_pristine(&self) -> bool {
        self.bytes_differ == 0 && self.items_differ == 0
    }

    /// Why it proves nothing, if no call succeeded.
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

    /// Enters what a comparison before a call found.
    #[cfg(feature = "wasm")]
    fn add(&mut self, found: afresh_wasm::Comparison) {
        self.bytes_differ += found.bytes;
        self.items_differ += found.items.len();
        self.items.extend(found.items);
        self.unseen.extend(found.unseen);
    }

    /// Enters the answer of a call.
    fn answered(&mut self, answer: &Result<String, String>) {
        self.calls += 1;
        if let Err(failure) = answer {
            self.failed_calls += 1;
            self.failure.get_or_insert_with(|| failure.clone());
        }
    }
}

/// How clones of one warm state stand to randomness: the same call twice in one clone, and once in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Clones {
    /// They answer differently.
    Differ,
    /// The answer never changes.
    Constant,
    /// They answer alike while one clone's answers change, and the guest takes fresh entropy.
    AlikeByState,
    /// They answer alike while one clone's answers change: every clone draws the same random numbers.
    Alike,
}

impl std::fmt::Display for Clones {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Differ => "clones answer differently: they draw their own random numbers",
            Self::Constant => "the answer never changes: nothing random in it",
            Self::AlikeByState => {
                "clones answer alike though they take fresh entropy: the answer depends on state, not on \
                 chance"
            }
            Self::Alike => {
                "clones answer alike while one clone's answers change: if these are random numbers, every \
                 clone draws the same ones; export afresh_reseed to give each its own"
            }
        })
    }
}

/// The answer as text, or how the call failed, which is an answer too. The way it failed counts, not where
/// in the code.
fn answer(lease: &mut Lease<'_>, call: &Call) -> Result<String, String> {
    lease.ask(call).map(|answer| answer.text()).map_err(|error| match &error {
        CallError::Guest { source, .. } => source.to_string(),
        _ => describe(&error),
    })
}

impl Guest {
    /// Makes `call` so many times, and compares. `progress` is told after each.
    ///
    /// # Errors
    /// [`VerifyError`] when no comparison can be made; what differs is no error.
    pub fn verify(
        &self,
        call: &Call,
        calls: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Verification, VerifyError> {
        match &self.inner().ready {
            #[cfg(feature = "wasm")]
            Ready::Module(warm) => verify_module(self, warm, call, calls, progress),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => verify_repeatedly(self, call, calls, progress),
        }
    }
}

#[cfg(feature = "wasm")]
fn verify_module(
    guest: &Guest,
    warm: &afresh_wasm::Warm,
    call: &Call,
    calls: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<Verification, VerifyError> {
    let compare = |e: afresh_wasm::WarmError| VerifyError::Compare(e.into());
    let mut found = Verification::default();
    // A call that can never be made is not verified.
    if let Err(error @ CallError::Request { .. }) = guest.ask(call) {
        return Err(error.into());
    }
    for done in 1..=calls {
        // Fresh entropy is a difference on purpose; it is drawn after the comparison.
        found.add(warm.compare().map_err(compare)?);
        let mut pooled = guest.lease().map_err(CallError::from)?;
        let given = answer(&mut pooled, call);
        found.most_bytes_changed = found.most_bytes_changed.max(pooled.differences()?.0);
        // Held while the pooled one is out, so that it is another instance; discarded, so that the next
        // comparison is again with one that has never run anything.
        if let Some(mut untouched) = Lease::untouched(guest).map_err(CallError::from)? {
            let expected = answer(&mut untouched, call);
            untouched.discard();
            found.answers_differ += u64::from(given != expected);
        }
        found.answered(&given);
        progress(done);
    }
    found.add(warm.compare().map_err(compare)?);
    found.clones = Some(clones(guest, warm.report().reseeds, call)?);
    Ok(found)
}

#[cfg(feature = "wasm")]
fn clones(guest: &Guest, reseeds: bool, call: &Call) -> Result<Clones, VerifyError> {
    let mut one = guest.lease().map_err(CallError::from)?;
    let mut other = guest.lease().map_err(CallError::from)?;
    let first = answer(&mut one, call);
    let second = answer(&mut one, call);
    let cloned = answer(&mut other, call);
    Ok(if first != cloned {
        Clones::Differ
    } else if first == second {
        Clones::Constant
    } else if reseeds {
        Clones::AlikeByState
    } else {
        Clones::Alike
    })
}

/// Guests of which no untouched instance can be had beside: every answer against the first.
fn verify_repeatedly(
    guest: &Guest,
    call: &Call,
    calls: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<Verification, VerifyError> {
    let mut found = Verification::default();
    // A call that can never be made is not verified.
    if let Err(error @ CallError::Request { .. }) = guest.ask(call) {
        return Err(error.into());
    }
    let mut first = None;
    for done in 1..=calls {
        compare(guest, &mut found)?;
        let mut lease = guest.lease().map_err(CallError::from)?;
        let given = answer(&mut lease, call);
        #[cfg(feature = "wasm")]
        if matches!(guest.inner().ready, Ready::Component(_)) {
            found.most_bytes_changed = found.most_bytes_changed.max(lease.differences()?.0);
        }
        found.answered(&given);
        found.answers_differ += u64::from(*first.get_or_insert_with(|| given.clone()) != given);
        progress(done);
    }
    compare(guest, &mut found)?;
    Ok(found)
}

/// Compares the instance that the next call would get with the warm state.
fn compare(guest: &Guest, found: &mut Verification) -> Result<(), VerifyError> {
    #[cfg(feature = "wasm")]
    if let Ready::Component(warm) = &guest.inner().ready {
        found.add(warm.compare().map_err(|e| VerifyError::Compare(e.into()))?);
        return Ok(());
    }
    let (bytes, items) = guest.lease().map_err(CallError::from)?.differences()?;
    found.bytes_differ += bytes;
    found.items_differ += items;
    Ok(())
}
