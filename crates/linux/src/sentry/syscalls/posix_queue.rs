//! Calls on named queues of messages (`mq_open`, of POSIX).

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{IN, OUT};
use crate::sentry::kernel::posix_queues::{
    ArrivalRequest, MAX_COUNT, MAX_SIZE, PRIORITIES, PosixQueue, is_name,
};
use crate::sentry::kernel::queue_notices::{CAME, COOKIE_LEN, QueueNotice};
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::mm::user_memory::{copy_in, copy_out, path_in, word_in};
use crate::sentry::net::sockets::NETLINK;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::length_in;
use crate::sentry::syscalls::semaphore::check_mode;

/// Bytes of `struct mq_attr`.
const ATTRIBUTES_LEN: usize = 64;
/// Ways of `struct sigevent`: by a signal, not at all, and by a thread of the C library.
const BY_SIGNAL: u32 = 0;
const NOT_AT_ALL: u32 = 1;
const BY_THREAD: u32 = 2;
/// The code of a signal for a message that came (`SI_MESGQ`).
const OF_QUEUE: i32 = -3;

impl Sentry {
    fn posix_queue(&self, descriptor: u64) -> Result<(u32, &PosixQueue), Errno> {
        match self.state.table.get(descriptor)?.open {
            FileObject::Queue(id) => {
                self.state.named_queues.get(id).map(|queue| (id, queue)).ok_or(Errno::BADF)
            }
            _ => Err(Errno::BADF),
        }
    }

