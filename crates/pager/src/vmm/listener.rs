//! The socket that VMMs connect to.
//!
//! Promises: only the user that made it can connect (mode 0600 from the first moment); a file that
//! is not a dead socket is never removed; the socket is removed when the listener goes.
//!
//! May break it: two listeners that are made for the same dead socket at the same instant; one of
//! them is then never connected to.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_sys::{SysError, poll, socket};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// How long a stop may go unnoticed.
const TICK: Duration = Duration::from_millis(50);

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
}

impl Listener {
    /// Listens at `path`, where nothing may be except a socket without a listener.
    ///
    /// # Errors
    /// [`ListenError`] by cause; nothing was removed then but a dead socket.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let io = |source| ListenError::Io { path: path.to_owned(), source };
        remove_dead(path)?;
        let socket = socket::listen_privately(path, BACKLOG)
            .map_err(|source| ListenError::Sys { path: path.to_owned(), source })?;
        let mut listener = Self { socket, path: path.to_owned(), made: None };
        let meta = fs::symlink_metadata(path).map_err(io)?;
        listener.made = Some((meta.dev(), meta.ino()));
        Ok(listener)
    }

    /// The next VMM that connects, or `None` once `stop` is set.
    ///
    /// # Errors
    /// Whatever `poll` and `accept` say.
    pub fn accept(&self, stop: &AtomicBool) -> io::Result<Option<UnixStream>> {
        while !stop.load(Ordering::Acquire) {
            let [ready] = poll::readable([self.socket.as_fd()], TICK).map_err(io::Error::other)?;
            if ready {
                return self.socket.accept().map(|(stream, _)| Some(stream));
            }
        }
        Ok(None)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(&self.path).map(|meta| (meta.dev(), meta.ino()));
        if there.ok() == self.made && self.made.is_some() {
            // It can only be left behind, which the next listener finds and removes.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket without a listener; anything else stays, and is an error.
fn remove_dead(path: &Path) -> Result<(), ListenError> {
    let io = |source| ListenError::Io { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io(error)),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(io)
        }
        Err(error) => Err(io(error)),
    }
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
    fn the_socket_is_for_its_user_alone_and_another_one_in_its_place_stays() {
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
