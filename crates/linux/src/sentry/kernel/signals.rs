//! Signals of a guest: pending ones, their receivers, and dispositions.

mod sending;

use serde::{Deserialize, Serialize};

use crate::platform::{INFO, INFO_LEN};
use crate::sentry::abi::StructBuilder;

/// Signals that are kept for a thread or for all of them.
pub(in crate::sentry) const PENDING: usize = 128;

/// The sender of signals that no process sends: PID and user.
pub(crate) const KERNEL: [u32; 2] = [0; 2];

/// From here on signals are queued each, not only noted.
const REAL_TIME: u8 = 32;

/// Signals that cannot be blocked, handled or ignored.
pub(in crate::sentry) const UNTOUCHABLE: u64 = bit(libc::SIGKILL as u8) | bit(libc::SIGSTOP as u8);

/// A signal's place in a set.
pub(crate) const fn bit(signal: u8) -> u64 {
    1 << (signal - 1)
}

/// A signal that was sent: `siginfo_t`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SignalInfo {
    pub(crate) signal: u8,
    /// The first bytes; the rest is zero.
    bytes: [u8; 32],
}

impl SignalInfo {
    /// A signal of a process with this user, or of the kernel ([`KERNEL`]).
    pub(crate) fn new(signal: u8, code: i32, [sender, user]: [u32; 2], value: u64) -> Self {
        let bytes = StructBuilder::default()
            .int(u32::from(signal))
            .int(0)
            .int(code as u32)
            .int(0)
            .int(sender)
            .int(user)
            .word(value);
        Self { signal, bytes: bytes.0.try_into().expect("it is as long") }
    }

    /// A timer has run out, and `overrun` times more since.
    pub(in crate::sentry) fn of_timer(signal: u8, timer: u32, overrun: u32, value: u64) -> Self {
        let bytes = StructBuilder::default()
            .int(u32::from(signal))
            .int(0)
            .int(libc::SI_TIMER as u32)
            .int(0)
            .int(timer)
            .int(overrun)
            .word(value);
        Self { signal, bytes: bytes.0.try_into().expect("it is as long") }
    }

    /// A descriptor is ready for the events of `band`.
    pub(in crate::sentry) fn of_descriptor(signal: u8, code: i32, band: u64, number: u32) -> Self {
        let bytes = StructBuilder::default()
            .int(u32::from(signal))
            .int(0)
            .int(code as u32)
            .int(0)
            .word(band)
            .int(number)
            .int(0);
        Self { signal, bytes: bytes.0.try_into().expect("it is as long") }
    }

    fn int(&self, at: usize) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|n| self.bytes[at + n]))
    }

    /// The timer that has sent it, and the count of its further expirations.
    pub(in crate::sentry) fn timer(&self) -> Option<(u32, u32)> {
        (self.int(8) == libc::SI_TIMER as u32).then(|| (self.int(16), self.int(20)))
    }

    /// Whether it is refused where the queue is full: a real-time signal with information. Those of
    /// timers have their own place.
    fn counts_in_queue(&self) -> bool {
        const PLAIN: [i32; 3] = [0, libc::SI_KERNEL, libc::SI_TIMER];
        self.signal >= REAL_TIME && !PLAIN.contains(&(self.int(8) as i32))
    }

    /// The signal information in the frame of a fault.
    pub(in crate::sentry) fn of_frame(signal: u8, frame: &[u8]) -> Self {
        let bytes = frame[INFO..INFO + 32].try_into().expect("it is as long");
        Self { signal, bytes }
    }

    /// A fault at an address.
    pub(in crate::sentry) fn of_address(signal: u8, code: i32, address: u64) -> Self {
        let mut info = Self::new(signal, code, KERNEL, 0);
        info.bytes[16..24].copy_from_slice(&address.to_le_bytes());
        info
    }

    /// The address of a fault.
    pub(in crate::sentry) fn address(&self) -> u64 {
        u64::from_le_bytes(self.bytes[16..24].try_into().expect("8 bytes"))
    }

    /// As the guest hands it in.
    pub(in crate::sentry) fn from_guest(signal: u8, given: &[u8]) -> Self {
        let mut bytes: [u8; 32] = given[..32].try_into().expect("it is as long");
        bytes[..4].copy_from_slice(&u32::from(signal).to_le_bytes());
        Self { signal, bytes }
    }

    /// All of it.
    pub(in crate::sentry) fn all(&self) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        bytes.resize(INFO_LEN, 0);
        bytes
    }
}

/// Signals that wait to be taken, in the order they came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PendingSignals {
    list: Vec<SignalInfo>,
    /// Number of signals so far, for edge-triggered readers.
    pub(in crate::sentry) came: u64,
}

impl PendingSignals {
    /// Whether a guest could have sent it.
    pub(crate) fn is_sound(&self) -> bool {
        self.came < 1 << 62
            && self.list.len() <= PENDING
            && self.list.iter().all(|info| (1..=64).contains(&info.signal))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn set(&self) -> u64 {
        self.list.iter().fold(0, |set, info| set | bit(info.signal))
    }

    /// Adds one; whether there was room.
    pub(crate) fn add(&mut self, info: SignalInfo) -> bool {
        if info.signal < REAL_TIME && self.set() & bit(info.signal) != 0 {
            return true;
        }
        let room = self.list.len() < PENDING;
        if room {
            self.list.push(info);
            self.came += 1;
        }
        room
    }

    pub(in crate::sentry) fn iter(&self) -> impl Iterator<Item = &SignalInfo> + '_ {
        self.list.iter()
    }

    /// Takes the lowest of `set`.
    pub(crate) fn take(&mut self, set: u64) -> Option<SignalInfo> {
        let wanted = |info: &&SignalInfo| set & bit(info.signal) != 0;
        let lowest = self.list.iter().filter(wanted).map(|info| info.signal).min()?;
        let at = self.list.iter().position(|info| info.signal == lowest)?;
        Some(self.list.remove(at))
    }

    /// Adds `times` expirations of a timer to its pending signal, and returns the overrun if it is
    /// pending.
    pub(in crate::sentry) fn overran(&mut self, timer: u32, times: u64) -> Option<u64> {
        let is_its =
            |info: &&mut SignalInfo| info.int(8) == libc::SI_TIMER as u32 && info.int(16) == timer;
        let info = self.list.iter_mut().find(is_its)?;
        let overrun = u64::from(info.int(20)).saturating_add(times).min(i32::MAX as u64);
        info.bytes[20..24].copy_from_slice(&(overrun as u32).to_le_bytes());
        Some(overrun)
    }

    pub(crate) fn drop_all(&mut self, signal: u8) {
        self.list.retain(|info| info.signal != signal);
    }
}

/// The action for a signal that a program has set (`struct kernel_sigaction`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SignalAction {
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

impl SignalAction {
    pub(crate) fn of(bytes: &[u8; 32]) -> Self {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Self { handler: word(0), flags: word(8), restorer: word(16), mask: word(24) }
    }

    pub(in crate::sentry) fn has(&self, flag: i32) -> bool {
        self.flags & flag as u32 as u64 != 0
    }
}

/// The disposition of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) enum DefaultAction {
    Ignored,
    Deadly,
    /// The process stands still until `SIGCONT`.
    Stops,
    Handled(SignalAction),
}
