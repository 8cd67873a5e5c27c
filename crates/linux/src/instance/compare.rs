//! Comparing a reset instance with the state that it belongs to.
//!
//! Promises: every difference is reported: in the sentry's state, and in registers, mappings and
//! each byte of memory of each process.

use super::Instance;
use crate::error::VerifyError;
use crate::frozen_state::FrozenState;
use crate::guest::Guest;
use crate::platform::{Continuation, PlatformError};
use crate::subprocess::Subprocess;

impl Instance {
    /// Resets the guest and compares all of it with the state that it stands on: every byte, the
    /// kernel's list of mappings, registers, descriptors, files. Returns the bytes that were
    /// compared.
    ///
    /// # Errors
    /// The first difference. The process is then killed, and the next call has a new one.
    pub fn verify(&mut self) -> Result<u64, VerifyError> {
        self.reset();
        let result = (|| {
            self.prepare()?;
            let orders = self.restore()?;
            let Some(live) = &mut self.live else { return Err(PlatformError::Lost.into()) };
            live.guest.body.process.execute(&orders, Continuation::Ask)?;
            compare(&mut live.guest, &self.standing)
        })();
        if result.is_err() {
            self.live = None;
        }
        result
    }
}

/// The bytes that were compared, or the first difference.
fn compare(guest: &mut Guest, standing: &FrozenState) -> Result<u64, VerifyError> {
    if *guest.sentry.state != *standing.rest.state {
        return Err(VerifyError::State);
    }
    if let Some((_, offset)) = guest.sentry.shared.differing(&standing.rest.state.tree)? {
        return Err(VerifyError::Memory(offset));
    }
    let mut bytes = 0;
    for body in std::iter::once(&mut guest.body).chain(guest.others.iter_mut()) {
        bytes += compare_body(body)?;
    }
    Ok(bytes)
}

fn compare_body(body: &mut Subprocess) -> Result<u64, VerifyError> {
    let part = body.base.as_ref().map(|base| base.part.clone());
    let part = part.ok_or(PlatformError::Lost)?;
    if body.holds != part.holds || !body.process.control_equals(&part.registers) {
        return Err(VerifyError::Registers);
    }
    let segments = part.segments.iter().map(|s| (s.start, s.start + s.len, s.protection));
    let attached = body.attached.iter().map(|one| (one.range.start, one.range.end, one.protection));
    let mut mapped: Vec<_> = segments.chain(attached).collect();
    mapped.sort_unstable();
    let expected = joined(mapped.into_iter());
    let found = joined(body.process.mappings()?.into_iter());
    if expected != found {
        let odd = expected
            .iter()
            .filter(|m| !found.contains(m))
            .chain(found.iter().filter(|m| !expected.contains(m)));
        let list: Vec<_> = odd.map(|(start, end, p)| format!("{start:x}-{end:x} {p}")).collect();
        return Err(VerifyError::Mappings(list.join(", ")));
    }
    body.compare()?.map_err(VerifyError::Memory)
}

/// Start, end and protection of mappings, neighbours that are alike joined.
fn joined(mappings: impl Iterator<Item = (u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    let mut list: Vec<(u64, u64, u64)> = Vec::new();
    for (start, end, protection) in mappings {
        match list.last_mut() {
            Some(last) if last.1 == start && last.2 == protection => last.1 = end,
            _ => list.push((start, end, protection)),
        }
    }
    list
}
