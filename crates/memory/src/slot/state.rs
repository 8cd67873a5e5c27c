//! Whether a slot may be used.

use afresh_sys::WithholdGuard;

use super::serve::ServedSlot;

/// The states of a slot.
pub(super) enum State {
    /// All of the image is in place.
    Ready,
    /// Pages of the image may be missing; the slot's tracker answers for them, or a thread.
    Filling(Filling),
    /// Permanently out of use, because its content is unknown.
    Quarantined {
        /// The first reason there was.
        reason: String,
        /// The handler of missing pages stays active, so that they never read as zeros.
        filling: Option<Filling>,
    },
}

/// Held by a slot while pages of its image are missing.
#[derive(Default)]
pub(super) struct Filling {
    /// Where a thread answers for them.
    pub(super) served: Option<ServedSlot>,
    /// The parts that child processes do not inherit during that time: they would get zeros.
    pub(super) withheld: Vec<WithholdGuard>,
}

impl State {
    /// The handler of missing pages, if pages are missing.
    pub(super) fn filling(&self) -> Option<&Filling> {
        match self {
            Self::Ready => None,
            Self::Filling(filling) => Some(filling),
            Self::Quarantined { filling, .. } => filling.as_ref(),
        }
    }

    /// Why the slot is out of use, if it is.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Quarantined { reason, .. } => Some(reason),
            Self::Ready | Self::Filling(_) => None,
        }
    }

    /// Takes the slot out of use, unless it is.
    pub(super) fn quarantine(&mut self, reason: String) {
        if self.reason().is_none() {
            let filling = match std::mem::replace(self, Self::Ready) {
                Self::Filling(filling) => Some(filling),
                Self::Ready | Self::Quarantined { .. } => None,
            };
            *self = Self::Quarantined { reason, filling };
        }
    }
}
