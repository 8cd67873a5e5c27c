//! Wasm components, each call in a new instance.

use afresh_pool::PoolStats;
use afresh_wasm::wasmtime::component::Val;
use afresh_wasm::{ComponentLease, WarmComponent};

use super::{call_error, lease_options, unavailable};
use crate::guests::backend::{
    Backend, FrozenGuest, Instance, LiveInstance, SessionBackend, WarmGuest,
};
use crate::guests::call::Entry;
use crate::guests::verification::Verification;
use crate::{
    Answer, CallError, Cause, Guest, InstanceDifference, Kind, LeaseError, LeaseOptions, SaveError,
    SessionError, VerifyError,
};

/// The export that a WASI command begins at. In a component it is the `run` of `wasi:cli/run`,
/// which this name also means.
const START: &str = "_start";

impl WarmGuest for WarmComponent {
    fn kind(&self) -> Kind {
        Kind::Component
    }

    #[inline]
    fn lease_instance(&self) -> Result<Instance<'_>, LeaseError> {
        Ok(Instance::Component(self.lease().map_err(unavailable)?))
    }

    fn instance_with(&self, options: &LeaseOptions) -> Result<Instance<'_>, LeaseError> {
        let lease = self.lease_with(&lease_options(options));
        Ok(Instance::Component(lease.map_err(unavailable)?))
    }

    fn owned_instance(&self, options: &LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        let lease = self.lease_owned(&lease_options(options));
        Ok(Instance::Component(lease.map_err(unavailable)?))
    }

    async fn async_instance(&self, options: LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        let lease = self.lease_async(&lease_options(&options)).await;
        Ok(Instance::Component(lease.map_err(unavailable)?))
    }

    fn count_instances(&self) -> PoolStats {
        self.pool_stats()
    }

    fn describe_resets(&self) -> String {
        self.strategy().to_string()
    }

    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError> {
        Err(SessionError::Guest(
            "a component runs every call in a new instance; a core module or a micro-VM has them",
        ))
    }

    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        Ok(Box::new(self.freeze()?))
    }

    fn check_recording(&self) -> Result<(), SaveError> {
        Err(SaveError::Guest(
            "no working set can be recorded for a component; leave the recorded calls out",
        ))
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
        Some(self.reseeds())
    }
}

impl LiveInstance for ComponentLease<'_> {
    async fn answer_bytes_async(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let name = callee.name();
        let answer = self.call_text_async(name, &[read_text(name, input)?]).await;
        answer.map(String::into_bytes).map_err(|error| call_error(name, error))
    }

    async fn answer_text_async(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        if let Some(run) = command(guest, name) {
            return command_answer(&run, self.call_async(&run, &[]).await);
        }
        let answer = self.call_text_async(name, texts).await;
        answer.map(|text| Answer::Values(vec![text])).map_err(|error| call_error(name, error))
    }

    fn answer_bytes(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let name = callee.name();
        let answer = self.call_text(name, &[read_text(name, input)?]);
        answer.map(String::into_bytes).map_err(|error| call_error(name, error))
    }

    fn answer_text(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        if let Some(run) = command(guest, name) {
            return command_answer(&run, self.call(&run, &[]));
        }
        let answer = self.call_text(name, texts);
        answer.map(|text| Answer::Values(vec![text])).map_err(|error| call_error(name, error))
    }

    fn count_memory(&self) -> Option<u64> {
        Some(Self::memory_bytes(self) as u64)
    }

    fn count_dirty_pages(&mut self) -> Option<usize> {
        self.dirty_pages().ok()
    }

    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        let bytes = self.differences().map_err(|error| VerifyError::Compare(error.into()))?;
        Ok(InstanceDifference { bytes, items: 0 })
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        Err(SaveError::Guest(
            "a component can be saved in its warm state only, not after a call; a core module can",
        ))
    }
}

/// The input of a function that takes one string.
fn read_text(name: &str, input: &[u8]) -> Result<String, CallError> {
    let text = std::str::from_utf8(input).map_err(|error| CallError::Request {
        function: name.to_owned(),
        source: format!("a component's function takes text, and the input is not text: {error}")
            .into(),
    })?;
    Ok(text.to_owned())
}

/// The function that a command begins at, if `name` means that.
fn command(guest: &Guest, name: &str) -> Option<String> {
    guest.as_component().filter(|_| name == START).and_then(WarmComponent::command)
}

/// The answer of a command that is a component, whose failure is a result.
fn command_answer(
    run: &str,
    called: Result<Vec<Val>, afresh_wasm::CallError>,
) -> Result<Answer, CallError> {
    let results = match called {
        // A command that ends itself with success has succeeded.
        Err(afresh_wasm::CallError::Exit(0)) => return Ok(Answer::Values(Vec::new())),
        other => other.map_err(|error| call_error(run, error))?,
    };
    match results.first() {
        Some(Val::Result(Err(_))) => Err(CallError::Guest {
            function: run.to_owned(),
            source: "the command reported a failure".into(),
        }),
        _ => Ok(Answer::Values(Vec::new())),
    }
}

impl Guest {
    /// The warm component; `None` for another kind of guest.
    #[must_use]
    pub fn as_component(&self) -> Option<&WarmComponent> {
        match &self.inner().backend {
            Backend::Component(warm) => Some(warm),
            _ => None,
        }
    }
}
