//! The platform: a process that runs the guest's code and nothing else, one event at a time.
//!
//! It does not interpret guest system calls. It makes a process, runs it until it calls, answers,
//! changes its maps on orders, reads and writes its memory, and notices the pages it writes. In the
//! process of a guest, only the system calls in [`Process::execute`] take effect.

mod arch;
mod attach;
mod billed_time;
mod boot;
mod commands;
mod control;
mod cpu_pinning;
mod cpu_time;
mod filter;
mod forker;
mod frame;
mod host_traits;
mod image_mapping;
mod inside;
mod isolation;
mod lifetime;
mod listener;
mod mapped_image;
mod mapping_room;
mod memory;
mod memory_accounting;
mod pending_content;
mod populated;
mod process;
mod segments;
mod spawn;
mod stub;
mod template;
mod trampoline;
mod vdso;
mod working_set;
mod write_tracker;
mod zygote;

pub(crate) use arch::frame as layout;
pub(crate) use arch::inside::is_answered_inside;
pub(crate) use arch::{ANSWERS_INSIDE, calls, features};
pub use billed_time::{guest_cpu_time, take_guest_cpu_time};
pub(crate) use commands::{Continuation, INPUT_LEN, StubCommands};
pub(crate) use cpu_pinning::CpuPinning;
pub(crate) use frame::{Context, INFO, INFO_LEN, Register, Registers};
pub(crate) use host_traits::HostTraits;
pub(crate) use inside::{
    ACTION_LEN, ACTIONS_LEN, ATTRIBUTE_LEN, ATTRIBUTE_PATH_LEN, Answer, DESCRIPTORS,
    MAX_ATTRIBUTES, Numbers, STAT_LEN,
};
pub use isolation::IsolationLayer;
pub(crate) use mapped_image::MappedImage;
pub(crate) use memory_accounting::is_memory_accounted;
pub(crate) use process::{
    AttributeAnswer, Call, DescriptorAnswers, Event, Process, Trap, is_taken_for_restart,
};
pub(crate) use segments::{MappedMemory, Segment, Segments};
pub(crate) use stub::{GUEST, IMAGE, IMAGE_LEN, INSIDE, WINDOW_LEN};
pub(crate) use template::Origin;
pub(crate) use trampoline::{
    CELL_LEN, HEAD_LEN, JUMP_LEN, NEAR_LEN, READ_LEN, SYSCALL, originals, trampoline_cells,
};
#[cfg(test)]
pub(crate) use trampoline::{parse, relative};
pub(crate) use vdso::ClockOffsets;
pub use zygote::{isolation_layers, require_isolation};

use std::io;

/// The process of a guest cannot continue or cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlatformError {
    /// This host lacks a feature that guests need.
    #[error("this host cannot run Linux guests: {what}: {error}; {way_out}")]
    Missing {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
        /// The way out.
        way_out: &'static str,
    },
    /// The kernel refused something that it granted at other times.
    #[error("{what} failed: {error}{}", limit_advice(error))]
    Kernel {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The guest's process ended by itself: a fault in its code, or a signal from outside.
    #[error("the guest's process ended: {0}")]
    Ended(std::process::ExitStatus),
    /// The guest did something that only the stub does, and not as ordered. Its process was killed.
    #[error("the guest meddled with the stub ({0}); its process was killed")]
    Forged(&'static str),
    /// Serving the guest met a defect of this library. The guest's process was killed.
    #[error("serving the guest panicked, a defect of afresh ({0}); its process was killed")]
    Panicked(String),
    /// The process is not this process's: it was made before a fork, or it went with a call that
    /// failed.
    #[error(
        "the guest's process has ended, and the state of its calls is lost: reset it, or go back to a checkpoint"
    )]
    Lost,
    /// The guest ran longer than it may. Its process was killed.
    #[error("the guest ran longer than its time limit")]
    Late,
}

/// The way out of an error at a limit of this process, behind a semicolon.
fn limit_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EFBIG) => {
            "; a file in memory would exceed the limit of files of this process: raise ulimit -f"
        }
        Some(libc::EMFILE) => "; raise the limit of descriptors of this process: ulimit -n",
        _ => "",
    }
}

impl PlatformError {
    pub(crate) fn kernel(what: &'static str, error: impl Into<io::Error>) -> Self {
        Self::Kernel { what, error: error.into() }
    }

    fn missing(what: &'static str, error: impl Into<io::Error>, way_out: &'static str) -> Self {
        Self::Missing { what, error: error.into(), way_out }
    }
}
