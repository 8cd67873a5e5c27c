//! Calls that change what is told about files: times, owners, sizes, further names; and what the file system tells of itself.

use afresh_files::{Kind, Time};
use rustix::io::Errno;

use super::encode::Bytes;
use super::fifos::Fifo;
use super::permissions::WRITE;
use super::table::Open;
use super::terminals::TerminalEnd;
use super::{DONE, Person, Served, clock_calls, copy_out, process_calls, word_in};
use crate::platform::Process;

/// How the times of a call are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Times {
    /// Seconds (`utime`).
    Seconds,
    /// Seconds and microseconds (`utimes`).
    Micro,
    /// Seconds and nanoseconds, or a word for now or never (`utimensat`).
    Nano,
}

impl Person {
    /// The time that starts at `at`; nothing when it is to stay.
    fn time_in(process: &Process, at: u64, times: Times) -> Served<Option<Time>> {
        let word = |offset: u64| word_in(process, at.wrapping_add(offset)).map(|word| word as i64);
        let (seconds, nanoseconds) = match times {
            Times::Seconds => (word(0)?, 0),
            Times::Micro => (word(0)?, word(8)?.checked_mul(1000).ok_or(Errno::INVAL)?),
            Times::Nano => (word(0)?, word(8)?),
        };
        match nanoseconds {
            libc::UTIME_NOW if times == Times::Nano => Ok(Some(clock_calls::now())),
            libc::UTIME_OMIT if times == Times::Nano => Ok(None),
            0..1_000_000_000 => Ok(Some(Time { seconds, nanos: nanoseconds as u32 })),
            _ => Err(Errno::INVAL.into()),
        }
    }

    pub(super) fn set_times(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        times: (u64, Times),
        flags: u64,
    ) -> Served {
        let (list, kind) = times;
        let size = if kind == Times::Seconds { 8 } else { 16 };
        let (accessed, modified) = if list == 0 {
            (Some(clock_calls::now()), Some(clock_calls::now()))
        } else {
            let second = list.wrapping_add(size);
            (Self::time_in(process, list, kind)?, Self::time_in(process, second, kind)?)
        };
        let node = if path == 0 {
            match &self.state.table.get(at)?.open {
                Open::File(open)
                | Open::Device(_, open)
                | Open::Fifo(Fifo { open, .. })
                | Open::Terminal(TerminalEnd { open, .. }) => open.node,
                _ => return Err(Errno::INVAL.into()),
            }
        } else {
            let follow = flags & libc::AT_SYMLINK_NOFOLLOW as u64 == 0;
            self.follow(process, at, path, follow)?
        };
        if accessed.is_some() || modified.is_some() {
            self.change().tree.set_times(node, accessed, modified, clock_calls::now())?;
            self.change().tell_file(node, libc::IN_ATTRIB);
        }
        Ok(DONE)
    }

    /// Files belong to the guest's one user, and can be given to nobody else.
    fn give(user: u64, group: u64) -> Served {
        let stays = |id: u64| id as u32 == u32::MAX || id as u32 == process_calls::USER as u32;
        if stays(user) && stays(group) { Ok(DONE) } else { Err(Errno::PERM.into()) }
    }

    pub(super) fn chown(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        owner: (u64, u64),
        flags: u64,
    ) -> Served {
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW as u64 == 0;
        let node = self.follow(process, at, path, follow)?;
        let given = Self::give(owner.0, owner.1)?;
        self.change().tell_file(node, libc::IN_ATTRIB);
        Ok(given)
    }

    pub(super) fn fchown(&mut self, descriptor: u64, user: u64, group: u64) -> Served {
        self.state.table.get(descriptor)?;
        Self::give(user, group)
    }

    pub(super) fn link(
        &mut self,
        process: &Process,
        from: (u64, u64),
        to: (u64, u64),
        flags: u64,
    ) -> Served {
        let follow = flags & libc::AT_SYMLINK_FOLLOW as u64 != 0;
        let node = self.follow(process, from.0, from.1, follow)?;
        let place = self.place(process, to.0, to.1)?;
        self.state.may_make(&place)?;
        self.change().tree.link_at(node, &place, clock_calls::now())?;
        self.change().tell_made(&place);
        self.change().tell_file(node, libc::IN_ATTRIB);
        Ok(DONE)
    }

    pub(super) fn truncate_path(&mut self, process: &Process, path: u64, size: u64) -> Served {
        let node = self.follow(process, libc::AT_FDCWD as u64, path, true)?;
        if self.state.tree.stat(node)?.kind == Kind::Directory {
            return Err(Errno::ISDIR.into());
        }
        if size > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.state.may(node, WRITE)?;
        self.state.seals.may_resize(node, self.state.tree.stat(node)?.size, size)?;
        self.change().tree.set_size(node, size, clock_calls::now())?;
        self.change().tell_file(node, libc::IN_MODIFY);
        Ok(DONE)
    }

    /// `fallocate` in its plain form: the file is at least so long.
    pub(super) fn allocate(&mut self, descriptor: u64, mode: u64, offset: u64, len: u64) -> Served {
        let Open::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::NODEV.into());
        };
        let node = open.node;
        if !open.access.write {
            return Err(Errno::BADF.into());
        }
        let end = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64 && len > 0);
        let end = end.ok_or(Errno::INVAL)?;
        if mode != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        let size = self.state.tree.stat(node)?.size;
        self.state.seals.may_resize(node, size, end.max(size))?;
        if size < end {
            self.change().tree.set_size(node, end, clock_calls::now())?;
        }
        self.change().tell_file(node, libc::IN_MODIFY);
        Ok(DONE)
    }

    pub(super) fn file_system(&mut self, process: &mut Process, path: u64, to: u64) -> Served {
        self.follow(process, libc::AT_FDCWD as u64, path, true)?;
        self.tell_file_system(process, to)
    }

    pub(super) fn file_system_of(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
    ) -> Served {
        self.state.table.get(descriptor)?;
        self.tell_file_system(process, to)
    }

    /// `struct statfs`: one in memory, as large as the guest may store.
    fn tell_file_system(&self, process: &mut Process, to: u64) -> Served {
        let (all, used) = (self.state.tree.budget().bytes, self.state.tree.used().bytes);
        let free = all.saturating_sub(used);
        let bytes = Bytes::default()
            .word(libc::TMPFS_MAGIC as u64)
            .word(4096)
            .word(all / 4096)
            .word(free / 4096)
            .word(free / 4096)
            .zeros(24)
            .word(255)
            .word(4096)
            .zeros(40);
        copy_out(process, to, &bytes.0)?;
        Ok(DONE)
    }
}
