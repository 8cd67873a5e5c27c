//! Processes of instances that have ended, in which later instances start. A new process would take
//! a page fault for each page that it touches.
//!
//! Promise: an instance that starts in one is as a new one. Host processes are taken over after a
//! reset to the warm state, together with memory that they share. All other parts are made anew:
//! limits, connections, streams, counts, the view of the files. A process that failed, or that
//! shows memory of another state, is dropped.

use std::sync::Arc;

use super::{Instance, LiveGuest, ResetState, guarded};
use crate::frozen_state::FrozenState;
use crate::guest::Guest;
use crate::limits::Limits;
use crate::outbound::OutboundLimits;
use crate::platform::{Continuation, CpuPinning, PlatformError};
use crate::sentry::{FIRST, Generation, Sentry};
use crate::warm::Warm;
use afresh_memory::PAGE_SIZE;
use afresh_sys::planted::{self, Bug};

/// The processes of an instance that has ended, in the state of its warm program.
#[derive(Debug)]
pub struct SpareProcess(LiveGuest);

impl SpareProcess {
    /// Bytes of private memory that a reset copies back.
    #[must_use]
    pub fn write_set_bytes(&self) -> usize {
        self.0.write_set_bytes()
    }
}

impl LiveGuest {
    /// Bytes of private memory that a reset copies back.
    pub(super) fn write_set_bytes(&self) -> usize {
        (self.guest.body.write_set_len() + self.guest.others.write_set_len()) * PAGE_SIZE
    }

    /// Whether its first process shows memory of `standing` alone.
    fn stands_on(&self, standing: &FrozenState) -> bool {
        standing.ground(FIRST).is_some_and(|first| self.guest.body.shows_only(&first))
    }

    /// The sentry of a process that stands on `standing`.
    pub(super) fn new_sentry(
        standing: &FrozenState,
        limits: &Limits,
        generation: &Generation,
        outbound: &OutboundLimits,
    ) -> Sentry {
        let mut sentry =
            Sentry::new(Arc::clone(&standing.rest.state), limits.output, limits.egress.clone());
        sentry.answer_inside(limits.answers_inside);
        sentry.streams.generation = generation.clone();
        sentry.lines.limits = outbound.clone();
        sentry
    }
}

impl Instance {
    /// Its processes, for [`Warm::instance_in`], after a reset to the state of `warm`, which it is
    /// an instance of. `None` if its last call failed, or if it has no process that can be reset to
    /// the warm state alone.
    #[must_use]
    pub fn into_spare(mut self, warm: &Warm) -> Option<SpareProcess> {
        if self.footing == ResetState::Failed || self.limits.replaced {
            return None;
        }
        let _together = CpuPinning::new();
        let returned = guarded(|| {
            let stands = self.standing.same(&warm.standing);
            let used = self.live.as_ref().is_some_and(|live| !live.unused);
            self.switch(&warm.standing);
            // A switch from another state has brought it there already.
            if stands && used && !planted::is(Bug::SpareReset) {
                let orders = self.restore()?;
                let live = self.live.as_mut().ok_or(PlatformError::Lost)?;
                live.guest.body.process.execute(&orders, Continuation::Ask)?;
            }
            Ok(())
        });
        let mut live = self.live.take().filter(|_| returned.is_ok())?;
        live.guest.others.end_mixed();
        // The next instance does not pay for this reset.
        live.guest.body.process.bill();
        live.guest.others.iter_mut().for_each(|body| body.process.bill());
        live.stands_on(&warm.standing).then_some(SpareProcess(live))
    }
}

impl Warm {
    /// An instance in this state, like [`Warm::instance`], in the processes of an ended instance of
    /// this program ([`Instance::into_spare`]). Processes of another program are ended.
    #[must_use]
    pub fn instance_in(&self, spare: SpareProcess) -> Instance {
        let mut instance = self.instance();
        if !spare.0.stands_on(&self.standing) {
            return instance;
        }
        let Guest { body, sentry: former, others, .. } = spare.0.guest;
        let mut sentry = LiveGuest::new_sentry(
            &self.standing,
            &self.limits,
            &instance.generation,
            &instance.outbound,
        );
        // The processes show memory of both.
        (sentry.contents, sentry.shared) = (former.contents, former.shared);
        instance.live = Some(LiveGuest { guest: Guest::new(body, sentry, others), unused: true });
        instance
    }
}
