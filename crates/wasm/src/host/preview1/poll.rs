//! `poll_oneoff` of clocks, which is how programs sleep, and of the standard input of this process.
//!
//! Promises: the wait ends with the limits of the call. Polls of anything else are left to the
//! caller, and do not wait. May break it: a layout of subscriptions other than that of
//! `wasi_snapshot_preview1`.

use std::time::Duration;

use wasmtime::Caller;
use wasmtime_wasi::p1::types::Clockid;
use wasmtime_wasi::p1::wasi_snapshot_preview1::WasiSnapshotPreview1 as _;
use wiggle::GuestMemory;

use super::calls::POLLED;
use super::memory::{self, Bytes, Fail};
use crate::engine::call_path::block;
use crate::host::Host;
use crate::host::wait::{Wait, for_input};

/// Bytes of a subscription.
const SUBSCRIPTION: i32 = 48;
/// Bytes of an event.
const EVENT: usize = 32;

/// A poll of clocks, and perhaps of standard input.
pub(super) struct Clocks {
    /// Time until the first expires.
    first: Duration,
    /// User data of the subscriptions that expire then.
    expired: Vec<[u8; 8]>,
    /// Whether the standard input of this process is polled as well.
    input: bool,
}

/// Reads a poll of clocks and standard input; `None` where something else is polled, or the poll is
/// invalid.
pub(super) fn clocks(
    caller: &mut Caller<'_, Host>,
    subscriptions: i32,
    count: i32,
) -> wasmtime::Result<Option<Clocks>> {
    let count = count as u32;
    if count == 0 || count > POLLED {
        return Ok(None);
    }
    let memory = memory::of(caller)?;
    let (bytes, host) = memory.data_and_store_mut(caller);
    let mut clocks = Clocks { first: Duration::MAX, expired: Vec::new(), input: false };
    let bytes = Bytes::new(bytes, host);
    for index in 0..count as i32 {
        let at = subscriptions.wrapping_add(index * SUBSCRIPTION);
        let one = match bytes.read(at, SUBSCRIPTION as u32) {
            Ok(one) => <[u8; SUBSCRIPTION as usize]>::try_from(one)?,
            Err(Fail::Trap(error)) => return Err(error),
            Err(Fail::Errno(_)) => return Ok(None),
        };
        if host.inherits_stdin() && is_input(&one) {
            clocks.input = true;
            continue;
        }
        let Some(left) = time_left(host, &one)? else { return Ok(None) };
        if left < clocks.first {
            clocks.first = left;
            clocks.expired.clear();
        }
        if left == clocks.first {
            clocks.expired.push(word(&one, 0));
        }
    }
    Ok(Some(clocks))
}

fn word(subscription: &[u8; SUBSCRIPTION as usize], at: usize) -> [u8; 8] {
    let mut word = [0; 8];
    word.copy_from_slice(&subscription[at..at + 8]);
    word
}

/// Whether a subscription is of bytes from standard input. Other numbers of a stream are ready.
fn is_input(subscription: &[u8; SUBSCRIPTION as usize]) -> bool {
    const READ: u8 = 1;
    subscription[8] == READ && subscription[16..20] == [0; 4]
}

/// Time until a subscription of a clock expires; `None` for any other.
fn time_left(
    host: &mut Host,
    subscription: &[u8; SUBSCRIPTION as usize],
) -> wasmtime::Result<Option<Duration>> {
    const CLOCK: u8 = 0;
    const ABSOLUTE: u16 = 1;
    let clock = match (subscription[8], subscription[16]) {
        (CLOCK, 0) => Clockid::Realtime,
        (CLOCK, 1) => Clockid::Monotonic,
        _ => return Ok(None),
    };
    let time = u64::from_le_bytes(word(subscription, 24));
    let flags = u16::from_le_bytes([subscription[40], subscription[41]]);
    if flags & ABSOLUTE == 0 {
        return Ok(Some(Duration::from_nanos(time)));
    }
    let now = host.p1().clock_time_get(&mut GuestMemory::Unshared(&mut []), clock, 0);
    let now = now.map_err(|_| wasmtime::Error::msg("the clock of a poll cannot be read"))?;
    Ok(Some(Duration::from_nanos(time.saturating_sub(now))))
}

impl Clocks {
    /// Waits for the first clock, and returns whether standard input is ready before.
    pub(super) fn wait(&self, host: &mut Host) -> wasmtime::Result<bool> {
        match self.input {
            true => block(self.wait_async(host)),
            false => Wait::begin().sleep(host, self.first).map(|()| false),
        }
    }

    /// As [`Clocks::wait`], without blocking the thread.
    pub(super) async fn wait_async(&self, host: &mut Host) -> wasmtime::Result<bool> {
        match self.input {
            true => for_input(host, self.first).await,
            false => Wait::begin().sleep_async(host, self.first).await.map(|()| false),
        }
    }

    /// Writes the events of the clocks that expired.
    pub(super) fn report(
        &self,
        caller: &mut Caller<'_, Host>,
        events: i32,
        to: i32,
    ) -> wasmtime::Result<i32> {
        let memory = memory::of(caller)?;
        let (bytes, host) = memory.data_and_store_mut(caller);
        let mut memory = Bytes::new(bytes, host);
        let written = self.expired.iter().zip(0..).try_for_each(|(user_data, index)| {
            // No error, and the type of a clock: both are 0.
            let mut event = [0; EVENT];
            event[..8].copy_from_slice(user_data);
            memory.write_bytes(events.wrapping_add(index * EVENT as i32), &event)
        });
        match written.and_then(|()| memory.put_u32(to, self.expired.len() as u32)) {
            Ok(()) => Ok(0),
            Err(Fail::Errno(errno)) => Ok(i32::from(errno)),
            Err(Fail::Trap(error)) => Err(error),
        }
    }
}
