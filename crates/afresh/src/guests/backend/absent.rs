//! A kind of guest that the build lacks: its types have no values.

use afresh_pool::PoolStats;

use super::{
    FrozenGuest, Instance, LeaseControl, LiveInstance, SessionBackend, StopCall, WarmGuest,
};
use crate::guests::call::Entry;
use crate::{
    Answer, CallError, CallOptions, Cause, Guest, InstanceDifference, Kind, LeaseError,
    LeaseOptions, SaveError, SessionError, VerifyError,
};

/// A guest, or an instance of one, of a kind that the build lacks.
pub(crate) enum Absent {}

impl WarmGuest for Absent {
    fn kind(&self) -> Kind {
        match *self {}
    }

    fn lease_instance(&self) -> Result<Instance<'_>, LeaseError> {
        match *self {}
    }

    fn instance_with(&self, _: &LeaseOptions) -> Result<Instance<'_>, LeaseError> {
        match *self {}
    }

    fn owned_instance(&self, _: &LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        match *self {}
    }

    async fn async_instance(&self, _: LeaseOptions) -> Result<Instance<'static>, LeaseError> {
        match *self {}
    }

    fn count_instances(&self) -> PoolStats {
        match *self {}
    }

    fn describe_resets(&self) -> String {
        match *self {}
    }

    fn begin_session(&self) -> Result<Box<dyn SessionBackend>, SessionError> {
        match *self {}
    }

    fn freeze_warm(&self) -> Result<Box<dyn FrozenGuest>, Cause> {
        match *self {}
    }
}

impl LeaseControl for Absent {
    type Limits = ();

    fn set_options(&mut self, _: &CallOptions) -> Result<(), Cause> {
        match *self {}
    }

    fn restore_options(&mut self, (): ()) {
        match *self {}
    }

    fn is_spoiled(&self) -> bool {
        match *self {}
    }

    fn call_stopper(&mut self) -> StopCall {
        match *self {}
    }

    fn discard_instance(self) {
        match self {}
    }
}

impl LiveInstance for Absent {
    fn answer_bytes(&mut self, _: &Guest, _: Entry<'_>, _: &[u8]) -> Result<Vec<u8>, CallError> {
        match *self {}
    }

    fn answer_text(&mut self, _: &Guest, _: &str, _: &[String]) -> Result<Answer, CallError> {
        match *self {}
    }

    fn count_differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        match *self {}
    }

    fn freeze_present(&mut self) -> Result<Box<dyn FrozenGuest>, SaveError> {
        match *self {}
    }
}
