//! Taking a call that waits in the kernel to the stub, by an interrupt.
//!
//! A guest can return from a forged frame, with a signal mask that blocks the interrupt, and then
//! make calls that the kernel keeps. Promises: such a process is recognized by its mask and
//! killed, within milliseconds. Any other one enters the stub as soon as the host lets it run.

use std::time::{Duration, Instant};

use super::{Event, Process};
use crate::platform::arch::{CALL_LEN, RESTARTS};
use crate::platform::frame::Register;
use crate::platform::listener::Answer;
use crate::platform::{PlatformError, stub};

/// Time limit of an interruption, for a host that does not let the process run.
const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the signal mask of a process that does not come is examined.
const MASK_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Whether the kernel takes `value`, the result of a call that waits there, for that of an
/// interrupted call, if an interrupt comes at the same time.
pub(crate) fn is_taken_for_restart(value: u64) -> bool {
    RESTARTS.contains(&(value as i32))
}

/// Whether a process with this `/proc/PID/status` has an interrupt pending that it blocks. The
/// kernel blocks the interrupt for a handler only after it took it from the pending signals.
fn is_interrupt_blocked(status: &str) -> bool {
    let signals = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or_default()
    };
    let pending = signals("ShdPnd:") | signals("SigPnd:");
    pending & signals("SigBlk:") & (1 << (stub::INTERRUPT - 1)) != 0
}

impl Process {
    /// Takes a call that waits in the kernel to the stub, so that its thread can be put aside.
    pub(crate) fn detach(&mut self, id: u64) -> Result<(), PlatformError> {
        self.interrupt()?;
        self.send(id, Answer::Again)?;
        let end = Instant::now() + INTERRUPT_TIMEOUT;
        loop {
            let check = Instant::now() + MASK_CHECK_INTERVAL;
            match self.next_event(check.min(end))? {
                Event::Interrupted => break,
                Event::Late if self.blocks_interrupt() => {
                    return Err(self.forged("it blocks the signal that interrupts it"));
                }
                Event::Late if Instant::now() < end => {}
                Event::Late => return Err(PlatformError::Late),
                _ => return Err(self.forged("it was to be interrupted")),
            }
        }
        // As if it had stopped in the filter: behind the instruction that calls.
        let next = self.register(Register::POINTER).wrapping_add(CALL_LEN);
        self.set_register(Register::POINTER, next);
        Ok(())
    }

    /// Whether the process blocks the interrupt that is pending for it.
    fn blocks_interrupt(&self) -> bool {
        // The next event reports the end of a process without that file.
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()));
        status.is_ok_and(|status| is_interrupt_blocked(&status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pending_interrupt_that_is_blocked_counts() {
        let status = |pending: u64, shared: u64, blocked: u64| {
            let masks = format!("SigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\n");
            format!("Name:\tguest\n{masks}SigBlk:\t{blocked:016x}\n")
        };
        let urgent = 1 << 22;
        assert!(is_interrupt_blocked(&status(0, urgent, urgent)));
        assert!(is_interrupt_blocked(&status(urgent, 0, u64::MAX)));
        // In a handler, before it, and with another signal.
        assert!(!is_interrupt_blocked(&status(0, 0, u64::MAX)));
        assert!(!is_interrupt_blocked(&status(0, urgent, 0)));
        assert!(!is_interrupt_blocked(&status(0, 1, 1)));
        assert!(!is_interrupt_blocked(""));
    }
}
