//! Owners of open files, which get signals about them: `F_SETOWN`, `F_SETSIG`, `O_ASYNC` and
//! `F_NOTIFY`.
//!
//! Promises: the settings belong to the open file and end with it. At most [`MAX_ASYNC`] open files
//! send signals. A call is followed by a look at those that may have had an event: the call has
//! changed them or their channels, or their readiness is not in the state alone. A frozen setting
//! is checked before it counts. May break it: a change of an open file that does not call
//! [`AsyncFiles::touch`].

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::poll_events::{HUP, IN, OUT, RDHUP};

/// Open files that may send signals.
pub(in crate::sentry) const MAX_ASYNC: usize = 512;

/// Codes of a signal about a descriptor (`si_code`).
const POLL_IN: i32 = 1;
const POLL_OUT: i32 = 2;
pub(in crate::sentry) const POLL_MSG: i32 = 3;
const POLL_HUP: i32 = 6;

/// Events of a directory that `F_NOTIFY` takes (`DN_…`).
pub(in crate::sentry) const DN_ACCESS: u32 = 1;
pub(in crate::sentry) const DN_MODIFY: u32 = 2;
pub(in crate::sentry) const DN_CREATE: u32 = 4;
pub(in crate::sentry) const DN_DELETE: u32 = 8;
pub(in crate::sentry) const DN_RENAME: u32 = 0x10;
pub(in crate::sentry) const DN_ATTRIB: u32 = 0x20;
pub(in crate::sentry) const DN_MULTISHOT: u32 = 0x8000_0000;
pub(in crate::sentry) const DN_EVENTS: u32 =
    DN_ACCESS | DN_MODIFY | DN_CREATE | DN_DELETE | DN_RENAME | DN_ATTRIB;

/// The events of a code (`si_band`).
pub(in crate::sentry) fn band(code: i32) -> u64 {
    let events = match code {
        POLL_IN => libc::POLLIN | libc::POLLRDNORM,
        POLL_OUT => libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND,
        POLL_MSG => libc::POLLIN | libc::POLLRDNORM | 0x400,
        _ => libc::POLLHUP | libc::POLLERR,
    };
    events as u64
}

/// The receiver of signals: `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OwnerKind {
    #[default]
    Thread,
    Process,
    Group,
}

impl OwnerKind {
    /// By its number in `struct f_owner_ex`.
    pub(in crate::sentry) fn of(number: i32) -> Option<Self> {
        [Self::Thread, Self::Process, Self::Group].get(usize::try_from(number).ok()?).copied()
    }
}

/// The owner of an open file. Its number is 0 without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileOwner {
    pub(in crate::sentry) kind: OwnerKind,
    pub(in crate::sentry) id: u32,
    /// The real and the effective user that set it.
    pub(in crate::sentry) users: [u32; 2],
}

/// The events that an open file was found with last, and numbers that grow with every arrival, and
/// with all that a reader takes out of a pipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenEvents {
    pub(in crate::sentry) events: u16,
    pub(in crate::sentry) arrivals: u64,
    pub(in crate::sentry) departures: u64,
}

impl SeenEvents {
    /// The codes of signals about what has happened from `self` to `now`. The end of a pipe counts
    /// as an arrival.
    pub(in crate::sentry) fn codes(self, now: Self, is_pipe: bool) -> Vec<i32> {
        let begins = |events: u16| now.events & !self.events & events != 0;
        let mut codes = Vec::new();
        if begins(IN)
            || now.events & IN != 0 && now.arrivals > self.arrivals
            || is_pipe && begins(HUP)
            || begins(RDHUP) && now.events & HUP == 0
        {
            codes.push(POLL_IN);
        }
        if begins(OUT) || now.events & OUT != 0 && now.departures > self.departures {
            codes.push(POLL_OUT);
        }
        if !is_pipe && begins(HUP) {
            codes.push(POLL_HUP);
        }
        codes
    }
}

