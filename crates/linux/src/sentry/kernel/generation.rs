//! `/dev/afresh/generation`: a number that is another one for each run from a frozen state, so that
//! a program can reseed its generators of random numbers. The device serves a program as VMGENID
//! serves a virtual machine.
//!
//! A read gives the number as eight bytes. A descriptor is readable while its number is not the one
//! that was read or that was there when it was opened. A mapping shows the number in its first
//! eight bytes. A descriptor with an owner and `O_ASYNC` sends a signal.
//!
//! Promises: all of these are in effect before a reset program runs its first instruction. May
//! break it: nothing that a guest does; the number belongs to the instance.

mod page;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::host::random_word;

use crate::sentry::kernel::device::GenerationWatch;
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};

/// `si_code` of a descriptor that can be read: `POLL_IN`.
const POLL_IN: i32 = 1;

/// Bytes of a generation.
pub(crate) const LEN: u64 = 8;

/// The generation of the running state, drawn at its first use. An instance and its sentry share
/// one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Generation(Arc<AtomicU64>);

impl Generation {
    /// Not drawn yet.
    const NONE: u64 = 0;

    pub(crate) fn get(&self) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            Self::NONE => {
                let drawn = random_word().max(1);
                let set = self.0.compare_exchange(
                    Self::NONE,
                    drawn,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                set.map_or_else(|there| there, |_| drawn)
            }
            generation => generation,
        }
    }

    /// Has the next use draw another one.
    pub(crate) fn renew(&self) {
        self.0.store(Self::NONE, Ordering::Relaxed);
    }

    /// The present one, if it was drawn, to be set again.
    pub(crate) fn drawn_number(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the result of [`Generation::kept`].
    pub(crate) fn set(&self, kept: u64) {
        self.0.store(kept, Ordering::Relaxed);
    }
}

impl GenerationWatch {
    /// The signal for descriptor `number`.
    fn info(&self, number: u32) -> SignalInfo {
        match self.signal {
            0 => SignalInfo::new(libc::SIGIO as u8, libc::SI_KERNEL, KERNEL, 0),
            signal => {
                let band = libc::POLLIN | libc::POLLRDNORM;
                SignalInfo::of_descriptor(signal, POLL_IN, band as u64, number)
            }
        }
    }
}
