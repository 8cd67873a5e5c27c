//! Writes to pipes, sockets and terminals, which may wait for room many times.
//!
//! Promises: a write that continues reads only bytes that it has not written, and no more than find
//! room, so that a large write to a slow reader costs as much as its bytes.

use std::borrow::Cow;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::channels::ChannelEnd;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::net::sockets::SocketState;
use crate::sentry::result::SyscallResult;

/// Maximum bytes of an atomic write.
pub(in crate::sentry) const PIPE_BUF: u64 = 4096;

/// Bytes of a write to a terminal that are read at a time.
const TERMINAL_PART: u64 = 64 << 10;

/// The bytes of a write that are read from the guest's memory.
pub(in crate::sentry) struct StreamWrite<'a> {
    pub(in crate::sentry) bytes: Cow<'a, [u8]>,
    /// Number of bytes of the write before them.
    start: u64,
    /// Length of the whole write.
    pub(in crate::sentry) len: u64,
}

impl<'a> StreamWrite<'a> {
    /// A write whose bytes are all read.
    pub(in crate::sentry) fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes: bytes.into(), start: 0, len: bytes.len() as u64 }
    }

    /// Its bytes after the first `done`, as far as they are read.
    pub(in crate::sentry) fn after(&self, done: u64) -> &[u8] {
        let read = done.saturating_sub(self.start).min(self.bytes.len() as u64);
        &self.bytes[read as usize..]
    }
}

/// The part of `pieces` that begins `skipped` bytes after their first, of at most `most` bytes.
pub(in crate::sentry) fn cut(
    pieces: &[(u64, u64)],
    mut skipped: u64,
    mut most: u64,
) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    for &(from, len) in pieces {
        let before = skipped.min(len);
        skipped -= before;
        let part = (len - before).min(most);
        most -= part;
        if part > 0 {
            parts.push((from.wrapping_add(before), part));
        }
    }
    parts
}

impl Sentry {
    /// Reads the bytes of a write to a stream that may find room now.
    pub(in crate::sentry) fn stream_write(
        &self,
        process: &Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
    ) -> SyscallResult<StreamWrite<'static>> {
        let mut len = pieces.iter().map(|(_, len)| len).sum();
        let (start, most) = self.part_of_write(descriptor, len)?;
        let mut bytes = Vec::new();
        for (from, part) in cut(pieces, start, most) {
            match copy_in(process, from, part as usize) {
                Ok(read) => bytes.extend(read),
                // The bytes before these are written, or have been.
                Err(_) if start > 0 || (most < len && !bytes.is_empty()) => {
                    len = start + bytes.len() as u64;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(StreamWrite { bytes: bytes.into(), start, len })
    }

    /// The bytes before the part of a write of `len` bytes that may find room now, and the length
    /// of that part. Datagrams, counters and atomic writes are read whole.
    fn part_of_write(&self, descriptor: u64, len: u64) -> SyscallResult<(u64, u64)> {
        let done = self.resumed_bytes();
        let channel = match &self.state.table.get(descriptor)?.open {
            _ if len <= PIPE_BUF => return Ok((0, len)),
            FileObject::Terminal(_) => return Ok((done, TERMINAL_PART)),
            FileObject::Pipe { channel, writes: true } => *channel,
            FileObject::Fifo(fifo) => fifo.channel,
            FileObject::Socket(socket) if !socket.packets => match socket.stage {
                SocketState::Connected { outgoing: Some(outgoing), .. } => outgoing,
                _ => return Ok((0, len)),
            },
            _ => return Ok((0, len)),
        };
        Ok(match self.state.channels.get(channel) {
            // The caller's end takes all of them.
            Some(held) if held.end != ChannelEnd::Listens => (done, held.room().max(1) as u64),
            _ => (0, len),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_write_begins_behind_its_written_bytes_and_is_bounded() {
        let pieces = [(100, 10), (200, 5), (300, 10)];
        assert_eq!(cut(&pieces, 0, u64::MAX), pieces);
        assert_eq!(cut(&pieces, 4, 8), [(104, 6), (200, 2)]);
        assert_eq!(cut(&pieces, 10, 6), [(200, 5), (300, 1)]);
        assert_eq!(cut(&pieces, 25, 9), []);
        assert_eq!(cut(&pieces, 99, 9), []);
        let part = StreamWrite { bytes: vec![4, 5, 6].into(), start: 4, len: 9 };
        assert_eq!(
            (part.after(4), part.after(6), part.after(9)),
            (&[4, 5, 6][..], &[6][..], &[][..])
        );
        let whole = StreamWrite::whole(&[1, 2]);
        assert_eq!((whole.after(1), whole.len), (&[2][..], 2));
    }
}
