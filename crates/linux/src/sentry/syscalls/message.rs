//! Messages over sockets, with addresses and descriptors.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::root_files::OVERFLOW_ID;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::peer_credentials::PeerCredentials;
use crate::sentry::kernel::poll_events::IN;
use crate::sentry::kernel::threads::Wait;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::net::sockets::{
    Address, MAX_ADDRESS, NETLINK, ReceivedMessage, SentControl, SocketState,
};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};
use crate::sentry::syscalls::read_write::{MAX_TRANSFER, PIECES, pieces};
use crate::sentry::syscalls::stream_write::StreamWrite;

use rustix::io::Errno;

/// Maximum bytes of control data (`optmem_max`).
const CONTROL: u64 = 1 << 16;
const SCM_CREDENTIALS: i32 = 2;
/// Bytes before the descriptors (`struct cmsghdr`).
const HEADER: usize = 16;

/// A message's header (`struct msghdr`).
struct Message {
    name: u64,
    name_len: u64,
    vector: u64,
    count: u64,
    control: u64,
    control_len: u64,
}

fn message_in(process: &Process, at: u64) -> SyscallResult<Message> {
    let word = |offset: u64| word_in(process, at.wrapping_add(offset));
    let count = word(24)?;
    if count > PIECES {
        return Err(Errno::MSGSIZE.into());
    }
    Ok(Message {
        name: word(0)?,
        name_len: word(8)? & u64::from(u32::MAX),
        vector: word(16)?,
        count,
        control: word(32)?,
        control_len: word(40)?,
    })
}

/// Control data that a message is sent with.
#[derive(Default)]
struct GivenControl {
    /// Descriptors.
    rights: Vec<u64>,
    /// The credentials of the sender: process, user and group.
    credentials: Option<[u32; 3]>,
    /// Hop limit and class of a datagram.
    packet: [Option<u8>; 2],
}

/// A number between `least` and 255 in the data of a control message; `None` for -1, the socket's
/// own value.
fn small_number(data: &[u8], least: i32) -> Result<Option<u8>, Errno> {
    let value = match *data {
        [byte] => i32::from(byte),
        [a, b, c, d, ..] => i32::from_le_bytes([a, b, c, d]),
        _ => return Err(Errno::INVAL),
    };
    match u8::try_from(value) {
        Ok(byte) if value >= least => Ok(Some(byte)),
        _ if value == -1 && least < 0 => Ok(None),
        _ => Err(Errno::INVAL),
    }
}

fn control_in(process: &Process, message: &Message) -> SyscallResult<GivenControl> {
    let mut given = GivenControl::default();
    if message.control == 0 || message.control_len == 0 {
        return Ok(given);
    }
    if message.control_len > CONTROL {
        return Err(Errno::NOBUFS.into());
    }
    let bytes = copy_in(process, message.control, message.control_len as usize)?;
    let mut at = 0;
    while bytes.len() - at >= HEADER {
        let int = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]));
        let len = u64::from(int(at)) | u64::from(int(at + 4)) << 32;
        let len = usize::try_from(len).ok().filter(|len| (HEADER..=bytes.len() - at).contains(len));
        let len = len.ok_or(Errno::INVAL)?;
        let data = at + HEADER;
        match (int(at + 8) as i32, int(at + 12) as i32) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let list = bytes[data..at + len].chunks_exact(4);
                given
                    .rights
                    .extend(list.map(|n| u64::from(u32::from_le_bytes([n[0], n[1], n[2], n[3]]))));
            }
            (libc::SOL_SOCKET, SCM_CREDENTIALS) if len == HEADER + 12 => {
                given.credentials = Some([int(data), int(data + 4), int(data + 8)]);
            }
            (libc::IPPROTO_IP, libc::IP_TTL) => {
                given.packet[0] = small_number(&bytes[data..at + len], 1)?;
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                given.packet[1] = small_number(&bytes[data..at + len], 0)?;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                given.packet[0] = small_number(&bytes[data..at + len], -1)?;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                given.packet[1] = small_number(&bytes[data..at + len], -1)?;
            }
            _ => return Err(Errno::INVAL.into()),
        }
        at = (at + len.next_multiple_of(8)).min(bytes.len());
    }
    Ok(given)
}

