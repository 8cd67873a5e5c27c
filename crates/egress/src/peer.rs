//! One side of a proxied connection: a socket, with or without TLS, and the bytes that wait on
//! either side of it.
//!
//! Promises: it never blocks, and holds at most [`MAX_BUFFER`] bytes of content in each direction,
//! and what TLS holds.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use rustls::Connection;

use crate::stream_socket::StreamSocket;

/// Bytes that wait in one direction. A head fits.
pub(crate) const MAX_BUFFER: usize = 96 << 10;
/// Bytes that one call of [`Peer::fill`] reads, unless the last read exceeds them.
const MAX_READ: usize = 256 << 10;
/// Bytes that are read at a time.
const PIECE: usize = 16 << 10;

/// One side.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: StreamSocket,
    tls: Option<Box<Connection>>,
    /// Content that came, and was not taken yet.
    pub(crate) input: Vec<u8>,
    /// Content that waits to be sent.
    pub(crate) output: Vec<u8>,
    /// Whether nothing more comes.
    pub(crate) has_ended: bool,
    /// Whether the end was announced, so that nothing was cut off.
    pub(crate) ended_cleanly: bool,
    /// Whether it takes no more output. Input may still come.
    is_deaf: bool,
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl Peer {
    pub(crate) fn new(socket: StreamSocket, tls: Option<Connection>) -> Self {
        Self {
            socket,
            tls: tls.map(Box::new),
            input: Vec::new(),
            output: Vec::new(),
            has_ended: false,
            ended_cleanly: false,
            is_deaf: false,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn room(&self) -> usize {
        MAX_BUFFER.saturating_sub(self.output.len())
    }

    /// Whether TLS is still being agreed on.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// Takes the first bytes of the input away.
    pub(crate) fn take(&mut self, len: usize) {
        self.input.drain(..len);
    }

    /// The events to wait for.
    pub(crate) fn wanted(&self) -> PollFlags {
        let mut flags = PollFlags::empty();
        if !self.has_ended && self.input.len() < MAX_BUFFER {
            flags |= PollFlags::IN;
        }
        let tls = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        if !self.is_deaf && (tls || !self.output.is_empty() && !self.is_handshaking()) {
            flags |= PollFlags::OUT;
        }
        flags
    }

    /// Reads bytes that have come, up to a bound. Returns whether there were any.
    pub(crate) fn fill(&mut self) -> io::Result<bool> {
        let mut moved = false;
        // Records of TLS without content, such as tickets, fill no buffer.
        let mut room = MAX_READ;
        while !self.has_ended && self.input.len() < MAX_BUFFER && room > 0 {
            let read = match &mut self.tls {
                None => {
                    let mut buffer = [0; PIECE];
                    self.socket
                        .read(&mut buffer)
                        .inspect(|len| self.input.extend_from_slice(&buffer[..*len]))
                }
                Some(tls) => {
                    let read = tls.read_tls(&mut self.socket);
                    if matches!(read, Ok(1..)) {
                        let state = tls.process_new_packets();
                        let state =
                            state.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
                        let len = state.plaintext_bytes_to_read();
                        let at = self.input.len();
                        self.input.resize(at + len, 0);
                        tls.reader().read_exact(&mut self.input[at..])?;
                        if state.peer_has_closed() {
                            (self.has_ended, self.ended_cleanly) = (true, true);
                        }
                    }
                    read
                }
            };
            match read {
                Ok(0) => {
                    self.has_ended = true;
                    self.ended_cleanly |= self.tls.is_none();
                    moved = true;
                }
                Ok(len) => {
                    moved = true;
                    room = room.saturating_sub(len);
                }
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(moved)
    }

    /// Sends what waits. Returns whether that was anything. A side that takes no more output loses
    /// it.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        if self.is_deaf {
            self.output.clear();
            return Ok(false);
        }
        let mut moved = false;
        loop {
            let sent = match &mut self.tls {
                None if self.output.is_empty() => return Ok(moved),
                None => {
                    self.socket.write(&self.output).inspect(|len| drop(self.output.drain(..*len)))
                }
                Some(tls) => {
                    if !tls.is_handshaking() && !self.output.is_empty() {
                        let taken = tls.writer().write(&self.output)?;
                        self.output.drain(..taken);
                    }
                    if !tls.wants_write() {
                        return Ok(moved);
                    }
                    tls.write_tls(&mut self.socket)
                }
            };
            match sent {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => moved = true,
                Err(error) if would_block(&error) => return Ok(moved),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether all content was handed to the kernel.
    pub(crate) fn is_flushed(&self) -> bool {
        let waits = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        !self.is_deaf && self.output.is_empty() && !waits
    }

    /// Drops all output from now on.
    pub(crate) fn be_deaf(&mut self) {
        self.is_deaf = true;
        self.output.clear();
    }

    /// Announces the end of the output.
    pub(crate) fn end(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
        }
        // A closed socket needs no announcement.
        let _ = self.flush();
    }
}
