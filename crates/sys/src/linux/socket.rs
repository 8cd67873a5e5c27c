//! Unix sockets: functions that the standard library lacks.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, chmodat, chownat, fchmod, fcntl_getfl,
    fcntl_setfl, fstat, open,
};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, bind, connect as connect_to, listen as listen_on, recvmsg, sendmsg, shutdown,
    socket_with,
};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::poll;
use crate::{Call, SysError, inject};

/// Maximum time of one wait of [`send_within`] before its limit is checked again.
const SEND_TICK: Duration = Duration::from_millis(50);

fn failed(call: Call) -> impl Fn(Errno) -> SysError {
    move |errno| SysError::new(call, errno.raw_os_error())
}

/// The users that may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// The owner of the name, if it is to be another user.
    pub user: Option<u32>,
    /// Its group, if it is to be another one.
    pub group: Option<u32>,
    /// Permissions: connecting takes the right to write.
    pub mode: u32,
}

impl Default for SocketAccess {
    /// This user alone.
    fn default() -> Self {
        Self { user: None, group: None, mode: 0o600 }
    }
}

/// A listening socket at `path` with the given access from its first moment. At most `backlog`
/// connections wait to be accepted.
///
/// # Errors
/// Any error of the kernel; `EADDRINUSE` if the name exists, `EPERM` without the right to give a
/// file away. The name does not exist then.
pub fn listen(path: &Path, backlog: i32, access: SocketAccess) -> Result<UnixListener, SysError> {
    inject::gate(Call::Socket)?;
    let make = || {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Before it has a name: the name takes this mode, and is never open to others.
        fchmod(&socket, Mode::from_raw_mode(access.mode & 0o777))?;
        bind(&socket, &address)?;
        if let Err(error) = give_away(path, access).and_then(|()| listen_on(&socket, backlog)) {
            // It can only be left behind, as a socket without a listener.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(socket)
    };
    make().map(UnixListener::from).map_err(failed(Call::Socket))
}

/// Whether a process listens at the Unix socket `path`. Never waits, also where the queue of that
/// process is full.
///
/// # Errors
/// Any error of the kernel but `ECONNREFUSED`.
pub fn has_listener(path: &Path) -> Result<bool, SysError> {
    inject::gate(Call::Socket)?;
    let look = || {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect_to(&socket, &address) {
            // With a full queue a blocking call would wait for the listener.
            Ok(()) | Err(Errno::AGAIN) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(error) => Err(error),
        }
    };
    look().map_err(failed(Call::Socket))
}

/// A connection to the Unix socket `path`, whose sends wait for `timeout` at most.
///
/// # Errors
/// Any error of the kernel; `EAGAIN` where the queue of the listener is full.
pub fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, SysError> {
    inject::gate(Call::Socket)?;
    let io = |error: io::Error| SysError::new(Call::Socket, error.raw_os_error().unwrap_or(0));
    let open = || {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A blocking call would wait for a listener with a full queue.
        connect_to(&socket, &address)?;
        Ok(UnixStream::from(socket))
    };
    let stream = open().map_err(failed(Call::Socket))?;
    stream.set_nonblocking(false).map_err(io)?;
    stream.set_write_timeout(Some(timeout)).map_err(io)?;
    Ok(stream)
}

/// A descriptor that names the directory `path`, for another process. It allows neither reading
/// nor writing by itself.
///
/// # Errors
/// Any error of the kernel.
pub fn directory(path: &Path) -> Result<OwnedFd, SysError> {
    inject::gate(Call::Reopen)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map_err(failed(Call::Reopen))
}

/// Gives the socket at `path` the mode of `access`, then its user and group. The mask for new files
/// has removed a part of the mode.
fn give_away(path: &Path, access: SocketAccess) -> Result<(), Errno> {
    if access == SocketAccess::default() {
        return Ok(());
    }
    // The directory can be the new owner's already, who could put another file there: only a socket
    // is given away.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = open(path, flags, Mode::empty())?;
    let stat = fstat(&name)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || stat.st_nlink != 1 {
        return Err(Errno::NOTSOCK);
    }
    let link = format!("/proc/self/fd/{}", name.as_raw_fd());
    chmodat(CWD, link, Mode::from_raw_mode(access.mode & 0o777), AtFlags::empty())?;
    chownat(
        &name,
        "",
        access.user.map(Uid::from_raw),
        access.group.map(Gid::from_raw),
        AtFlags::EMPTY_PATH,
    )
}

/// The listening Unix sockets that a service manager has passed to this process (`LISTEN_FDS`),
/// with their names (`LISTEN_FDNAMES`). The second call returns none.
///
/// # Errors
/// A descriptor that is no listening Unix stream socket.
pub fn activated() -> io::Result<Vec<(String, UnixListener)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    /// The first descriptor that is passed.
    const FIRST: i32 = 3;
    /// A service has no more sockets than this.
    const MAX_SOCKETS: i32 = 64;
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    // The variables of a parent that passed its sockets on to no child.
    if number("LISTEN_PID") != Some(std::process::id()) || TAKEN.swap(true, Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").and_then(|count| i32::try_from(count).ok()).unwrap_or(0);
    if count > MAX_SOCKETS {
        return Err(io::Error::other(format!(
            "LISTEN_FDS is {count}, and {MAX_SOCKETS} are taken"
        )));
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut sockets = Vec::new();
    for fd in FIRST..FIRST + count {
        let name = names.next().unwrap_or_default().to_owned();
        std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).map_err(|_| {
            io::Error::other(format!("LISTEN_FDS is {count}, and descriptor {fd} is not open"))
        })?;
        // SAFETY: it is open. The service manager opened it for this process and no other code has
        // taken it: the call of it that comes this far is the only one.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let wrong = |why: &dyn std::fmt::Display| {
            let fd = FIRST as usize + sockets.len();
            let text = format!(
                "descriptor {fd} ({name}) of LISTEN_FDS: {why}: use ListenStream= with a path"
            );
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        // Children do not get it.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| wrong(&error))?;
        let listens =
            rustix::net::sockopt::socket_acceptconn(&fd).map_err(|error| wrong(&error))?;
        let socket = UnixListener::from(fd);
        socket.local_addr().map_err(|error| wrong(&error))?;
        if !listens {
            return Err(wrong(&"it does not listen"));
        }
        socket.set_nonblocking(false)?;
        sockets.push((name, socket));
    }
    Ok(sockets)
}

/// Receives available bytes into `buffer`, and up to four descriptors to the end of `fds`; returns
/// the number of bytes. 0 bytes mean that the other side has ended.
///
/// # Errors
/// Any error of `recvmsg`; `EAGAIN` once the stream's time limit is over; `EMFILE` where this
/// process has no room for the descriptors that came, which are lost then unless they stay in the
/// stream.
pub fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, SysError> {
    receive_with(stream, buffer, fds, RecvFlags::empty())
}

/// As [`receive`], but everything stays in the stream, with its descriptors: `fds` gets copies.
/// Bytes after those that brought a descriptor are not seen.
///
/// # Errors
/// As [`receive`].
pub fn peek(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, SysError> {
    receive_with(stream, buffer, fds, RecvFlags::PEEK)
}

/// Descriptors that one message has at most.
const MAX_RIGHTS: usize = 4;

fn receive_with(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> Result<usize, SysError> {
    inject::gate(Call::Receive)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RIGHTS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut vector = [IoSliceMut::new(buffer)];
    let received = loop {
        match recvmsg(stream, &mut vector, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other.map_err(failed(Call::Receive))?,
        }
    };
    let before = fds.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    // The kernel drops descriptors for which this process has no room.
    if received.flags.contains(ReturnFlags::CTRUNC) && fds.len() - before < MAX_RIGHTS {
        return Err(SysError::new(Call::Receive, libc::EMFILE));
    }
    Ok(received.bytes)
}

/// Sends `bytes` with up to four descriptors. The other side gets the descriptors with the first
/// byte.
///
/// # Errors
/// Any error of `sendmsg`: `EPIPE` where the other side has ended.
pub fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SysError> {
    inject::gate(Call::Send)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(SysError::invalid(Call::Send));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = [IoSlice::new(&bytes[sent..])];
        match sendmsg(stream, &rest, &mut control, SendFlags::NOSIGNAL) {
            Ok(some) => {
                sent += some;
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(Call::Send)(error)),
        }
    }
    Ok(())
}

/// Sends all of `bytes` on a stream socket within `limit`. The limit is that of the whole: a peer
/// that reads a byte at a time would meet any limit of a single write.
///
/// # Errors
/// `ETIMEDOUT` after the `limit`, and any error of `send` or `poll`.
pub fn send_within(stream: BorrowedFd<'_>, bytes: &[u8], limit: Duration) -> Result<(), SysError> {
    inject::gate(Call::Send)?;
    let started = Instant::now();
    let mut rest = bytes;
    while !rest.is_empty() {
        if started.elapsed() > limit {
            return Err(SysError::new(Call::Send, libc::ETIMEDOUT));
        }
        match rustix::net::send(stream, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => rest = &rest[sent..],
            Err(Errno::AGAIN) => poll::writable(stream, SEND_TICK)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(Call::Send)(error)),
        }
    }
    Ok(())
}

/// Has a listening socket refuse new connections. Those that wait can still be accepted; when none
/// is left, `accept` fails.
///
/// # Errors
/// Any error of `shutdown`.
pub fn refuse_connections(listener: &UnixListener) -> Result<(), SysError> {
    inject::gate(Call::Socket)?;
    shutdown(listener, Shutdown::Read).map_err(failed(Call::Socket))
}

/// Makes reading of `fd` return where it would wait.
///
/// # Errors
/// Any error of `fcntl`.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), SysError> {
    inject::gate(Call::Socket)?;
    fcntl_getfl(fd)
        .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
        .map_err(failed(Call::Socket))
}

