//! Calls that ask what descriptors are ready for, and wait for it: `poll`, `select`, `epoll`.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::clock_calls::{length_in, micro_in, moment_after, passed};
use super::readiness::{ALWAYS, ERR, HUP, IN, OUT, RDHUP};
use super::table::{DESCRIPTORS, Open};
use super::threads::{Moment, On, Wait};
use super::{DONE, Outcome, Person, Served, copy_in, copy_out, word_in};
use crate::platform::Process;

/// Descriptors that one `poll` may ask about.
const POLLED: u64 = 1024;
/// Events that one `epoll_wait` tells at most.
const TOLD: u64 = 1024;
const EDGE: u32 = 1 << 31;
const ONCE: u32 = 1 << 30;
/// `POLLRDNORM` and `POLLWRNORM`, which mean no more than the plain ones.
const READ_TOO: u16 = 0x40;
const WRITE_TOO: u16 = 0x100;

/// What a set wants to know of a description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interest {
    pub(crate) description: u64,
    /// As it was given: events and how they are told.
    wanted: u32,
    data: u64,
    /// Where the description stood when it was told of last.
    pub(crate) told: Option<u64>,
    /// Told once, and off since.
    off: bool,
}

impl Interest {
    pub(crate) fn events(&self) -> u16 {
        plain(self.wanted as u16)
    }

    pub(crate) fn is_edge(&self) -> bool {
        self.wanted & EDGE != 0
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off
    }
}

/// A set of interests (`epoll`), by descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Set(BTreeMap<u32, Interest>);

impl Set {
    pub(crate) fn interests(&self) -> impl Iterator<Item = &Interest> + '_ {
        self.0.values()
    }

    /// Whether it is what a guest could have.
    pub(crate) fn is_sound(&self) -> bool {
        self.0.keys().all(|number| *number < DESCRIPTORS)
    }
}

/// Events without other names for them.
fn plain(events: u16) -> u16 {
    let also = |name: u16, event: u16| if events & name != 0 { event } else { 0 };
    events & (IN | OUT | RDHUP) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}

/// Events told for events wanted, by the names they were wanted under.
fn named(told: u16, wanted: u16) -> u16 {
    let also =
        |name: u16, event: u16| if wanted & name != 0 && told & event != 0 { name } else { 0 };
    told & (wanted | ALWAYS) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}

impl Person {
    /// When a call gives up: as it was when it began to wait, or as `new` says.
    fn until(&self, new: impl FnOnce() -> Served<Option<Moment>>) -> Served<Option<Moment>> {
        match &self.resumed {
            Some(wait) => Ok(wait.until),
            None => new(),
        }
    }

    fn in_millis(&self, timeout: u64) -> Served<Option<Moment>> {
        self.until(|| match timeout as i32 {
            ..0 => Ok(None),
            millis => {
                let length = Duration::from_millis(millis as u64);
                moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            }
        })
    }

    fn in_length(&self, process: &Process, at: u64) -> Served<Option<Moment>> {
        self.until(|| match at {
            0 => Ok(None),
            at => {
                let length = length_in(process, at)?;
                moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            }
        })
    }

    pub(super) fn poll(
        &mut self,
        process: &mut Process,
        list: u64,
        count: u64,
        timeout: u64,
    ) -> Served {
        let until = self.in_millis(timeout)?;
        self.poll_until(process, list, count, until)
    }

    pub(super) fn ppoll(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let until = self.in_length(process, a[2])?;
        self.mask_in(process, a[3], a[4])?;
        self.poll_until(process, a[0], a[1], until)
    }

    fn poll_until(
        &mut self,
        process: &mut Process,
        list: u64,
        count: u64,
        until: Option<Moment>,
    ) -> Served {
        if count > POLLED {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, list, count as usize * 8)?;
        let (mut ready, mut told, mut on) = (0, bytes.clone(), Vec::new());
        for (entry, out) in bytes.chunks_exact(8).zip(told.chunks_exact_mut(8)) {
            let number = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let wanted = u16::from_le_bytes([entry[4], entry[5]]);
            let events = match self.state.table.id(number as u32 as u64) {
                _ if number < 0 => 0,
                Ok(id) => {
                    on.push((id, plain(wanted)));
                    let open = &self.state.table.get(number as u64)?.open;
                    named(self.state.readiness(self.asker(), open, 0).0, wanted)
                }
                Err(_) => libc::POLLNVAL as u16,
            };
            out[6..].copy_from_slice(&events.to_le_bytes());
            ready += u64::from(events != 0);
        }
        if ready == 0 && !passed(until) {
            return Ok(Outcome::Wait(Wait::new(On::Files(on), until)));
        }
        copy_out(process, list, &told)?;
        Ok(Outcome::Value(ready))
    }

    pub(super) fn select(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let until = match a[4] {
            0 => None,
            at => self.until(|| {
                let length = Duration::from_nanos(micro_in(process, at)?);
                moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            })?,
        };
        self.select_until(process, a[0], [a[1], a[2], a[3]], until)
    }

    pub(super) fn pselect(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let until = self.in_length(process, a[4])?;
        if a[5] != 0 {
            let (set, size) = (word_in(process, a[5])?, word_in(process, a[5].wrapping_add(8))?);
            self.mask_in(process, set, size)?;
        }
        self.select_until(process, a[0], [a[1], a[2], a[3]], until)
    }