/// A directory whose changes are signalled (`F_NOTIFY`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirectoryNotice {
    /// The events (`DN_…`).
    pub(in crate::sentry) mask: u32,
    /// The descriptor that the signal names.
    pub(in crate::sentry) number: u32,
}

/// The settings of an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AsyncFile {
    pub(in crate::sentry) owner: FileOwner,
    /// The signal (`F_SETSIG`); 0 is `SIGIO` without a descriptor.
    pub(in crate::sentry) signal: u8,
    /// The descriptor that signals name, if the file sends them (`O_ASYNC`).
    pub(in crate::sentry) number: Option<u32>,
    pub(in crate::sentry) seen: SeenEvents,
    pub(in crate::sentry) notice: Option<DirectoryNotice>,
}

/// The settings of open files, by their number, but for the usual ones.
#[derive(Clone, Debug, Default, Eq, Serialize, Deserialize)]
pub(crate) struct AsyncFiles {
    files: BTreeMap<u64, AsyncFile>,
    /// Those that send signals when they are ready.
    #[serde(skip)]
    ready: BTreeSet<u64>,
    /// Directories that send signals.
    #[serde(skip)]
    noticed: BTreeSet<u64>,
    /// Those of `ready` that may have changed since the last look.
    #[serde(skip)]
    touched: BTreeSet<u64>,
    /// Those of `ready` that may change without a change of the state.
    #[serde(skip)]
    watched: BTreeSet<u64>,
}

impl PartialEq for AsyncFiles {
    /// The other fields follow from the settings, or only say which files are looked at.
    fn eq(&self, other: &Self) -> bool {
        self.files == other.files
    }
}

impl AsyncFiles {
    pub(in crate::sentry) fn of(&self, description: u64) -> AsyncFile {
        self.files.get(&description).copied().unwrap_or_default()
    }

    /// Changes the settings of an open file.
    ///
    /// # Errors
    /// `ENOMEM` if it would be one more that sends signals than a guest may have.
    pub(in crate::sentry) fn set(
        &mut self,
        description: u64,
        change: impl FnOnce(&mut AsyncFile),
    ) -> Result<(), Errno> {
        let old = self.of(description);
        let mut new = old;
        change(&mut new);
        let begins = new.number.is_some() && old.number.is_none()
            || new.notice.is_some() && old.notice.is_none();
        if begins && self.ready.len() + self.noticed.len() >= MAX_ASYNC {
            return Err(Errno::NOMEM);
        }
        self.remove(description);
        self.insert(description, new);
        Ok(())
    }

    fn insert(&mut self, description: u64, file: AsyncFile) {
        if file.number.is_some() {
            self.ready.insert(description);
            self.touched.insert(description);
        }
        if file.notice.is_some() {
            self.noticed.insert(description);
        }
        if file != AsyncFile::default() {
            self.files.insert(description, file);
        }
    }

    /// Notes the events of an open file.
    pub(in crate::sentry) fn see(&mut self, description: u64, seen: SeenEvents) {
        if let Some(file) = self.files.get_mut(&description) {
            file.seen = seen;
        }
    }

    /// Drops the settings of an open file that is closed.
    pub(in crate::sentry) fn remove(&mut self, description: u64) {
        if self.files.remove(&description).is_some() {
            self.ready.remove(&description);
            self.noticed.remove(&description);
            self.touched.remove(&description);
            self.watched.remove(&description);
        }
    }

    /// An open file may have changed.
    pub(in crate::sentry) fn touch(&mut self, description: u64) {
        if self.ready.contains(&description) {
            self.touched.insert(description);
        }
    }

    /// All open files may have changed.
    pub(in crate::sentry) fn touch_all(&mut self) {
        self.touched.clone_from(&self.ready);
    }