/// A descriptor of the process that connected `stream`, from the socket itself.
fn peer_pidfd(stream: &UnixStream) -> Result<OwnedFd, SysError> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let (mut fd, mut len) = (-1, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the option is a descriptor, with the stated size.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if got != 0 {
        return Err(SysError::last(Call::Process));
    }
    // SAFETY: the kernel has just opened it for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The user of the process at the other end of `stream`, when it connected or began to listen.
///
/// # Errors
/// The kernel's error.
pub fn peer_user(stream: &UnixStream) -> Result<u32, SysError> {
    inject::gate(Call::Process)?;
    socket_peercred(stream).map(|peer| peer.uid.as_raw()).map_err(failed(Call::Process))
}

/// The user that stands for all users without a number in the user namespace of this process.
#[must_use]
pub fn overflow_user() -> u32 {
    /// `DEFAULT_OVERFLOWUID` of the kernel.
    const DEFAULT: u32 = 65534;
    let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT)
}

/// The effective user of this process.
#[must_use]
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Another process, even if its PID is reused after its end.
#[derive(Debug)]
pub struct Peer(OwnedFd);

impl Peer {
    /// The process that connected `stream`. Before Linux 6.5 it is looked up by its number, which
    /// another process can have by then.
    ///
    /// # Errors
    /// The kernel's error; `ESRCH` where it has ended.
    pub fn of(stream: &UnixStream) -> Result<Self, SysError> {
        inject::gate(Call::Process)?;
        match peer_pidfd(stream) {
            Err(error) if error.errno == libc::ENOPROTOOPT => socket_peercred(stream)
                .and_then(|peer| pidfd_open(peer.pid, PidfdFlags::empty()))
                .map(Self)
                .map_err(failed(Call::Process)),
            other => other.map(Self),
        }
    }