/// Adds a control message to those in `room` bytes; returns whether it had to be truncated.
fn put_control(control: &mut Vec<u8>, room: usize, (level, kind): (i32, i32), data: &[u8]) -> bool {
    let left = room - control.len();
    if left < HEADER {
        return true;
    }
    let len = (HEADER + data.len()).min(left);
    let header = StructBuilder::default().word(len as u64).int(level as u32).int(kind as u32);
    control.extend(header.0);
    control.extend(&data[..len - HEADER]);
    let end = control.len() + (len.next_multiple_of(8) - len).min(left - len);
    control.resize(end, 0);
    len < HEADER + data.len()
}

impl Sentry {
    /// `recvfrom(2)`: there are no urgent data and no queued errors: `MSG_OOB` is `EINVAL`, and
    /// `MSG_ERRQUEUE` is `EAGAIN`. One call receives at most 8 MiB.
    pub(in crate::sentry) fn sys_recvfrom(
        &mut self,
        process: &mut Process,
        &[fd, buf, len, flags, src_addr, addrlen]: &[u64; 6],
    ) -> SyscallResult {
        self.socket_of(fd)?;
        let len = len.min(MAX_TRANSFER);
        let (outcome, came) = self.receive_into(process, fd, &[(buf, len)], flags)?;
        if let Some(parcel) = came.parcel.filter(|_| !came.stays) {
            self.change().drop_parcel(parcel);
        }
        if matches!(outcome, SyscallControl::Value(_)) && src_addr != 0 {
            let from = self.sender_address(fd, came.from.unwrap_or_default())?;
            crate::sentry::syscalls::socket::address_out(process, &from, src_addr, addrlen)?;
        }
        Ok(outcome)
    }

    fn receive_into(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        flags: u64,
    ) -> SyscallResult<(SyscallControl, ReceivedMessage)> {
        // There is nothing out of band.
        if flags as i32 & libc::MSG_OOB != 0 {
            return Err(Errno::INVAL.into());
        }
        // Nor are errors queued.
        if flags as i32 & libc::MSG_ERRQUEUE != 0 {
            return Err(Errno::AGAIN.into());
        }
        let stays = flags as i32 & libc::MSG_PEEK != 0;
        if pieces.iter().all(|(_, len)| *len == 0)
            && let Some(received) = self.receive_nothing(descriptor, stays, flags)?
        {
            return Ok(received);
        }
        if flags as i32 & libc::MSG_WAITALL != 0 && !stays && self.is_stream(descriptor)? {
            return self.receive_all(process, descriptor, pieces, flags);
        }
        if flags as i32 & libc::MSG_TRUNC != 0
            && let Some(dropped) = self.drop_received(descriptor, pieces, stays)?
        {
            return Ok((SyscallControl::Value(dropped), ReceivedMessage::default()));
        }
        let (outcome, came) = self.take_with(process, descriptor, pieces, stays)?;
        match (outcome, came.whole) {
            (SyscallControl::Wait(_), _) if flags as i32 & libc::MSG_DONTWAIT != 0 => {
                Err(Errno::AGAIN.into())
            }
            (SyscallControl::Value(_), Some(whole)) if flags as i32 & libc::MSG_TRUNC != 0 => {
                Ok((SyscallControl::Value(whole), came))
            }
            (outcome, _) => Ok((outcome, came)),
        }
    }

    /// A receive without room for bytes: it waits for some, and takes the descriptors that come
    /// with the first of them; `None` for sockets of datagrams and packets.
    fn receive_nothing(
        &mut self,
        descriptor: u64,
        stays: bool,
        flags: u64,
    ) -> SyscallResult<Option<(SyscallControl, ReceivedMessage)>> {
        let socket = self.socket_of(descriptor)?;
        let SocketState::Connected { incoming: Some(incoming), .. } = socket.stage else {
            return Ok(None);
        };
        if socket.packets {
            return Ok(None);
        }
        let held = self.state.channels.get(incoming).ok_or(Errno::IO)?;
        let nothing = ReceivedMessage::default();
        if held.is_empty() {
            if held.reset {
                return Err(self.take_reset(incoming).into());
            }
            if held.has_ended() {
                return Ok(Some((SyscallControl::Value(0), nothing)));
            }
            if flags as i32 & libc::MSG_DONTWAIT != 0 {
                return Err(Errno::AGAIN.into());
            }
            return Ok(Some((self.wait_for(descriptor, IN, 0)?, nothing)));
        }
        let (parcel, sender) = (held.parcel(0), held.sender());
        if !stays && let Some(channel) = self.change().channels.get_mut(incoming) {
            let _ = channel.skip(0);
        }
        let came = ReceivedMessage { parcel, stays, sender, ..nothing };
        Ok(Some((SyscallControl::Value(0), came)))
    }

