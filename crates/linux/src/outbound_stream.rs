//! The host's side of a connection to the outside: a server's socket, or one end of a proxied connection.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream that does not block.
#[derive(Debug)]
pub(crate) enum OutboundStream {
    Server(TcpStream),
    Proxy(UnixStream),
}

impl OutboundStream {
    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Server(stream) => stream.shutdown(how),
            Self::Proxy(stream) => stream.shutdown(how),
        }
    }
}

impl AsFd for OutboundStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Server(stream) => stream.as_fd(),
            Self::Proxy(stream) => stream.as_fd(),
        }
    }
}

impl Read for OutboundStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Server(stream) => stream.read(buffer),
            Self::Proxy(stream) => stream.read(buffer),
        }
    }
}

impl Write for OutboundStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Server(stream) => stream.write(bytes),
            Self::Proxy(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
