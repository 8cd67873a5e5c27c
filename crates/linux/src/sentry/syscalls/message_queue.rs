//! Calls on queues of messages of System V.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::message_queues::{MAX_MESSAGE, MessageQueue, WantedMessage};
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::now;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::semaphore::{asked_rights, check_mode, permissions};

/// Bytes of `struct msqid_ds`, and where mode and room are in that.
const QUEUE_LEN: usize = 120;
const MODE: usize = 20;
const QBYTES_OFFSET: usize = 88;

fn number(id: u64) -> Result<u32, Errno> {
    i32::try_from(id as i64).ok().filter(|id| *id >= 0).map(|id| id as u32).ok_or(Errno::INVAL)
}

impl Sentry {
    /// `msgget(2)`, as on Linux.
    pub(in crate::sentry) fn sys_msgget(&mut self, key: u64, flags: u64) -> SyscallResult {
        let key = key as u32;
        let has = |flag: i32| flags as i32 & flag != 0;
        if let Some((id, queue)) = self.state.queues.keyed(key) {
            if has(libc::IPC_CREAT) && has(libc::IPC_EXCL) {
                return Err(Errno::EXIST.into());
            }
            check_mode(queue.mode, asked_rights(flags))?;
            return Ok(SyscallControl::Value(id.into()));
        }
        if key != 0 && !has(libc::IPC_CREAT) {
            return Err(Errno::NOENT.into());
        }
        let queue = MessageQueue::new(key, flags as u32 & 0o777, now().seconds);
        Ok(SyscallControl::Value(self.change().queues.add(queue)?.into()))
    }

    /// The queue of a call. The error distinguishes one that was removed while the call waited.
    fn queue(&self, id: u32, asked: u32) -> Result<&MessageQueue, Errno> {
        let gone = if self.resumed.is_some() { Errno::IDRM } else { Errno::INVAL };
        let queue = self.state.queues.get(id.into()).map_err(|_| gone)?;
        check_mode(queue.mode, asked)?;
        Ok(queue)
    }

    /// `msgsnd(2)`, as on Linux.
    pub(in crate::sentry) fn sys_msgsnd(
        &mut self,
        process: &Process,
        id: u64,
        at: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        let id = number(id)?;
        if len > MAX_MESSAGE {
            return Err(Errno::INVAL.into());
        }
        let kind = word_in(process, at)? as i64;
        if kind <= 0 {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, at.wrapping_add(8), len as usize)?;
        self.queue(id, 2)?;
        if !self.state.queues.has_room(id, len) {
            if flags as i32 & libc::IPC_NOWAIT != 0 {
                return Err(Errno::AGAIN.into());
            }
            let reason = WaitReason::MessageRoom(id, len);
            return Ok(SyscallControl::Wait(Wait::new(reason, None)));
        }
        let own = self.state.processes.current_id();
        let queue = self.change().queues.get_mut(id.into())?;
        queue.push((kind, bytes));
        (queue.times[0], queue.last[0]) = (now().seconds, own);
        Ok(ZERO)
    }

    /// `msgrcv(2)`, as on Linux.
    pub(in crate::sentry) fn sys_msgrcv(
        &mut self,
        process: &mut Process,
        &[msqid, msgp, msgsz, msgtyp, msgflg, _]: &[u64; 6],
    ) -> SyscallResult {
        let (msqid, msgtyp, msgflg) = (number(msqid)?, msgtyp as i64, msgflg as i32);
        let has = |flag: i32| msgflg & flag != 0;
        if msgsz > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let wanted = match msgtyp {
            0 => WantedMessage::Any,
            1.. if has(libc::MSG_EXCEPT) => WantedMessage::Except(msgtyp),
            1.. => WantedMessage::Of(msgtyp),
            _ => WantedMessage::UpTo(msgtyp.saturating_neg()),
        };
        let copies = has(libc::MSG_COPY);
        if copies && (has(libc::MSG_EXCEPT) || !has(libc::IPC_NOWAIT)) {
            return Err(Errno::INVAL.into());
        }
        let queue = self.queue(msqid, 4)?;
        let place = match copies {
            // The type is a place then.
            true => usize::try_from(msgtyp).ok().filter(|place| queue.at(*place).is_some()),
            false => queue.find(wanted),
        };
        let Some((place, (msgtyp, bytes))) =
            place.and_then(|place| Some((place, queue.at(place)?)))
        else {
            if has(libc::IPC_NOWAIT) {
                return Err(Errno::NOMSG.into());
            }
            let reason = WaitReason::Message(msqid, wanted);
            return Ok(SyscallControl::Wait(Wait::new(reason, None)));
        };
        if bytes.len() as u64 > msgsz && !has(libc::MSG_NOERROR) {
            return Err(Errno::TOOBIG.into());
        }
        if bytes.len() as u64 > msgsz && copies {
            return Err(Errno::INVAL.into());
        }
        let taken = bytes.len().min(msgsz as usize);
        copy_out(process, msgp, &msgtyp.to_le_bytes())?;
        copy_out(process, msgp.wrapping_add(8), &bytes[..taken])?;
        if !copies {
            let own = self.state.processes.current_id();
            let queue = self.change().queues.get_mut(msqid.into())?;
            queue.take(place);
            (queue.times[1], queue.last[1]) = (now().seconds, own);
        }
        Ok(SyscallControl::Value(taken as u64))
    }

    /// `msgctl(2)`: `IPC_SET` changes only the mode and the size of the queue.
    pub(in crate::sentry) fn sys_msgctl(
        &mut self,
        process: &mut Process,
        id: u64,
        command: u64,
        at: u64,
    ) -> SyscallResult {
        const MSG_STAT: i32 = 11;
        const MSG_STAT_ANY: i32 = 13;
        let id = u64::from(number(id)?);
        if let Some(answer) = self.queue_info(process, command as i32 & 0xff, at)? {
            return Ok(answer);
        }
        let queue = self.state.queues.get(id)?;
        match command as i32 & 0xff {
            // A number is an index as well.
            command @ (libc::IPC_STAT | MSG_STAT | MSG_STAT_ANY) => {
                if command != MSG_STAT_ANY {
                    check_mode(queue.mode, 4)?;
                }
                let (bytes, count) = queue.held_size();
                let mut reply =
                    permissions(queue.key, self.state.namespaces.users.owner, queue.mode);
                for time in queue.times {
                    reply = reply.word(time as u64);
                }
                let reply = reply.word(bytes).word(count).word(queue.room);
                let [sender, receiver] = queue.last;
                copy_out(process, at, &reply.int(sender).int(receiver).word(0).word(0).0)?;
                if command != libc::IPC_STAT {
                    return Ok(SyscallControl::Value(id));
                }
            }
            libc::IPC_SET => {
                let given = copy_in(process, at, QUEUE_LEN)?;
                let room = given[QBYTES_OFFSET..QBYTES_OFFSET + 8].iter().rev();
                let room = room.fold(0, |all, byte| all << 8 | u64::from(*byte));
                let queue = self.change().queues.get_mut(id)?;
                queue.set_room(room)?;
                queue.mode = (u32::from(given[MODE]) | u32::from(given[MODE + 1]) << 8) & 0o777;
                queue.times[2] = now().seconds;
            }
            libc::IPC_RMID => self.change().queues.remove(id),
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(ZERO)
    }
}
