//! The socket that VMMs connect to.
//!
//! Promises: only users whom [`SocketAccess`] allows it can connect, from the first moment (mode
//! 0600 by default); a file that is not a dead socket is never removed; the socket is removed when
//! the listener goes.
//!
//! May break it: two listeners that are made for the same dead socket at the same instant; one of
//! them is then never connected to.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_sys::socket::{self, SocketAccess};
use afresh_sys::{SysError, fork, poll};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// Maximum time before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);
/// Attempts, one a tick, to find a socket without its listener.
const MAX_LOOKS: usize = 20;

/// A socket could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Something else has that name.
    #[error("{0} exists and is not a socket: choose another path, or remove it")]
    NotASocket(PathBuf),
    /// Somebody listens there.
    #[error("{0}: another process listens on this socket: choose another path, or end that one")]
    InUse(PathBuf),
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The socket could not be made.
    #[error("{path}: {source}")]
    Sys {
        /// Where it was to be.
        path: PathBuf,
        /// The call that failed.
        source: SysError,
    },
}

/// A Unix socket that VMMs connect to. Dropping it removes the socket.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode, so that only what was made is removed.
    made: Option<(u64, u64)>,
    /// A directory that was made for it.
    directory: Option<PathBuf>,
    /// The process that made it. A child of a fork leaves its parent's socket alone.
    generation: u32,
}