    /// Drops received bytes of TCP, as many as `pieces` have room for (`MSG_TRUNC`), unless they
    /// stay; `None` where there are none, or for another socket.
    fn drop_received(
        &mut self,
        descriptor: u64,
        pieces: &[(u64, u64)],
        stays: bool,
    ) -> SyscallResult<Option<u64>> {
        let socket = self.socket_of(descriptor)?;
        let SocketState::Connected { incoming: Some(incoming), .. } = socket.stage else {
            return Ok(None);
        };
        let wanted = pieces.iter().map(|(_, len)| len).sum::<u64>() as usize;
        if !socket.own.is_internet() || wanted == 0 {
            return Ok(None);
        }
        let held = self.state.channels.get(incoming).ok_or(Errno::IO)?;
        let len = held.len().min(wanted);
        if len == 0 {
            return Ok(None);
        }
        if !stays && let Some(channel) = self.change().channels.get_mut(incoming) {
            // An IP connection carries no descriptors.
            let _ = channel.skip(len);
        }
        Ok(Some(len as u64))
    }

    /// The credentials of the sender, if the socket asks for them. Bytes without credentials have
    /// user and group 65534.
    fn credentials(
        &self,
        descriptor: u64,
        sender: Option<PeerCredentials>,
    ) -> SyscallResult<Option<Vec<u8>>> {
        let socket = self.socket_of(descriptor)?;
        if !socket.is_local() || !socket.options.is_on(libc::SOL_SOCKET, libc::SO_PASSCRED) {
            return Ok(None);
        }
        let [user, group] = match sender {
            Some(sender) => self.state.seen_owner(sender.user),
            None => [OVERFLOW_ID; 2],
        };
        let credentials =
            StructBuilder::default().int(sender.unwrap_or_default().process).int(user).int(group);
        Ok(Some(credentials.0))
    }

    /// Whether a socket is a byte stream.
    fn is_stream(&self, descriptor: u64) -> SyscallResult<bool> {
        let socket = self.socket_of(descriptor)?;
        Ok(matches!(socket.stage, SocketState::Connected { .. }) && !socket.packets)
    }

    /// Receives until all pieces are full or no more can come (`MSG_WAITALL`). A message with
    /// descriptors ends it.
    fn receive_all(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        flags: u64,
    ) -> SyscallResult<(SyscallControl, ReceivedMessage)> {
        let wanted: u64 = pieces.iter().map(|(_, len)| len).sum();
        let mut done = self.resumed_bytes();
        let reply = |done| Ok((SyscallControl::Value(done), ReceivedMessage::default()));
        while done < wanted {
            let mut skipped = done;
            let rest = pieces.iter().filter_map(|&(to, len)| {
                let cut = skipped.min(len);
                skipped -= cut;
                (cut < len).then_some((to.wrapping_add(cut), len - cut))
            });
            let rest: Vec<_> = rest.collect();
            match self.take_with(process, descriptor, &rest, false) {
                Ok((SyscallControl::Value(0), _)) => break,
                Ok((SyscallControl::Value(len), came)) if came.parcel.is_some() => {
                    return Ok((SyscallControl::Value(done + len), came));
                }
                Ok((SyscallControl::Value(len), _)) => done += len,
                Ok((SyscallControl::Wait(_), _)) if flags as i32 & libc::MSG_DONTWAIT != 0 => {
                    return if done > 0 { reply(done) } else { Err(Errno::AGAIN.into()) };
                }
                Ok((SyscallControl::Wait(wait), came)) => {
                    return Ok((SyscallControl::Wait(Wait { done, ..wait }), came));
                }
                Err(SyscallError::Errno(_)) if done > 0 => break,
                other => return other,
            }
        }
        reply(done)
    }