    /// Whether an open file may have changed since the last look.
    pub(in crate::sentry) fn is_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Begins a look at the open files that may have changed, and takes them out of the list.
    pub(in crate::sentry) fn take_touched(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.touched)
    }

    /// Open files that are looked at after every call.
    pub(in crate::sentry) fn watched(&self) -> &BTreeSet<u64> {
        &self.watched
    }

    /// Sets whether an open file that sends signals is looked at after every call.
    pub(in crate::sentry) fn watch(&mut self, description: u64, always: bool) {
        if always {
            self.watched.insert(description);
        } else {
            self.watched.remove(&description);
        }
    }

    /// Whether an open file sends signals when it is ready.
    pub(in crate::sentry) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Directories whose changes are signalled.
    pub(in crate::sentry) fn noticed(&self) -> impl Iterator<Item = u64> + '_ {
        self.noticed.iter().copied()
    }

    pub(in crate::sentry) fn has_noticed(&self) -> bool {
        !self.noticed.is_empty()
    }

    /// The settings of a snapshot, which are checked next ([`Self::is_sound`]).
    pub(in crate::sentry) fn thawed(self) -> Self {
        let mut whole = Self::default();
        self.files.into_iter().for_each(|(id, file)| whole.insert(id, file));
        whole
    }

    /// Whether a guest can have these settings: of open files alone.
    pub(in crate::sentry) fn is_sound(&self, is_open: impl Fn(u64) -> bool) -> bool {
        let sound = self.files.iter().all(|(id, file)| {
            let notice = file.notice.is_none_or(|notice| notice.mask & DN_EVENTS != 0);
            is_open(*id) && file.signal <= 64 && notice
        });
        sound && self.ready.len() + self.noticed.len() <= MAX_ASYNC
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_come_with_arrivals_and_with_the_beginning_of_other_events() {
        let seen = |events, arrivals| SeenEvents { events, arrivals, departures: 0 };
        for (before, now, is_pipe, codes) in [
            (seen(0, 0), seen(IN, 4), true, &[POLL_IN][..]),
            (seen(IN, 4), seen(IN, 4), true, &[]),
            (seen(IN, 4), seen(IN, 8), true, &[POLL_IN]),
            (seen(IN, 8), seen(0, 8), true, &[]),
            (seen(0, 0), seen(OUT, 0), true, &[POLL_OUT]),
            (seen(OUT, 0), seen(OUT, 9), true, &[]),
            (seen(0, 0), seen(HUP, 0), true, &[POLL_IN]),
            (seen(0, 0), seen(HUP | OUT, 0), false, &[POLL_OUT, POLL_HUP]),
            (seen(0, 0), seen(RDHUP, 0), false, &[POLL_IN]),
        ] {
            assert_eq!(before.codes(now, is_pipe), codes, "{before:?} {now:?}");
        }
        // As in Linux, a writer learns of each read.
        let taken = SeenEvents { departures: 3, ..seen(OUT, 0) };
        assert_eq!(seen(OUT, 0).codes(taken, true), [POLL_OUT]);
    }

    #[test]
    fn open_files_that_send_signals_are_bounded_and_end_when_they_close() {
        let mut files = AsyncFiles::default();
        let signals = |file: &mut AsyncFile| file.number = Some(3);
        for id in 0..MAX_ASYNC as u64 {
            assert_eq!(files.set(id, signals), Ok(()));
        }
        assert_eq!(files.set(MAX_ASYNC as u64, signals), Err(Errno::NOMEM));
        assert_eq!(files.set(7, |file| file.signal = 9), Ok(()), "it sends some already");
        assert_eq!(files.set(MAX_ASYNC as u64, |file| file.signal = 9), Ok(()));
        files.remove(7);
        assert_eq!((files.of(7), files.set(7, signals)), (AsyncFile::default(), Ok(())));
    }

    #[test]
    fn settings_of_a_snapshot_belong_to_open_files() {
        let mut files = AsyncFiles::default();
        files.set(3, |file| file.number = Some(9)).unwrap();
        let again =
            |files: &AsyncFiles| AsyncFiles { files: files.files.clone(), ..AsyncFiles::default() };
        assert_eq!(again(&files).thawed(), files);
        assert!(files.is_sound(|id| id == 3) && !files.is_sound(|id| id != 3));
        files.set(3, |file| file.signal = 65).unwrap();
        assert!(!files.is_sound(|_| true));
    }
}
