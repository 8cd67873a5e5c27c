//! A guest: a process, who it takes itself for, and what it did to its memory map.

use std::time::{Duration, Instant};

use crate::personality::{Change, End, Outcome, Person};
use crate::platform::{Call, Event, Orders, Place, PlatformError, Process, Then};
use crate::ranges::Ranges;

/// Why a guest stopped running.
#[derive(Debug)]
pub(crate) enum Halt {
    /// It waits for input, in this call.
    Idle(Call),
    /// It ended. The place says whether the stub has it.
    End(End, Place),
    /// Time is up.
    Late,
}

/// A process with a personality.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) process: Process,
    pub(crate) person: Person,
    /// Where the memory map was changed since the last reset.
    pub(crate) disturbed: Ranges,
    /// Where other memory is mapped than was then.
    pub(crate) replaced: Ranges,
}

impl Guest {
    pub(crate) fn new(process: Process, person: Person) -> Self {
        Self { process, person, disturbed: Ranges::default(), replaced: Ranges::default() }
    }

    /// Runs the guest until it waits for input, ends, or `deadline` is there.
    pub(crate) fn run(&mut self, deadline: Instant) -> Result<Halt, PlatformError> {
        loop {
            let Event::Call(call) = self.process.next(deadline)? else { return Ok(Halt::Late) };
            if let Some(halt) = self.serve(&call, deadline)? {
                return Ok(halt);
            }
        }
    }

    /// Serves one call, and lets the guest go on unless it halts there.
    pub(crate) fn serve(
        &mut self,
        call: &Call,
        deadline: Instant,
    ) -> Result<Option<Halt>, PlatformError> {
        match self.person.serve(&mut self.process, call)? {
            Outcome::Value(value) => self.process.answer(call, value as i64)?,
            Outcome::Memory(value, change) => {
                self.process.set_result(value as i64);
                self.enact(change, Then::Resume)?;
            }
            Outcome::Later(value, wait) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.process.pause(wait.min(left));
                if wait > left {
                    return Ok(Some(Halt::Late));
                }
                self.process.answer(call, value as i64)?;
            }
            Outcome::Idle => return Ok(Some(Halt::Idle(*call))),
            Outcome::End(end) => return Ok(Some(Halt::End(end, call.place))),
        }
        Ok(None)
    }

    /// Puts a change of the layout into effect, while the stub waits for orders.
    pub(crate) fn enact(&mut self, change: Change, then: Then) -> Result<(), PlatformError> {
        for order in change.before.iter().chain(&change.after) {
            let range = order[1]..order[1] + order[2];
            let kind = order[0] as i64;
            if kind == libc::SYS_mmap || kind == libc::SYS_munmap {
                self.process.forget(range.clone());
                self.replaced.insert(range.clone());
            }
            self.disturbed.insert(range);
        }
        let first = Orders { calls: change.before, copies: change.copies, ..Orders::default() };
        if change.content.is_none() && change.after.is_empty() {
            return self.process.carry_out(&first, then);
        }
        self.process.carry_out(&first, Then::Ask)?;
        if let Some((address, bytes)) = change.content
            && !self.process.write(address, &bytes)?
        {
            return Err(PlatformError::kernel(
                "filling a mapping of a file",
                std::io::Error::from_raw_os_error(libc::ENOMEM),
            ));
        }
        self.process.carry_out(&Orders { calls: change.after, ..Orders::default() }, then)
    }

    /// The end of what the guest wrote to its standard error, which is then forgotten.
    pub(crate) fn messages(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.person.streams.messages)).into_owned()
    }
}

/// A moment `length` from now, or as good as never.
pub(crate) fn after(length: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(length).unwrap_or(now + Duration::from_secs(1 << 30))
}
