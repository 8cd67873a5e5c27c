//! Wasm core modules.

use afresh_files::{FileDifference, Refused, Tree};
use afresh_memory::FreezePreparation;
use afresh_pager::SnapshotMemory;
use afresh_pool::PoolStats;
use afresh_snapshot::{Branch, Frozen};
use afresh_wasm::{BytesEntry, Session, Val, Warm, parse_arguments, show_value};

use super::{call_error, lease_options, unavailable};
use crate::guests::backend::session_backend::{self, SessionBackend, SessionGuest, unmoved};
use crate::guests::backend::{Backend, FrozenGuest, Instance, LiveInstance, WarmGuest};
use crate::guests::call::{Entry, Function};
use crate::guests::session_files::{FileOwner, SessionFiles};
use crate::guests::verification::Verification;
use crate::{
    Answer, CallError, Cause, Guest, InstanceDifference, Kind, Lease, LeaseError, LeaseOptions,
    Options, SaveError, SessionError, VerifyError,
};

impl WarmGuest for Warm {
    fn kind(&self) -> Kind {
        Kind::Module
    }

    #[inline]
    fn lease_instance(&self) -> Result<Instance<'_>, LeaseError> {
        Ok(Instance::Module(self.lease().map_err(unavailable)?))
    }

    fn instance_with(&self, options: &LeaseOptions) -> Result<Instance<'_>, LeaseError> {
        let lease = self.lease_with(&lease_options(options));
        Ok(Instance::Module(lease.map_err(unavailable)?))
    }

    fn owned_instance(&self, options: &LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        let lease = self.lease_owned(&lease_options(options));
        Ok(Instance::Module(lease.map_err(unavailable)?))
    }

    async fn async_instance(&self, options: LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        let lease = self.lease_async(&lease_options(&options)).await;
        Ok(Instance::Module(lease.map_err(unavailable)?))
    }

    fn lease_untouched(&self) -> Result<Option<Instance<'_>>, LeaseError> {
        Ok(Some(Instance::Module(self.lease_new().map_err(unavailable)?)))
    }

    fn find_function(&self, name: &str) -> Result<Function, CallError> {
        let entry = self.bytes_entry(name).map_err(|error| call_error(name, error))?;
        Ok(Function { name: name.to_owned(), entry: Some(entry) })
    }

    fn count_instances(&self) -> PoolStats {
        self.pool_stats()
    }

    fn describe_resets(&self) -> String {
        self.strategy().to_string()
    }

    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError> {
        let root = self.root().map_err(|error| SessionError::State(error.into()))?;
        Ok(session_backend::begin::<Session>(self.clone(), root, None))
    }

    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(self.freeze()?))
    }

    fn freeze_root(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(self.freeze_state(&self.root()?)?))
    }

    fn compare_next(&self, _: &Guest, found: &mut Verification) -> Result<(), VerifyError> {
        let compared = self.compare().map_err(|error| VerifyError::Compare(error.into()))?;
        found.add(compared.bytes, compared.items.into_iter(), compared.unseen);
        Ok(())
    }

    fn measures_changes(&self) -> bool {
        true
    }

    fn reseeds_clones(&self) -> Option<bool> {
        Some(self.report().reseeds)
    }
}

/// The function to call: that of the callee, or the one of its name, which goes to `looked_up`.
#[inline]
fn find_entry<'e>(
    guest: &Guest,
    callee: Entry<'e>,
    looked_up: &'e mut Option<BytesEntry>,
) -> Result<&'e BytesEntry, CallError> {
    if let Entry::Function(Function { entry: Some(entry), .. }) = callee {
        return Ok(entry);
    }
    *looked_up = guest.function(callee.name())?.entry;
    looked_up.as_ref().ok_or_else(|| misplaced(callee.name()))
}

