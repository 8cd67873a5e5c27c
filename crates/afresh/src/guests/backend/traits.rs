//! The interface of each kind of guest. Defaults are for kinds that lack a capability.

use std::future::ready;
use std::time::Duration;

use afresh_memory::{Feature, FreezePreparation, Image};
use afresh_pager::{SnapshotContents, SnapshotMemory, SnapshotOptions, SnapshotState};
use afresh_pool::PoolStats;
use afresh_store::{Sha256, Snapshot, Store};

use crate::guests::backend::{Backend, Instance, SessionBackend};
use crate::guests::call::{Entry, Function};
use crate::guests::verification::Verification;
use crate::{
    Answer, CallError, CallOptions, Cause, Guest, InstanceDifference, Kind, LeaseError,
    LeaseOptions, Options, OutputSource, OutputStream, SaveError, SessionError, VerifyError,
};

/// A warm guest, whose instances all start from one state.
pub(crate) trait WarmGuest {
    /// Its kind.
    fn kind(&self) -> Kind;

    /// An instance in the warm state.
    fn lease_instance(&self) -> Result<Instance<'_>, LeaseError>;

    /// An instance in the warm state, with options.
    fn instance_with(&self, options: &LeaseOptions) -> Result<Instance<'_>, LeaseError>;

    /// An instance in the warm state that borrows nothing.
    fn owned_instance(&self, options: &LeaseOptions) -> Result<Instance<'static>, LeaseError>;

    /// As [`WarmGuest::owned_instance`], waiting as a task does.
    fn async_instance(
        &self,
        options: LeaseOptions,
    ) -> impl Future<Output = Result<Instance<'static>, LeaseError>> + Send;

    /// An instance that has never run anything but the warm-up; `None` where instances are always
    /// new, or none can be made apart from the pool.
    fn lease_untouched(&self) -> Result<Option<Instance<'_>>, LeaseError> {
        Ok(None)
    }

    /// Looks a handler of bytes up.
    fn find_function(&self, name: &str) -> Result<Function, CallError> {
        Ok(Function { name: name.to_owned(), entry: None })
    }

    /// Counters of the pool.
    fn count_instances(&self) -> PoolStats;

    /// The method of resets in a word.
    fn describe_resets(&self) -> String;

    /// Whether a call's input goes into a new connection.
    fn is_listening(&self) -> bool {
        false
    }

    /// A live guest that begins in the warm state.
    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError>;

    /// Freezes the warm state.
    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause>;

    /// Freezes the warm state as the root of the tree of states.
    fn freeze_root(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        self.freeze_warm()
    }

    /// Refuses to record working sets where the kind has none.
    fn check_recording(&self) -> Result<(), SaveError> {
        Ok(())
    }

    /// Compares the instance that the next call would get with the warm state.
    fn compare_next(&self, guest: &Guest, found: &mut Verification) -> Result<(), VerifyError> {
        let differences = guest.lease().map_err(CallError::from)?.differences()?;
        found.bytes_differ += differences.bytes;
        found.items_differ += differences.items;
        Ok(())
    }

    /// Whether an instance can be compared after a call without ending it.
    fn measures_changes(&self) -> bool {
        false
    }

    /// Whether clones reseed their random numbers; `None` for a kind whose clones are not compared.
    fn reseeds_clones(&self) -> Option<bool> {
        None
    }
}

/// Stops the running call of an instance, and later ones until it is reset. From any thread.
pub(crate) type StopCall = Box<dyn Fn() + Send + Sync>;

/// The control of an instance on lease: one implementation for Wasm guests, and one for guests that
/// are made one by one.
pub(crate) trait LeaseControl {
    /// The limits of calls.
    type Limits: Send;

    /// Sets the limits of the following calls where options are given, and returns those before.
    fn set_options(&mut self, options: &CallOptions) -> Result<Self::Limits, Cause>;

    /// Sets limits that it had before.
    fn restore_options(&mut self, limits: Self::Limits);

    /// Sets the limits of a call of `function`, until the result is dropped.
    fn limit_call(
        &mut self,
        options: &CallOptions,
        function: &str,
    ) -> Result<LimitedLease<'_, Self>, CallError> {
        let before = match *options == CallOptions::new() {
            true => None,
            false => {
                let before = self.set_options(options);
                Some(before.map_err(|source| CallError::option(function, source))?)
            }
        };
        Ok(LimitedLease { lease: self, before })
    }

    /// Makes a call of `function` with its options, and restores those of the lease.
    fn limited<T>(
        &mut self,
        options: &CallOptions,
        function: &str,
        call: impl FnOnce(&mut Self) -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        call(&mut *self.limit_call(options, function)?.lease)
    }

    /// Whether a call was cut short, so that the state is unknown until a reset.
    fn is_spoiled(&self) -> bool;

    /// Stops calls of this lease.
    fn call_stopper(&mut self) -> StopCall;

    /// Whether its calls run in a task, and no others can be made.
    fn runs_in_task(&self) -> bool {
        false
    }

    /// Drops the instance instead of bringing it back.
    fn discard_instance(self);
}

/// A lease during a call with other options. The drop restores those of the lease, also where the
/// caller's code panics in the call.
pub(crate) struct LimitedLease<'a, L: LeaseControl + ?Sized> {
    pub(crate) lease: &'a mut L,
    before: Option<L::Limits>,
}