    /// `recvmsg(2)`: as `recvfrom`.
    pub(in crate::sentry) fn sys_recvmsg(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        at: u64,
        flags: u64,
    ) -> SyscallResult {
        self.socket_of(descriptor)?;
        let message = message_in(process, at)?;
        let pieces = pieces(process, message.vector, message.count)?;
        let (outcome, came) = self.receive_into(process, descriptor, &pieces, flags)?;
        if !matches!(outcome, SyscallControl::Value(_)) {
            return Ok(outcome);
        }
        let mut received_flags = flags as i32 & libc::MSG_CMSG_CLOEXEC;
        if came.whole.is_some() {
            received_flags |= libc::MSG_TRUNC;
        }
        let room = if message.control == 0 { 0 } else { message.control_len.min(CONTROL) as usize };
        let (mut control, mut received) = (Vec::new(), Vec::new());
        if let Some(credentials) = self.credentials(descriptor, came.sender)? {
            let kind = (libc::SOL_SOCKET, SCM_CREDENTIALS);
            if put_control(&mut control, room, kind, &credentials) {
                received_flags |= libc::MSG_CTRUNC;
            }
        }
        for (kind, data) in self.packet_info(descriptor, &came)? {
            if put_control(&mut control, room, kind, &data) {
                received_flags |= libc::MSG_CTRUNC;
            }
        }
        if let Some(parcel) = came.parcel {
            let close = flags as i32 & libc::MSG_CMSG_CLOEXEC != 0;
            let most = (room - control.len()).saturating_sub(HEADER) / 4;
            let state = self.change();
            let (numbers, cut) = match came.stays {
                true => state.table.peek_parcel(parcel, most, close),
                false => {
                    let (numbers, gone, cut) = state.table.unpack(parcel, most, close);
                    gone.into_iter().for_each(|gone| state.forget(Some(gone)));
                    (numbers, cut)
                }
            };
            if cut {
                received_flags |= libc::MSG_CTRUNC;
            }
            if !numbers.is_empty() {
                let data: Vec<u8> =
                    numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                put_control(&mut control, room, (libc::SOL_SOCKET, libc::SCM_RIGHTS), &data);
            }
            received = numbers;
        }
        match copy_out(process, message.control, &control) {
            Err(SyscallError::Errno(_)) => {
                // Descriptors that the receiver knows nothing of are closed.
                for number in received {
                    self.sys_close(number.into())?;
                }
                received_flags |= libc::MSG_CTRUNC;
                control.clear();
            }
            copied => copied?,
        }
        copy_out(process, at.wrapping_add(40), &(control.len() as u64).to_le_bytes())?;
        copy_out(process, at.wrapping_add(48), &received_flags.to_le_bytes())?;
        let mut from = came.from.unwrap_or_default().0;
        if message.name != 0 {
            from = self.sender_address(descriptor, Address(from))?.0;
            let len = from.len().min(message.name_len as usize);
            copy_out(process, message.name, &from[..len])?;
        }
        copy_out(process, at.wrapping_add(8), &(from.len() as u32).to_le_bytes())?;
        Ok(outcome)
    }

    /// `sendto(2)`: there are no urgent data: `MSG_OOB` sends ordinary bytes, and for datagrams it
    /// is `EOPNOTSUPP`. One call sends at most 8 MiB.
    pub(in crate::sentry) fn sys_sendto(
        &mut self,
        process: &Process,
        &[fd, buf, len, flags, dest_addr, addrlen]: &[u64; 6],
    ) -> SyscallResult {
        self.socket_of(fd)?;
        let written = self.stream_write(process, fd, &[(buf, len.min(MAX_TRANSFER))])?;
        let to = self.address_to(process, fd, dest_addr, addrlen)?;
        self.send_bytes(fd, &written, flags, to, SentControl::default())
    }