impl LiveInstance for afresh_wasm::Lease<'_> {
    async fn answer_bytes_async(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let mut looked_up = None;
        let entry = find_entry(guest, callee, &mut looked_up)?;
        let answer = self.call_bytes_async(entry, input).await;
        answer.map_err(|error| call_error(callee.name(), error))
    }

    async fn answer_text_async(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        let values = read_arguments(guest, name, texts)?;
        let results = self.call_async(name, &values).await;
        let results = results.map_err(|error| call_error(name, error))?;
        Ok(Answer::Values(results.iter().map(show_value).collect()))
    }

    #[inline]
    fn answer_bytes(
        &mut self,
        guest: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let mut looked_up = None;
        let entry = find_entry(guest, callee, &mut looked_up)?;
        self.call_bytes(entry, input).map_err(|error| call_error(callee.name(), error))
    }

    fn answer_text(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        let values = read_arguments(guest, name, texts)?;
        let results = self.call(name, &values).map_err(|error| call_error(name, error))?;
        Ok(Answer::Values(results.iter().map(show_value).collect()))
    }

    fn count_memory(&self) -> Option<u64> {
        Some(Self::memory_bytes(self) as u64)
    }

    fn count_dirty_pages(&mut self) -> Option<usize> {
        self.dirty_pages().ok()
    }

    fn find_generation(&mut self) -> Option<u64> {
        Some(self.host_mut().generation())
    }

    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        let differences = self.differences().map_err(|error| VerifyError::Compare(error.into()));
        differences.map(|(bytes, items)| InstanceDifference { bytes, items })
    }

    fn prepare_present(&mut self) -> Result<Vec<FreezePreparation>, SaveError> {
        self.prepare_freeze().map_err(|error| SaveError::Freeze(error.into()))
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        Ok(Box::new(self.freeze().map_err(|error| SaveError::Freeze(error.into()))?))
    }

    fn freeze_present_live(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        let frozen = self.freeze_live();
        Ok(Box::new(frozen.map_err(|error| SaveError::Freeze(error.into()))?))
    }
}

/// Arguments as text, by the types that the function declares.
fn read_arguments(guest: &Guest, name: &str, texts: &[String]) -> Result<Vec<Val>, CallError> {
    let warm = guest.as_module().ok_or_else(|| misplaced(name))?;
    let ty = warm.function_type(name).map_err(|error| call_error(name, error))?;
    parse_arguments(&ty, texts)
        .map_err(|error| CallError::Request { function: name.to_owned(), source: error.into() })
}

/// An entry of another guest.
fn misplaced(name: &str) -> CallError {
    CallError::Request {
        function: name.to_owned(),
        source: "it was looked up in a guest of another kind".into(),
    }
}

impl SessionGuest for Session {
    fn lend(&mut self) -> Instance<'_> {
        Instance::Module(self.lease())
    }

    fn freeze_state(
        warm: &Backend,
        state: &Frozen<Self::State>,
    ) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(warm_module(warm)?.freeze_state(state)?))
    }

    fn thaw_state(
        warm: &Backend,
        memory: SnapshotMemory,
        state: &[u8],
        _: &Options,
    ) -> Result<Frozen<Self::State>, Cause> {
        let frozen = afresh_wasm::Frozen::from_parts(memory, state)?;
        Ok(warm_module(warm)?.thaw_state(&frozen)?)
    }

    fn diff_files(one: &Self::State, two: &Self::State) -> Result<FileDifference, SessionError> {
        one.diff_files(two).map_err(|error| SessionError::State(error.into()))
    }

    fn files(branch: &mut Branch<Self>) -> Result<SessionFiles<'_>, SessionError> {
        match present_tree(branch) {
            Some(_) => Ok(SessionFiles::new(branch)),
            None => Err(SessionError::NoFiles(
                "its guest was opened without a file tree; set one with `Options::files`",
            )),
        }
    }

    fn present_files(branch: &Branch<Self>) -> Option<Tree> {
        present_tree(branch)
    }

    fn state_files(state: &Self::State) -> Option<&Tree> {
        state.files()
    }
}

/// The module behind a session.
fn warm_module(warm: &Backend) -> Result<&Warm, Cause> {
    match warm {
        Backend::Module(warm) => Ok(warm),
        _ => Err("the session is of another guest".into()),
    }
}

/// The tree of the session as it is now.
fn present_tree(branch: &Branch<Session>) -> Option<Tree> {
    match branch.guest() {
        Some(session) => session.files(),
        None => branch.base().state.files().cloned(),
    }
}

impl FileOwner for Branch<Session> {
    fn present_tree(&self) -> Tree {
        present_tree(self).unwrap_or_else(|| Tree::new(afresh_files::Budget::default()))
    }

    fn change_tree(
        &mut self,
        change: &mut dyn FnMut(&mut Tree) -> Result<(), Refused>,
    ) -> Result<Result<(), Refused>, SessionError> {
        let session = self.guest_mut().map_err(unmoved)?;
        Ok(session.change_files(change).unwrap_or(Err(Refused::Missing)))
    }
}

impl Guest {
    /// The warm module, for typed calls and host state; `None` for another kind of guest.
    #[must_use]
    pub fn as_module(&self) -> Option<&Warm> {
        match &self.inner().backend {
            Backend::Module(warm) => Some(warm),
            _ => None,
        }
    }
}

impl<'a> Lease<'a> {
    /// The instance of a module, for typed calls and host state; `None` for another kind of guest.
    #[must_use]
    pub fn as_module(&mut self) -> Option<&mut afresh_wasm::Lease<'a>> {
        match &mut self.instance {
            Instance::Module(lease) => Some(lease),
            _ => None,
        }
    }
}