impl<L: LeaseControl + ?Sized> Drop for LimitedLease<'_, L> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.lease.restore_options(before);
        }
    }
}

/// An instance on lease.
pub(crate) trait LiveInstance: LeaseControl {
    /// As [`LiveInstance::answer_bytes`], in a task.
    fn answer_bytes_async(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> impl Future<Output = Result<Vec<u8>, CallError>> + Send {
        ready(self.answer_bytes(guest, callee, input))
    }

    /// As [`LiveInstance::answer_text`], in a task.
    fn answer_text_async(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> impl Future<Output = Result<Answer, CallError>> + Send {
        ready(self.answer_text(guest, name, texts))
    }

    /// Calls a handler that takes bytes and gives bytes.
    fn answer_bytes(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError>;

    /// Calls a function with arguments as text.
    fn answer_text(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError>;

    /// Calls a handler whose answer is received while it is written.
    fn answer_streaming(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
        mut hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        hear(OutputStream::Output.into(), &self.answer_bytes(guest, callee, input)?);
        Ok(())
    }

    /// Calls a handler, with a log of the output that is not part of its answer.
    fn answer_logged(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
        log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        drop(log);
        self.answer_bytes(guest, callee, input)
    }

    /// A unique number for a run from a frozen state, if the kind has one.
    fn find_generation(&mut self) -> Option<u64> {
        None
    }

    /// The difference from the warm state.
    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError>;

    /// Begins a freeze of the present state: work that other threads can do while the guest is
    /// called.
    fn prepare_present(&mut self) -> Result<Vec<FreezePreparation>, SaveError> {
        Ok(Vec::new())
    }

    /// Freezes the present state.
    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError>;

    /// Freezes the present state; its pages may be copied while the guest runs.
    fn freeze_present_live(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        self.freeze_present()
    }

    /// Bytes of memory that the guest has now, as its memory limit counts them; `None` for a kind
    /// whose memory has one size.
    fn count_memory(&self) -> Option<u64> {
        None
    }

    /// Pages that differ from the state that the instance goes back to, where they can be compared.
    fn count_dirty_pages(&mut self) -> Option<usize> {
        None
    }

    /// Time until the next event; `None` if everything waits for the caller.
    fn next_event(&self) -> Option<Duration> {
        None
    }
}

/// A frozen guest.
pub(crate) trait FrozenGuest: Send + Sync {
    /// Its pages.
    fn image(&self) -> &Image;

    /// Everything else, in the form of snapshots.
    fn bytes(&self) -> Result<Vec<u8>, Cause>;

    /// The same without times: equal states have equal ones.
    fn timeless_bytes(&self) -> Result<Vec<u8>, Cause>;

    /// Stores it under a name.
    fn store(&self, store: &Store, name: &str, with: &SnapshotOptions) -> Result<Sha256, Cause>;

    /// Requirement of a recording of the working set of such a guest.
    fn recorder(&self) -> Feature;

    /// A new warm guest out of a snapshot of this one, with its memory, which records the pages
    /// that are touched.
    fn thaw_recording(
        &self,
        snapshot: Snapshot,
        options: &Options,
    ) -> Result<(Backend, SnapshotMemory), Cause>;

    /// Pages at the beginning that are left out of working sets.
    fn skipped_pages(&self) -> usize;
}

/// A kind of frozen guest, which makes it a [`FrozenGuest`].
pub(crate) trait FrozenKind: SnapshotState + Send + Sync {
    /// Requirement of a recording of the working set of such a guest.
    const RECORDER: Feature;

    /// A new warm guest in a frozen state.
    fn thaw(frozen: &SnapshotContents<Self>, options: &Options) -> Result<Backend, Cause>;

    /// Its bytes without times.
    fn timeless_bytes(frozen: &SnapshotContents<Self>) -> Result<Vec<u8>, Cause> {
        Ok(frozen.bytes()?)
    }

    /// Pages at the beginning that are left out of working sets.
    fn skipped_pages(&self) -> usize {
        0
    }
}

/// A warm guest out of a snapshot, with its pages.
pub(super) fn thaw<K: FrozenKind>(
    snapshot: Snapshot,
    options: &Options,
) -> Result<(Backend, SnapshotMemory), Cause> {
    let frozen = SnapshotContents::<K>::load(snapshot, &options.pager)?;
    Ok((K::thaw(&frozen, options)?, frozen.memory().clone()))
}

impl<K: FrozenKind> FrozenGuest for SnapshotContents<K> {
    fn image(&self) -> &Image {
        self.memory().pages()
    }

    fn bytes(&self) -> Result<Vec<u8>, Cause> {
        Ok(Self::bytes(self)?)
    }

    fn timeless_bytes(&self) -> Result<Vec<u8>, Cause> {
        K::timeless_bytes(self)
    }

    fn store(&self, store: &Store, name: &str, with: &SnapshotOptions) -> Result<Sha256, Cause> {
        Ok(self.save(store, name, with)?)
    }

    fn recorder(&self) -> Feature {
        K::RECORDER
    }

    fn thaw_recording(
        &self,
        snapshot: Snapshot,
        options: &Options,
    ) -> Result<(Backend, SnapshotMemory), Cause> {
        let frozen = Self::record(snapshot)?;
        Ok((K::thaw(&frozen, options)?, frozen.memory().clone()))
    }

    fn skipped_pages(&self) -> usize {
        K::skipped_pages(self)
    }
}