    /// Where a message goes, where that is said, and means something.
    fn address_to(
        &self,
        process: &Process,
        descriptor: u64,
        at: u64,
        len: u64,
    ) -> SyscallResult<Option<Address>> {
        if at == 0 || len == 0 {
            return Ok(None);
        }
        let socket = self.socket_of(descriptor)?;
        match socket.stage {
            SocketState::Datagrams { .. } => {}
            SocketState::Connected { .. } if socket.is_local() && !socket.packets => {
                return Err(Errno::ISCONN.into());
            }
            _ if socket.is_local() && !socket.packets => return Err(Errno::OPNOTSUPP.into()),
            // A connection goes where it goes.
            _ => return Ok(None),
        }
        if socket.is_local() && len > MAX_ADDRESS as u64 {
            return Err(Errno::INVAL.into());
        }
        Ok(Some(crate::sentry::syscalls::socket::address_in(process, at, len)?))
    }

    /// `sendmsg(2)`: as `sendto`. Control data are descriptors, credentials, and hop limit and
    /// class of a datagram. Others are `EINVAL`.
    pub(in crate::sentry) fn sys_sendmsg(
        &mut self,
        process: &Process,
        descriptor: u64,
        at: u64,
        flags: u64,
    ) -> SyscallResult {
        let family = self.socket_of(descriptor)?.family;
        let message = message_in(process, at)?;
        let pieces = pieces(process, message.vector, message.count)?;
        let written = self.stream_write(process, descriptor, &pieces)?;
        let given = control_in(process, &message)?;
        if !given.rights.is_empty() && i32::from(family) != libc::AF_UNIX {
            return Err(Errno::INVAL.into());
        }
        for number in &given.rights {
            self.state.table.get(*number)?;
        }
        let own = self.state.processes.current_id();
        let ids = self.state.seen_ids(own);
        if given.credentials.is_some_and(|[process, user, group]| {
            process != own || !ids.user.contains(&user) || !ids.group.contains(&group)
        }) {
            // Others may be named with privileges alone.
            return Err(Errno::PERM.into());
        }
        let to = self.address_to(process, descriptor, message.name, message.name_len)?;
        let GivenControl { rights, credentials, packet } = &given;
        let named = credentials.is_some();
        let control = SentControl { rights, named, more: false, packet: *packet };
        self.send_bytes(descriptor, &written, flags, to, control)
    }

    fn send_bytes(
        &mut self,
        descriptor: u64,
        written: &StreamWrite<'_>,
        flags: u64,
        to: Option<Address>,
        control: SentControl<'_>,
    ) -> SyscallResult {
        let bytes = &written.bytes[..];
        let quiet = flags as i32 & libc::MSG_NOSIGNAL != 0;
        if i32::from(self.socket_of(descriptor)?.family) == NETLINK {
            return self.ask_netlink(descriptor, bytes);
        }
        if flags as i32 & libc::MSG_OOB != 0
            && matches!(self.socket_of(descriptor)?.stage, SocketState::Datagrams { .. })
        {
            return Err(Errno::OPNOTSUPP.into());
        }
        let outcome = match &self.state.table.get(descriptor)?.open {
            FileObject::Socket(socket) if matches!(socket.stage, SocketState::Datagrams { .. }) => {
                let more = flags as i32 & libc::MSG_MORE != 0;
                match self.cork(descriptor, bytes, more)? {
                    Some(_) if more => SyscallControl::Value(bytes.len() as u64),
                    Some(whole) => match self.post_letter(descriptor, &whole, to, control)? {
                        SyscallControl::Value(_) => SyscallControl::Value(bytes.len() as u64),
                        other => other,
                    },
                    None => self.post_letter(descriptor, bytes, to, control)?,
                }
            }
            _ => {
                let control = SentControl { more: flags as i32 & libc::MSG_MORE != 0, ..control };
                self.pour_with(descriptor, written, quiet, control)?
            }
        };
        match outcome {
            SyscallControl::Wait(wait) if flags as i32 & libc::MSG_DONTWAIT != 0 => match wait.done
            {
                0 => Err(Errno::AGAIN.into()),
                done => Ok(SyscallControl::Value(done)),
            },
            outcome => Ok(outcome),
        }
    }
}
