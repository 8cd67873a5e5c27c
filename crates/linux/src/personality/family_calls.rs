//! Calls that make processes, run other programs in them, wait for them, and put them into groups.

use rustix::io::Errno;

use super::encode::Bytes;
use super::family::{Asked, FIRST, Which};
use super::kin::News;
use super::processor;
use super::threads::{On, Thread, Wait};
use super::{Channel, DONE, Outcome, Person, Served, Writer, copy_out, path_in, word_in};
use crate::load::Command;
use crate::platform::{GUEST, Process};

/// Arguments and variables that a program may be given, and bytes of each and of all.
const STRINGS: usize = 1 << 16;
const BYTES: usize = 1 << 19;

/// A process that was made, for whoever makes it one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fork {
    pub(crate) id: u32,
    /// Whether its memory is a copy; otherwise it is its parent's.
    pub(crate) copies: bool,
    /// Whether its parent waits until it runs another program.
    pub(crate) waits: bool,
    /// Where its number goes in its memory.
    pub(crate) told_at: Option<u64>,
    /// Its parent's descriptor of it, if it has asked for one.
    pub(crate) descriptor: Option<u64>,
}

/// What of a `clone` is not for threads alone and is served.
const SERVED: i32 = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_PIDFD
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_SETTLS;

impl Person {
    /// A further process: `clone` without what makes a thread.
    pub(super) fn fork(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        if let Some(Wait { on: On::Borrower(child), .. }) = self.resumed {
            return Ok(Outcome::Value(child.into()));
        }
        let [flags, stack, parent, child, base, _] = *a;
        let flags = flags as i32;
        let waits = flags & libc::CLONE_VFORK != 0;
        let copies = flags & libc::CLONE_VM == 0;
        // Memory is shared only while the parent waits. The lowest byte is the signal that tells of the end.
        if flags & !SERVED & !0xff != 0 || !(copies || waits) {
            return self.unknown(libc::SYS_clone);
        }
        let described = flags & libc::CLONE_PIDFD != 0;
        if described {
            // Both are told at one place.
            if flags & libc::CLONE_PARENT_SETTID != 0 {
                return Err(Errno::INVAL.into());
            }
            self.state.table.check_room()?;
        }
        let base = (flags & libc::CLONE_SETTLS != 0).then_some(base);
        if base.is_some_and(|base| base >= GUEST.end) {
            return Err(Errno::PERM.into());
        }
        let context = process.context().child((stack != 0).then_some(stack), base);
        let current = self.state.threads.current();
        let thread = Thread {
            context: Some(context),
            wait: None,
            masked: None,
            pending: Default::default(),
            cleared: 0,
            spent: 0,
            ..current.clone()
        };
        let id = self.change().add_child(thread, copies)?;
        if flags & libc::CLONE_PARENT_SETTID != 0 {
            // As in Linux, a place that cannot be written is the guest's loss.
            let _ = process.write(parent, &id.to_le_bytes())?;
        }
        let mut descriptor = None;
        if described && let Outcome::Value(number) = self.process_descriptor(id.into(), 0)? {
            let _ = process.write(parent, &(number as u32).to_le_bytes())?;
            descriptor = Some(number);
        }
        let told_at = (flags & libc::CLONE_CHILD_SETTID != 0).then_some(child);
        Ok(Outcome::Fork(Fork { id, copies, waits: waits && !copies, told_at, descriptor }))
    }

    /// Another program in the place of this one.
    pub(super) fn exec(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        strings: (u64, u64),
        flags: u64,
    ) -> Served {
        if flags != 0 {
            return self.unknown(libc::SYS_execveat);
        }
        let (path, from) = self.program_at(at, path_in(process, path)?)?;
        let mut left = BYTES;
        let args = strings_in(process, strings.0, &mut left)?;
        let env = strings_in(process, strings.1, &mut left)?;
        Ok(Outcome::Exec(Box::new(Command { path, from, args, env })))
    }