    fn select_until(
        &mut self,
        process: &mut Process,
        count: u64,
        sets: [u64; 3],
        until: Option<Moment>,
    ) -> Served {
        if count > i32::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let count = count.min(DESCRIPTORS.into());
        let len = count.div_ceil(64) as usize * 8;
        let (mut ready, mut on) = (0, Vec::new());
        let mut told = Vec::new();
        // An end counts as something to read, an error as both.
        for (set, events) in sets.into_iter().zip([IN | HUP | ERR, OUT | ERR, 0]) {
            if set == 0 {
                continue;
            }
            let bytes = copy_in(process, set, len)?;
            let mut out = vec![0; len];
            for number in 0..count {
                let (at, bit) = (number as usize / 8, 1u8 << (number % 8));
                if bytes[at] & bit == 0 {
                    continue;
                }
                let id = self.state.table.id(number)?;
                let open = &self.state.table.get(number)?.open;
                if self.state.readiness(self.asker(), open, 0).0 & events != 0 {
                    out[at] |= bit;
                    ready += 1;
                } else if events != 0 {
                    on.push((id, events & !ALWAYS));
                }
            }
            told.push((set, out));
        }
        if ready == 0 && !passed(until) {
            return Ok(Outcome::Wait(Wait::new(On::Files(on), until)));
        }
        for (set, out) in told {
            copy_out(process, set, &out)?;
        }
        Ok(Outcome::Value(ready))
    }

    pub(super) fn new_set(&mut self, flags: u64) -> Served {
        if flags as i32 & !libc::EPOLL_CLOEXEC != 0 {
            return Err(Errno::INVAL.into());
        }
        self.add(Open::Epoll(Set::default()), flags as i32 | libc::O_RDWR)
    }

    pub(super) fn change_set(
        &mut self,
        process: &Process,
        set: u64,
        operation: u64,
        number: u64,
        event: u64,
    ) -> Served {
        let Open::Epoll(known) = &self.state.table.get(set)?.open else {
            return Err(Errno::INVAL.into());
        };
        let description = self.state.table.id(number)?;
        if description == self.state.table.id(set)? {
            return Err(Errno::INVAL.into());
        }
        let open = &self.state.table.get(number)?.open;
        if matches!(open, Open::File(_) | Open::Device(..) | Open::Folder(..)) {
            return Err(Errno::PERM.into());
        }
        let number = number as u32;
        let is_there = known.0.get(&number).is_some_and(|i| i.description == description);
        let interest = match operation as i32 {
            libc::EPOLL_CTL_DEL => None,
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => {
                let bytes = copy_in(process, event, 12)?;
                let wanted = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let data = bytes[4..].iter().rev().fold(0, |word, &b| word << 8 | u64::from(b));
                Some(Interest { description, wanted, data, told: None, off: false })
            }
            _ => return Err(Errno::INVAL.into()),
        };
        match operation as i32 {
            libc::EPOLL_CTL_ADD if is_there => return Err(Errno::EXIST.into()),
            libc::EPOLL_CTL_ADD => {}
            _ if !is_there => return Err(Errno::NOENT.into()),
            _ => {}
        }
        if let Open::Epoll(known) = &mut self.change().table.get_mut(set)?.open {
            match interest {
                Some(interest) => drop(known.0.insert(number, interest)),
                None => drop(known.0.remove(&number)),
            }
        }
        Ok(DONE)
    }

    pub(super) fn wait_set(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let until = self.in_millis(a[3])?;
        self.wait_set_until(process, a[0], a[1], a[2], until)
    }

    /// As [`Person::wait_set`], with signals blocked; `fine` says that the timeout is a length in memory.
    pub(super) fn pwait_set(&mut self, process: &mut Process, a: &[u64; 6], fine: bool) -> Served {
        let until = if fine { self.in_length(process, a[3])? } else { self.in_millis(a[3])? };
        self.mask_in(process, a[4], a[5])?;
        self.wait_set_until(process, a[0], a[1], a[2], until)
    }

    fn wait_set_until(
        &mut self,
        process: &mut Process,
        set: u64,
        to: u64,
        most: u64,
        until: Option<Moment>,
    ) -> Served {
        let Open::Epoll(known) = &self.state.table.get(set)?.open else {
            return Err(Errno::INVAL.into());
        };
        if !(1..=i32::MAX as u64).contains(&most) {
            return Err(Errno::INVAL.into());
        }
        let concerns = known.0.iter().filter_map(|(&number, interest)| {
            let (events, edges) = self.state.concern(self.asker(), interest, 0)?;
            Some((number, interest.clone(), events, edges))
        });
        let told: Vec<_> = concerns.take(most.min(TOLD) as usize).collect();
        if told.is_empty() {
            if passed(until) {
                return Ok(DONE);
            }
            let on = On::Files(vec![(self.state.table.id(set)?, IN)]);
            return Ok(Outcome::Wait(Wait::new(on, until)));
        }
        let mut bytes = Vec::with_capacity(12 * told.len());
        for (_, interest, events, _) in &told {
            bytes.extend(u32::from(named(*events, interest.wanted as u16)).to_le_bytes());
            bytes.extend(interest.data.to_le_bytes());
        }
        copy_out(process, to, &bytes)?;
        // What is told each time needs no note.
        if told.iter().any(|(_, interest, ..)| interest.wanted & (EDGE | ONCE) != 0)
            && let Open::Epoll(known) = &mut self.change().table.get_mut(set)?.open
        {
            for (number, _, _, edges) in &told {
                if let Some(interest) = known.0.get_mut(number) {
                    interest.told = Some(*edges);
                    interest.off = interest.wanted & ONCE != 0;
                }
            }
        }
        Ok(Outcome::Value(told.len() as u64))
    }
}
