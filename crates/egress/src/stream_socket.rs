//! Sockets of connections to the outside: one of a server, or one end of a pair with a guest or a
//! proxy.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A connected socket that does not block.
#[derive(Debug)]
pub enum StreamSocket {
    /// A connection to a server.
    Tcp(TcpStream),
    /// An end of a pair. Another thread may shut it down.
    Unix(Arc<UnixStream>),
}

impl StreamSocket {
    /// Closes one direction, or both.
    ///
    /// # Errors
    /// As the system call.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        }
    }
}

impl From<TcpStream> for StreamSocket {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl From<UnixStream> for StreamSocket {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(Arc::new(stream))
    }
}

impl From<Arc<UnixStream>> for StreamSocket {
    fn from(stream: Arc<UnixStream>) -> Self {
        Self::Unix(stream)
    }
}

impl AsFd for StreamSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for StreamSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => (&**stream).read(buffer),
        }
    }
}

impl Write for StreamSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => (&**stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
