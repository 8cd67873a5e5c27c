//! The platform: a process that runs the guest's code and nothing else, one event at a time.
//!
//! It knows no system call of the guest's. It makes a process, runs it until it calls, answers, changes its maps
//! on orders, reads and writes its memory, and notices the pages it writes. Whatever the guest does, no system call of its
//! process has an effect but those that [`Process::carry_out`] was told to make.

mod attach;
mod boot;
mod content;
mod control;
mod filter;
mod forker;
mod frame;
mod listener;
mod memory;
mod orders;
mod populated;
mod process;
mod seen;
mod segments;
mod show;
mod spawn;
mod spent;
mod stub;
mod template;
mod together;
mod track;
mod zygote;

pub(crate) use frame::{
    CLEAR_FLAGS, Context, FRAME_LEN, INFO, INFO_LEN, MASK, Register, Registers, STACK,
    USER_SELECTORS,
};
pub(crate) use orders::{INPUT_LEN, Orders, Then};
pub(crate) use process::{Call, Event, Place, Process};
pub(crate) use seen::Seen;
pub(crate) use segments::{Segment, Segments};
pub(crate) use show::Shown;
pub(crate) use stub::{GUEST, IMAGE, IMAGE_LEN};
pub(crate) use template::Origin;
pub(crate) use together::Together;

use std::io;

/// Why the process that holds a guest cannot go on, or cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlatformError {
    /// This host lacks what guests need.
    #[error("this host cannot run Linux guests: {what}: {error}; {way_out}")]
    Missing {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
        /// What to do about it.
        way_out: &'static str,
    },
    /// The kernel refused something that it granted at other times.
    #[error("{what} failed: {error}")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// The guest's process ended by itself: a fault in its code, or a signal from outside.
    #[error("the guest's process ended: {0}")]
    Ended(std::process::ExitStatus),
    /// The guest did something that only the stub does, and not as ordered. Its process was killed.
    #[error("the guest meddled with the stub ({0}); its process was killed")]
    Forged(&'static str),
    /// The process is not this process's: it was made before a fork, or it went with a call that failed.
    #[error(
        "the guest's process is gone, and with it what its calls had left: reset it, or go back to a checkpoint"
    )]
    Lost,
    /// The guest ran longer than it may. Its process was killed.
    #[error("the guest ran longer than its time limit")]
    Late,
}

impl PlatformError {
    pub(crate) fn kernel(what: &'static str, error: impl Into<io::Error>) -> Self {
        Self::Kernel { what, error: error.into() }
    }

    fn missing(what: &'static str, error: impl Into<io::Error>, way_out: &'static str) -> Self {
        Self::Missing { what, error: error.into(), way_out }
    }
}