    /// `wait4`.
    pub(super) fn wait_child(
        &mut self,
        process: &mut Process,
        target: u64,
        status: u64,
        options: u64,
        usage: u64,
    ) -> Served {
        let which = match target as i32 {
            -1 => Which::Any,
            0 => Which::Group(self.state.family.own.group),
            group @ ..0 => Which::Group(group.unsigned_abs()),
            one => Which::One(one as u32),
        };
        let flag = |flag: i32| options as i32 & flag != 0;
        let asked = Asked {
            which,
            ended: true,
            stopped: flag(libc::WUNTRACED),
            continued: flag(libc::WCONTINUED),
        };
        let Some((id, ended)) = self.state.family.child_ended(which) else {
            let Some((id, news)) = self.state.family.child_changed(asked) else {
                return self.wait_longer(asked, options);
            };
            if status != 0 {
                copy_out(process, status, &news.status().to_le_bytes())?;
            }
            if usage != 0 {
                let spent = self.state.family.spent_by(id);
                copy_out(process, usage, &processor::usage(spent, 0))?;
            }
            self.forget_news(id);
            return Ok(Outcome::Value(id.into()));
        };
        if status != 0 {
            copy_out(process, status, &ended.status.to_le_bytes())?;
        }
        if usage != 0 {
            copy_out(process, usage, &processor::usage(ended.spent, 0))?;
        }
        self.change().family.ask_for(id);
        Ok(Outcome::Value(id.into()))
    }

    /// `waitid`.
    pub(super) fn wait_id(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        let [kind, id, info, options, usage, _] = *a;
        let which = match kind as u32 {
            libc::P_ALL => Which::Any,
            libc::P_PID => Which::One(id as u32),
            libc::P_PIDFD => Which::One(self.process_meant(id)?),
            libc::P_PGID if id == 0 => Which::Group(self.state.family.own.group),
            libc::P_PGID => Which::Group(id as u32),
            _ => return Err(Errno::INVAL.into()),
        };
        if options & (libc::WEXITED | libc::WSTOPPED | libc::WCONTINUED) as u64 == 0 {
            return Err(Errno::INVAL.into());
        }
        let flag = |flag: i32| options as i32 & flag != 0;
        let asked = Asked {
            which,
            ended: flag(libc::WEXITED),
            stopped: flag(libc::WSTOPPED),
            continued: flag(libc::WCONTINUED),
        };
        let gone = self.state.family.child_ended(which).filter(|_| asked.ended);
        let found = match gone {
            Some((id, ended)) => Some(match ended.status & 0x7f {
                0 => (id, libc::CLD_EXITED, ended.status >> 8),
                signal => (id, libc::CLD_KILLED, signal),
            }),
            None => self.state.family.child_changed(asked).map(|(id, news)| match news {
                News::Stopped(signal) => (id, libc::CLD_STOPPED, signal.into()),
                News::Continued => (id, libc::CLD_CONTINUED, libc::SIGCONT),
            }),
        };
        let Some((id, code, status)) = found else {
            let own = self.state.family.has_child(which);
            if own && kind as u32 == libc::P_PIDFD && options & libc::WNOHANG as u64 == 0 {
                // One that does not wait has no wait done through it.
                let flags = self.state.table.get(id)?.flags;
                if flags & libc::O_NONBLOCK as u32 != 0 {
                    return Err(Errno::AGAIN.into());
                }
            }
            let outcome = self.wait_longer(asked, options)?;
            if info != 0 && matches!(outcome, Outcome::Value(0)) {
                copy_out(process, info, &[0; 128])?;
            }
            return Ok(outcome);
        };
        let has_gone = gone.is_some();
        if info != 0 {
            let bytes = Bytes::default()
                .int(libc::SIGCHLD as u32)
                .int(0)
                .int(code as u32)
                .int(0)
                .int(id)
                .int(super::USER as u32)
                .int(status as u32)
                .zeros(100);
            copy_out(process, info, &bytes.0)?;
        }
        if usage != 0 {
            let spent = self.state.family.spent_by(id);
            copy_out(process, usage, &processor::usage(spent, 0))?;
        }
        if options & libc::WNOWAIT as u64 == 0 {
            match has_gone {
                true => self.change().family.ask_for(id),
                false => self.forget_news(id),
            }
        }
        Ok(DONE)
    }