    /// Ends it: by SIGBUS, as touching missing memory would. Handlers may let one pass, as the one
    /// does that Rust programs start with, so it comes again, and then SIGKILL.
    pub fn end(&self) {
        for signal in [Signal::BUS, Signal::BUS, Signal::BUS, Signal::KILL] {
            if pidfd_send_signal(&self.0, signal).is_err() {
                return;
            }
            if matches!(poll::readable([self.as_fd()], Duration::from_millis(100)), Ok([true])) {
                return;
            }
        }
    }
}

impl From<OwnedFd> for Peer {
    /// The process of a `pidfd`.
    fn from(pidfd: OwnedFd) -> Self {
        Self(pidfd)
    }
}

impl AsFd for Peer {
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_peer_that_reads_byte_by_byte_does_not_extend_the_limit() {
        let (server, mut client) = UnixStream::pair().unwrap();
        let bytes = vec![b'a'; 16 << 20];
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) && matches!(client.read(&mut [0]), Ok(1)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let result = send_within(server.as_fd(), &bytes, Duration::from_millis(300));
            over.store(true, Ordering::Release);
            drop(server);
            assert_eq!(result.unwrap_err().errno, libc::ETIMEDOUT);
        });
    }

    #[test]
    fn more_bytes_than_the_buffers_hold_are_sent_whole() {
        let (server, mut client) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 4096) as u8).collect();
        let received = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut read = Vec::new();
                client.read_to_end(&mut read).map(|_| read)
            });
            send_within(server.as_fd(), &bytes, Duration::from_secs(60)).unwrap();
            drop(server);
            reader.join().unwrap()
        });
        assert!(received.unwrap() == bytes);
    }

    #[test]
    fn a_peer_is_the_process_that_connected_also_after_its_end() {
        let path = std::env::temp_dir().join(format!("afresh-peer-{}", std::process::id()));
        let listener = listen(&path, 1, SocketAccess::default()).unwrap();
        let address = path.clone();
        // SAFETY: the child connects, which allocates at most, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let connected = UnixStream::connect(address).is_ok();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!connected)) };
        }
        let stream = listener.accept().unwrap().0;
        let before = Peer::of(&stream);
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        for peer in [before, Peer::of(&stream)].into_iter().flatten() {
            assert_eq!(poll::readable([peer.as_fd()], Duration::from_secs(10)).unwrap(), [true]);
        }
        std::fs::remove_file(path).unwrap();
    }

    /// A process with this PID, which is free. `None` where this process may not choose PIDs.
    fn process_with(pid: libc::pid_t) -> Option<OwnedFd> {
        let mut pidfd: libc::c_int = -1;
        let chosen = [pid];
        // SAFETY: all zeroes are a valid value of the plain structure.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = libc::CLONE_PIDFD as u64;
        args.pidfd = (&raw mut pidfd).expose_provenance() as u64;
        args.exit_signal = libc::SIGCHLD as u64;
        args.set_tid = chosen.as_ptr().expose_provenance() as u64;
        args.set_tid_size = 1;
        // SAFETY: the structure and its targets live through the call. The child has a copy of all
        // memory, and only waits for a signal.
        let made = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
        if made == 0 {
            loop {
                // SAFETY: the call takes nothing.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: the kernel has just opened it for this process.
        (made == i64::from(pid)).then(|| unsafe { OwnedFd::from_raw_fd(pidfd) })
    }

    #[test]
    fn a_process_with_the_pid_of_a_peer_that_has_ended_is_not_the_peer() {
        let path = std::env::temp_dir().join(format!("afresh-reused-{}", std::process::id()));
        let listener = listen(&path, 1, SocketAccess::default()).unwrap();
        let connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";
        let child = std::process::Command::new("python3").args(["-c", connect]).arg(&path).spawn();
        let Ok(mut child) = child else { return println!("SKIPPED: no python3") };
        let stream = listener.accept().unwrap().0;
        std::fs::remove_file(path).unwrap();
        assert!(child.wait().unwrap().success());
        let Some(other) = process_with(child.id().cast_signed()) else {
            return println!("SKIPPED: this host lets this process choose no PIDs");
        };
        let has_ended = |process: BorrowedFd<'_>| {
            poll::readable([process], Duration::from_millis(10)).unwrap() == [true]
        };
        let by_number = peer_pidfd(&stream).is_err_and(|error| error.errno == libc::ENOPROTOOPT);
        if by_number {
            println!("SKIPPED: before Linux 6.5 a peer is looked up by its PID");
        } else if let Ok(peer) = Peer::of(&stream) {
            assert!(has_ended(peer.as_fd()), "the other process counts as the peer");
            peer.end();
        }
        assert!(!has_ended(other.as_fd()) || by_number);
        pidfd_send_signal(&other, Signal::KILL).unwrap();
        // SAFETY: waits for the child, and takes no status.
        unsafe { libc::waitpid(child.id().cast_signed(), std::ptr::null_mut(), 0) };
        assert!(has_ended(other.as_fd()));
    }
}
