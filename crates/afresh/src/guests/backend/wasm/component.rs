//! Wasm components, each call in a new instance.

use afresh_pool::PoolStats;
use afresh_wasm::wasmtime::component::Val;
use afresh_wasm::{ComponentLease, WarmComponent};

use super::{call_error, unavailable};
use crate::guests::backend::{
    Backend, FrozenGuest, Instance, LiveInstance, SessionLine, WarmGuest,
};
use crate::guests::call::Entry;
use crate::guests::verify::Verification;
use crate::{
    Answer, CallError, Cause, Guest, Kind, LeaseError, SaveError, SessionError, VerifyError,
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

    fn count_instances(&self) -> PoolStats {
        self.pool_stats()
    }

    fn describe_resets(&self) -> String {
        self.strategy().to_string()
    }

    fn begin_session(&self) -> Result<Box<dyn SessionLine>, SessionError> {
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
    fn answer_bytes(
        &mut self,
        _: &Guest,
        callee: Entry<'_>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let name = callee.name();
        let text = std::str::from_utf8(input).map_err(|error| CallError::Request {
            function: name.to_owned(),
            source: format!(
                "a component's function takes text, and the input is not text: {error}"
            )
            .into(),
        })?;
        let answer = self.call_text(name, &[text.to_owned()]);
        answer.map(String::into_bytes).map_err(|error| call_error(name, error))
    }

    fn answer_text(
        &mut self,
        guest: &Guest,
        name: &str,
        texts: &[String],
    ) -> Result<Answer, CallError> {
        if name == START
            && let Some(run) = guest.as_component().and_then(WarmComponent::command)
        {
            return run_command(self, &run);
        }
        let answer = self.call_text(name, texts);
        answer.map(|text| Answer::Values(vec![text])).map_err(|error| call_error(name, error))
    }

    fn count_differences(&mut self) -> Result<(usize, usize), VerifyError> {
        let bytes = self.differences().map_err(|error| VerifyError::Compare(error.into()))?;
        Ok((bytes, 0))
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        Err(SaveError::Guest(
            "a component can be saved in its warm state only, not after a call; a core module can",
        ))
    }

    fn discard_instance(self) {
        drop(self);
    }
}

/// Runs a command that is a component, whose failure is a result.
fn run_command(lease: &mut ComponentLease<'_>, run: &str) -> Result<Answer, CallError> {
    let results = match lease.call(run, &[]) {
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
    /// The component, if it is one.
    #[must_use]
    pub fn as_component(&self) -> Option<&WarmComponent> {
        match &self.inner().backend {
            Backend::Component(warm) => Some(warm),
            _ => None,
        }
    }
}