    /// The parent of `id` was told.
    fn forget_news(&mut self, id: u32) {
        if let Some(kin) = self.change().family.kin_mut(id) {
            kin.news = None;
        }
    }

    fn wait_longer(&self, asked: Asked, options: u64) -> Served {
        if !self.state.family.has_child(asked.which) {
            return Err(Errno::CHILD.into());
        }
        if options & libc::WNOHANG as u64 != 0 {
            return Ok(DONE);
        }
        Ok(Outcome::Wait(Wait::new(On::Children(asked), None)))
    }

    /// Who writes to `channel`, for whoever hears it.
    pub(super) fn writer(&self, channel: Channel) -> Writer {
        let session = self.state.family.own.session;
        Writer { channel, leader: (session != FIRST).then_some(session) }
    }

    /// The group, or the session, of a process.
    pub(super) fn kinship(&self, id: u64, session: bool) -> Served {
        let family = &self.state.family;
        let id = if id == 0 { family.own.id } else { id as u32 };
        let kin = family.kin(id).ok_or(Errno::SRCH)?;
        Ok(Outcome::Value(if session { kin.session } else { kin.group }.into()))
    }

    pub(super) fn set_group(&mut self, id: u64, group: u64) -> Served {
        let own = self.state.family.own.clone();
        let id = if id == 0 { own.id } else { id as u32 };
        let group = if group == 0 { id } else { group as u32 };
        if group > i32::MAX as u32 {
            return Err(Errno::INVAL.into());
        }
        let kin = self.state.family.kin(id).ok_or(Errno::SRCH)?;
        if kin.id != own.id && kin.parent != own.id {
            return Err(Errno::SRCH.into());
        }
        // A child that runs another program than its parent is its own.
        if kin.id != own.id && kin.program != own.program {
            return Err(Errno::ACCESS.into());
        }
        let known = group == id || !self.state.family.group(group).is_empty();
        if kin.session != own.session || kin.session == kin.id || !known {
            return Err(Errno::PERM.into());
        }
        if let Some(kin) = self.change().family.kin_mut(id) {
            kin.group = group;
        }
        Ok(DONE)
    }

    pub(super) fn set_session(&mut self) -> Served {
        let id = self.state.family.own.id;
        if self.state.family.own.group == id {
            return Err(Errno::PERM.into());
        }
        let own = &mut self.change().family.own;
        (own.group, own.session) = (id, id);
        Ok(Outcome::Value(id.into()))
    }
}

/// Copies in a list of strings.
fn strings_in(process: &Process, at: u64, left: &mut usize) -> Served<Vec<Vec<u8>>> {
    let mut strings = Vec::new();
    if at == 0 {
        return Ok(strings);
    }
    loop {
        let address = word_in(process, at.wrapping_add(8 * strings.len() as u64))?;
        if address == 0 {
            return Ok(strings);
        }
        let string = string_in(process, address, *left)?;
        *left = left.checked_sub(string.len() + 9).ok_or(Errno::TOOBIG)?;
        strings.push(string);
        if strings.len() > STRINGS {
            return Err(Errno::TOOBIG.into());
        }
    }
}

/// Bytes up to a zero, at most so many.
fn string_in(process: &Process, address: u64, most: usize) -> Served<Vec<u8>> {
    let mut string = Vec::new();
    while string.len() < most {
        let at = address.wrapping_add(string.len() as u64);
        // Up to the end of a page: what lies behind it may not be there.
        let piece =
            super::copy_in(process, at, (super::PAGE - at % super::PAGE).min(512) as usize)?;
        if let Some(end) = piece.iter().position(|&byte| byte == 0) {
            string.extend(&piece[..end]);
            return Ok(string);
        }
        string.extend(piece);
    }
    Err(Errno::TOOBIG.into())
}