impl Listener {
    /// Listens at `path` for this user, where nothing may be except a socket without a listener.
    ///
    /// # Errors
    /// [`ListenError`] by cause; nothing was removed then but a dead socket.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        Self::bind_for(path, SocketAccess::default())
    }

    /// As [`Listener::bind`], for the users that `access` names.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_for(path: &Path, access: SocketAccess) -> Result<Self, ListenError> {
        let io = |source| ListenError::Io { path: path.to_owned(), source };
        remove_dead(path)?;
        let socket = socket::listen(path, BACKLOG, access)
            .map_err(|source| ListenError::Sys { path: path.to_owned(), source })?;
        let generation = fork::generation();
        let mut listener =
            Self { socket, path: path.to_owned(), made: None, directory: None, generation };
        let meta = fs::symlink_metadata(path).map_err(io)?;
        listener.made = Some((meta.dev(), meta.ino()));
        Ok(listener)
    }

    /// As [`Listener::bind_for`]. A directory that is missing is made, for the owner of the socket
    /// alone, and removed with the socket unless something else is in it by then.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_in_directory(path: &Path, access: SocketAccess) -> Result<Self, ListenError> {
        let io = |source| ListenError::Io { path: path.to_owned(), source };
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let made = match directory {
            Some(directory) => match fs::DirBuilder::new().mode(0o700).create(directory) {
                Ok(()) => Some(directory),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                Err(error) => return Err(io(error)),
            },
            None => None,
        };
        // The socket comes first: until then the directory is this user's alone.
        let bound = Self::bind_for(path, access).and_then(|mut listener| {
            if let Some(directory) = made {
                listener.directory = Some(directory.to_owned());
                lchown(directory, access.user, access.group).map_err(io)?;
            }
            Ok(listener)
        });
        if let (Err(_), Some(directory)) = (&bound, made) {
            // It can only be left behind, empty.
            let _ = fs::remove_dir(directory);
        }
        bound
    }

    /// A socket that listens already. It is not removed in the end.
    ///
    /// # Errors
    /// An error of `getsockname`.
    pub fn of_socket(socket: UnixListener) -> io::Result<Self> {
        let path = socket.local_addr()?.as_pathname().unwrap_or(Path::new("")).to_owned();
        let generation = fork::generation();
        Ok(Self { socket, path, made: None, directory: None, generation })
    }

    /// Where it listens; empty for a socket without a path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket.
    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// Whether the socket was made here; another belongs to a service manager.
    pub(super) fn is_own(&self) -> bool {
        self.made.is_some()
    }

    /// Whether a VMM has connected, or does so within `timeout`.
    ///
    /// # Errors
    /// An error of `poll`.
    pub(super) fn is_ready(&self, timeout: Duration) -> io::Result<bool> {
        let ready = poll::readable([self.socket.as_fd()], timeout).map_err(io::Error::other)?;
        Ok(ready == [true])
    }

    /// The next VMM that connects, or `None` after `timeout`.
    ///
    /// # Errors
    /// An error of `poll` or `accept`.
    pub fn accept_within(&self, timeout: Duration) -> io::Result<Option<UnixStream>> {
        if !self.is_ready(timeout)? {
            return Ok(None);
        }
        match self.socket.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            // Another process with this socket was faster.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next VMM that connects, or `None` once `stop` is set.
    ///
    /// # Errors
    /// An error of `poll` or `accept`.
    pub fn accept(&self, stop: &AtomicBool) -> io::Result<Option<UnixStream>> {
        while !stop.load(Ordering::Acquire) {
            if let Some(stream) = self.accept_within(TICK)? {
                return Ok(Some(stream));
            }
        }
        Ok(None)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.generation != fork::generation() {
            return;
        }
        let there = fs::symlink_metadata(&self.path).map(|meta| (meta.dev(), meta.ino()));
        if there.ok() == self.made && self.made.is_some() {
            // It can only be left behind, which the next listener finds and removes.
            let _ = fs::remove_file(&self.path);
        }
        if let Some(directory) = &self.directory {
            // Fails where something else is in it.
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Removes a socket without a listener; anything else stays, and is an error.
fn remove_dead(path: &Path) -> Result<(), ListenError> {
    let io = |source| ListenError::Io { path: path.to_owned(), source };
    let has_listener = || {
        socket::has_listener(path)
            .map_err(|source| ListenError::Sys { path: path.to_owned(), source })
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io(error)),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    // The watchdog of a pager that was killed a moment ago closes its sockets soon.
    let mut looks = 0;
    while has_listener()? {
        looks += 1;
        if looks == MAX_LOOKS {
            return Err(ListenError::InUse(path.to_owned()));
        }
        std::thread::sleep(TICK);
    }
    fs::remove_file(path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::NotASocket(_))));
        fs::remove_file(&path).unwrap();
        // A socket that outlived its listener.
        drop(UnixListener::bind(&path).unwrap());
        let first = Listener::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::InUse(_))));
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn a_listener_that_accepts_nothing_keeps_no_caller() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let full = socket::listen(&path, 0, SocketAccess::default()).unwrap();
        // One connection is one more than its queue has room for.
        let waiting = UnixStream::connect(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::InUse(_))));
        drop((full, waiting));
        Listener::bind(&path).unwrap();
    }

    #[test]
    fn the_socket_is_private_and_a_foreign_one_at_its_path_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);
    }

    #[test]
    fn a_socket_is_made_for_the_user_and_mode_that_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let user = fs::metadata(dir.path()).unwrap().uid();
        // Only root gives files away.
        let user = if user == 0 { 12_345 } else { user };
        let access = SocketAccess { user: Some(user), group: None, mode: 0o660 };
        let listener = Listener::bind_for(&path, access).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.permissions().mode() & 0o777), (user, 0o660));
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
        // A user that files cannot be given to leaves no name behind.
        let nobody = SocketAccess { user: Some(u32::MAX - 1), group: Some(0), mode: 0o600 };
        if Listener::bind_for(&path, nobody).is_err() {
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_directory_that_was_made_for_a_socket_is_removed_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm").join("socket");
        let access = SocketAccess::default();
        let listener = Listener::bind_in_directory(&path, access).unwrap();
        let mode = fs::metadata(path.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop(listener);
        assert!(!path.parent().unwrap().exists());
        // One that was there stays, and so does one with another file in it.
        fs::create_dir(path.parent().unwrap()).unwrap();
        drop(Listener::bind_in_directory(&path, access).unwrap());
        assert!(path.parent().unwrap().exists() && !path.exists());
    }

    #[test]
    fn a_stop_ends_the_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&dir.path().join("socket")).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| listener.accept(&stop));
            stop.store(true, Ordering::Release);
            assert!(waiting.join().unwrap().unwrap().is_none());
        });
    }
}
