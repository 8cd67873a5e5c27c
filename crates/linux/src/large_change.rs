//! Changes of a layout that copy much memory: a mapping that moves, and a private mapping of a file
//! that is not shown.
//!
//! Promises: the copy is made in parts, and its call ends at its deadline, however much there is to
//! copy; each part has the whole time that the stub may take. A call that ends has left the
//! mappings as the layout has them, so that a reset finds them.

use std::time::Instant;

use crate::guest::{Guest, StopReason};
use crate::platform::{Call, Continuation, PlatformError, StubCommands};
use crate::sentry::{Change, Content};

/// Maximum bytes of a part.
const MAX_PART: u64 = 16 << 20;

/// The parts of copies, in order.
fn parts(copies: Vec<[u64; 3]>) -> impl Iterator<Item = [u64; 3]> {
    copies.into_iter().flat_map(|[to, from, len]| {
        let starts = (0..len).step_by(MAX_PART as usize);
        starts.map(move |at| [to + at, from + at, MAX_PART.min(len - at)])
    })
}

impl Guest {
    /// Puts a large change into effect, and has the call return `value`.
    pub(crate) fn enact_in_parts(
        &mut self,
        call: &Call,
        value: u64,
        change: Change,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        self.body.detach(call)?;
        self.body.process.set_result(value as i64);
        let Change { before, content, fill, copies, after } = change;
        let (copied, content) = match content {
            Some((start, Content::Copied(part))) => (Some((start, part)), None),
            content => (None, content),
        };
        let first = Change { before, content, fill, ..Change::default() };
        self.enact(first, Continuation::Ask)?;
        let mut halt = None;
        for part in parts(copies) {
            halt = self.halt_at(deadline);
            if halt.is_some() {
                break;
            }
            let commands = StubCommands { copies: vec![part], ..StubCommands::default() };
            self.body.process.execute(&commands, Continuation::Ask)?;
        }
        if let Some((start, part)) = copied
            && !self.body.copy_file(start, &part, || Instant::now() < deadline)?
        {
            halt = Some(StopReason::Late);
        }
        self.enact(Change { after, ..Change::default() }, Continuation::Ask)?;
        if halt.is_some() {
            return Ok(halt);
        }
        if self.sentry.unattached {
            self.attach()?;
        }
        self.go_on()
    }

    /// Why a call that copies memory has to end, if it has to.
    fn halt_at(&mut self, deadline: Instant) -> Option<StopReason> {
        match Instant::now() >= deadline {
            true => Some(StopReason::Late),
            false => (!self.proceeds()).then_some(StopReason::Unheard),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_each_copy_once() {
        let len = 2 * MAX_PART + 4096;
        let parts: Vec<_> = parts(vec![[1 << 40, 1 << 30, len], [0, 4096, 4096]]).collect();
        let expected = [
            [1 << 40, 1 << 30, MAX_PART],
            [(1 << 40) + MAX_PART, (1 << 30) + MAX_PART, MAX_PART],
            [(1 << 40) + 2 * MAX_PART, (1 << 30) + 2 * MAX_PART, 4096],
            [0, 4096, 4096],
        ];
        assert_eq!(parts, expected);
    }
}