    /// `mq_open(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_open(
        &mut self,
        process: &Process,
        name: u64,
        flags: u64,
        mode: u64,
        attributes: u64,
    ) -> SyscallResult {
        let name = path_in(process, name)?;
        is_name(&name)?;
        let has = |flag: i32| flags as i32 & flag != 0;
        let asked = match flags as i32 & libc::O_ACCMODE {
            libc::O_RDONLY => 4,
            libc::O_WRONLY => 2,
            libc::O_RDWR => 6,
            _ => return Err(Errno::INVAL.into()),
        };
        self.state.table.check_room()?;
        let id = match self.state.named_queues.named(&name) {
            Some(_) if has(libc::O_CREAT) && has(libc::O_EXCL) => return Err(Errno::EXIST.into()),
            Some((id, queue)) => {
                check_mode(queue.mode, asked)?;
                id
            }
            None if !has(libc::O_CREAT) => return Err(Errno::NOENT.into()),
            None => {
                let (mut count, mut size) = (MAX_COUNT, MAX_SIZE);
                if attributes != 0 {
                    count = word_in(process, attributes.wrapping_add(8))?;
                    size = word_in(process, attributes.wrapping_add(16))?;
                    if !(1..=MAX_COUNT).contains(&count) || !(1..=MAX_SIZE).contains(&size) {
                        return Err(Errno::INVAL.into());
                    }
                }
                let mode = mode as u32 & 0o777 & !self.state.current().umask;
                self.change().named_queues.add(PosixQueue::new(name, mode, count, size))?
            }
        };
        self.change().named_queues.join(id);
        let kept = flags as i32 & (libc::O_ACCMODE | libc::O_NONBLOCK);
        self.add(FileObject::Queue(id), kept | libc::O_CLOEXEC)
    }

    /// `mq_unlink(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_unlink(
        &mut self,
        process: &Process,
        name: u64,
    ) -> SyscallResult {
        let name = path_in(process, name)?;
        is_name(&name)?;
        self.state.named_queues.named(&name).ok_or(Errno::NOENT)?;
        self.change().named_queues.unlink(&name)?;
        self.change().drop_queue_notices();
        Ok(ZERO)
    }

    /// When a call with a limit on the clock ends, or has ended.
    fn queue_limit(&self, process: &Process, limit: u64) -> SyscallResult<Option<u64>> {
        if limit == 0 {
            return Ok(None);
        }
        let limit = length_in(process, limit)?;
        Ok(Some(self.moment_after(libc::CLOCK_REALTIME as u64, limit, true)?))
    }

    /// A wait for room or a message.
    fn wait_for_queue(&self, descriptor: u64, events: u16, until: Option<u64>) -> SyscallResult {
        if self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 != 0 {
            return Err(Errno::AGAIN.into());
        }
        let until = match &self.resumed {
            Some(wait) => wait.until,
            None => until,
        };
        if self.passed(until) {
            return Err(Errno::TIMEDOUT.into());
        }
        let reason = WaitReason::Files(vec![(self.state.table.id(descriptor)?, events)]);
        Ok(SyscallControl::Wait(Wait::new(reason, until)))
    }

    /// `mq_timedsend(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_timedsend(
        &mut self,
        process: &Process,
        &[mqdes, msg_ptr, msg_len, msg_prio, abs_timeout, _]: &[u64; 6],
    ) -> SyscallResult {
        if msg_prio as u32 >= PRIORITIES {
            return Err(Errno::INVAL.into());
        }
        let until = self.queue_limit(process, abs_timeout)?;
        let (id, queue) = self.posix_queue(mqdes)?;
        if !self.state.table.get(mqdes)?.writes() {
            return Err(Errno::BADF.into());
        }
        if msg_len > queue.size {
            return Err(Errno::MSGSIZE.into());
        }
        if queue.is_full() {
            return self.wait_for_queue(mqdes, OUT, until);
        }
        let bytes = copy_in(process, msg_ptr, msg_len as usize)?;
        // A thread that waits for a message gets it, and then no signal is sent.
        let (empty, heard) = (queue.is_empty(), self.awaits_message(id));
        let queue = self.change().named_queues.get_mut(id).ok_or(Errno::BADF)?;
        queue.push(msg_prio as u32, bytes);
        if empty
            && !heard
            && let Some(request) = queue.request.take()
        {
            self.notify_arrival(request);
            self.change().send_queue_notice(id, CAME);
        }
        Ok(ZERO)
    }

    /// Whether a thread waits in a receive of this queue.
    fn awaits_message(&self, id: u32) -> bool {
        let threads = self.state.processes.threads();
        threads.filter_map(|(_, thread)| thread.wait.as_ref()).any(|wait| match &wait.reason {
            WaitReason::Files(list) => list.iter().any(|(description, events)| {
                let open = self.state.table.description(*description).map(|d| &d.open);
                *events == IN && open == Some(&FileObject::Queue(id))
            }),
            _ => false,
        })
    }

    fn notify_arrival(&mut self, request: ArrivalRequest) {
        let Some(signal) = request.signal else { return };
        let own = self.state.sender(self.state.processes.current_id());
        let info = SignalInfo::new(signal, OF_QUEUE, own, request.value);
        if self.state.processes.lives(request.process) {
            self.change().send_to(request.process, None, info);
        }
    }

    /// `mq_timedreceive(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_timedreceive(
        &mut self,
        process: &mut Process,
        &[mqdes, msg_ptr, msg_len, msg_prio, abs_timeout, _]: &[u64; 6],
    ) -> SyscallResult {
        let until = self.queue_limit(process, abs_timeout)?;
        let (id, queue) = self.posix_queue(mqdes)?;
        if !self.state.table.get(mqdes)?.reads() {
            return Err(Errno::BADF.into());
        }
        if msg_len < queue.size {
            return Err(Errno::MSGSIZE.into());
        }
        let Some((rank, bytes)) = queue.first() else {
            return self.wait_for_queue(mqdes, IN, until);
        };
        let taken = bytes.len() as u64;
        copy_out(process, msg_ptr, bytes)?;
        if msg_prio != 0 {
            copy_out(process, msg_prio, &rank.to_le_bytes())?;
        }
        self.change().named_queues.get_mut(id).ok_or(Errno::BADF)?.take();
        Ok(SyscallControl::Value(taken))
    }

    /// `mq_notify(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_notify(
        &mut self,
        process: &Process,
        descriptor: u64,
        event: u64,
    ) -> SyscallResult {
        let own = self.state.processes.current_id();
        let mut notice = None;
        let request = match event {
            0 => None,
            event => {
                let value = word_in(process, event)?;
                let words = word_in(process, event.wrapping_add(8))?;
                let (signal, way) = (words as u32, (words >> 32) as u32);
                let signal = match way {
                    NOT_AT_ALL => None,
                    BY_SIGNAL if (1..=64).contains(&signal) => Some(signal as u8),
                    BY_THREAD => {
                        let cookie = copy_in(process, value, COOKIE_LEN)?;
                        let cookie = cookie.try_into().map_err(|_| Errno::FAULT)?;
                        let socket = self.socket_of(signal.into())?;
                        if i32::from(socket.family) != NETLINK {
                            return Err(Errno::INVAL.into());
                        }
                        let socket = self.state.table.id(signal.into())?;
                        notice = Some(QueueNotice { socket, cookie });
                        None
                    }
                    _ => return Err(Errno::INVAL.into()),
                };
                Some(ArrivalRequest { process: own, signal, value })
            }
        };
        let (id, queue) = self.posix_queue(descriptor)?;
        let held = queue.request;
        if request.is_some() && held.is_some() {
            return Err(Errno::BUSY.into());
        }
        if request.is_some() || held.is_some_and(|held| held.process == own) {
            let state = self.change();
            state.named_queues.get_mut(id).ok_or(Errno::BADF)?.request = request;
            state.drop_queue_notices();
            if let Some(notice) = notice {
                state.queue_notices.set(id, notice);
            }
        }
        Ok(ZERO)
    }

    /// A process that closes a descriptor of a queue gets no signal for it any more.
    pub(in crate::sentry) fn drop_queue_requests(&mut self, closed: &[u64]) {
        let own = self.state.processes.current_id();
        for descriptor in closed {
            if let Ok((id, _)) = self.posix_queue(*descriptor)
                && let Some(queue) = self.change().named_queues.get_mut(id)
            {
                queue.request = queue.request.filter(|request| request.process != own);
            }
        }
        self.change().drop_queue_notices();
    }

    /// `mq_getsetattr(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mq_getsetattr(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        const NONBLOCK: u64 = libc::O_NONBLOCK as u64;
        let (_, queue) = self.posix_queue(descriptor)?;
        let now = u64::from(self.state.table.get(descriptor)?.flags) & NONBLOCK;
        let reply = [now, queue.count, queue.size, queue.len()];
        let given = match new {
            0 => None,
            new => Some(word_in(process, new)?),
        };
        if given.is_some_and(|given| given & !NONBLOCK != 0) {
            return Err(Errno::INVAL.into());
        }
        if old != 0 {
            let reply = reply.into_iter().fold(StructBuilder::default(), StructBuilder::word);
            let len = reply.0.len();
            copy_out(process, old, &reply.zeros(ATTRIBUTES_LEN - len).0)?;
        }
        if let Some(given) = given {
            let flags = &mut self.change().table.get_mut(descriptor)?.flags;
            *flags = *flags & !(NONBLOCK as u32) | given as u32;
        }
        Ok(ZERO)
    }

    /// Reads the text about a queue, as a file has it.
    pub(in crate::sentry) fn read_queue(
        &self,
        process: &mut Process,
        id: u32,
        pieces: &[(u64, u64)],
    ) -> SyscallResult {
        let queue = self.state.named_queues.get(id).ok_or(Errno::BADF)?;
        let (way, signal, asker) = match queue.request {
            Some(ArrivalRequest { process, signal: Some(signal), .. }) => (0, signal, process),
            Some(ArrivalRequest { process, signal: None, .. }) => (1, 0, process),
            None => (0, 0, 0),
        };
        let text = format!(
            "QSIZE:{:<10} NOTIFY:{way:<5} SIGNO:{signal:<5} NOTIFY_PID:{asker:<6}\n",
            queue.bytes()
        );
        let mut rest = text.as_bytes();
        for &(to, len) in pieces {
            let (now, later) = rest.split_at(rest.len().min(len as usize));
            copy_out(process, to, now)?;
            rest = later;
        }
        Ok(SyscallControl::Value((text.len() - rest.len()) as u64))
    }
}
