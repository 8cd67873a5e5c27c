//! Calls that move bytes. A length is a wish: at most [`AT_ONCE`] bytes go at a time, which callers must expect; of files more, for
//! many callers do not expect it there.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::devices::Device;
use super::table::{Description, Open};
use super::{Channel, DONE, Outcome, Person, Served, State, Stop, copy_in, copy_out};
use crate::platform::{Call, PlatformError, Process};

/// Most bytes that one call moves.
pub(super) const AT_ONCE: u64 = 1 << 20;
/// Most bytes of a file that one call moves, in one piece.
const OF_FILES: u64 = 32 << 20;
/// Pieces that a vector may have, as in Linux.
const PIECES: u64 = 1024;
/// Bytes of messages that are kept.
const MESSAGES: usize = 64 << 10;

/// Pieces of guest memory: address and length, at most [`AT_ONCE`] bytes together.
pub(super) fn pieces(process: &Process, vector: u64, count: u64) -> Served<Vec<(u64, u64)>> {
    if count > PIECES {
        return Err(Errno::INVAL.into());
    }
    let bytes = copy_in(process, vector, count as usize * 16)?;
    let mut room = AT_ONCE;
    let mut pieces = Vec::new();
    let word = |piece: &[u8], at: usize| {
        piece[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
    };
    // Whatever else is wrong.
    if bytes.chunks_exact(16).any(|piece| word(piece, 8) > i64::MAX as u64) {
        return Err(Errno::INVAL.into());
    }
    for piece in bytes.chunks_exact(16) {
        let word = |at: usize| word(piece, at);
        let len = word(8).min(room);
        room -= len;
        if len > 0 {
            pieces.push((word(0), len));
        }
    }
    Ok(pieces)
}

/// Most bytes that one call moves in one piece.
fn most(description: &Description) -> u64 {
    if matches!(description.open, Open::File(_)) { OF_FILES } else { AT_ONCE }
}

/// Refuses what is negative to the guest.
pub(super) fn check_offset(offset: u64) -> Served<()> {
    if offset > i64::MAX as u64 { Err(Errno::INVAL.into()) } else { Ok(()) }
}

/// The bytes of all pieces.
pub(super) fn gather(process: &Process, vector: u64, count: u64) -> Served<Vec<u8>> {
    let mut bytes = Vec::new();
    for (from, len) in pieces(process, vector, count)? {
        bytes.extend(copy_in(process, from, len as usize)?);
    }
    Ok(bytes)
}

impl Person {
    pub(super) fn read(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> Served {
        let description = self.state.table.get(descriptor)?;
        let len = len.min(most(description));
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        if description.open == Open::Input {
            return self.take_input(process, descriptor, to, len);
        }
        if description.open.is_stream() {
            return self.take(process, descriptor, &[(to, len)], false);
        }
        let bytes = self.bytes_at(description, description.offset(), len)?;
        copy_out(process, to, &bytes)?;
        self.advance(descriptor, bytes.len() as u64)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }

    /// So many bytes of a file were read.
    fn accessed(&mut self, descriptor: u64, len: u64) -> Served<()> {
        if self.state.watchers > 0
            && len > 0
            && let Open::File(open) = &self.state.table.get(descriptor)?.open
        {
            let (node, found) = (open.node, self.state.table.get(descriptor)?.found.clone());
            self.change().tell_found(node, found.as_ref(), libc::IN_ACCESS);
        }
        Ok(())
    }

    /// Moves the position of an open file on.
    fn advance(&mut self, descriptor: u64, by: u64) -> Served<()> {
        if by > 0
            && matches!(self.state.table.get(descriptor)?.open, Open::File(_))
            && let Open::File(open) = &mut self.change().table.get_mut(descriptor)?.open
        {
            open.offset += by;
            self.accessed(descriptor, by)?;
        }
        Ok(())
    }

    /// Bytes of the request; when none are left the guest is idle, unless there are others that may do something.
    fn take_input(&mut self, process: &mut Process, descriptor: u64, to: u64, len: u64) -> Served {
        if len == 0 {
            return Ok(DONE);
        }
        let rest = &self.streams.input[self.streams.taken..];
        if rest.is_empty() {
            if std::mem::take(&mut self.streams.ended) {
                return Ok(DONE);
            }
            let waits = self.state.table.get(descriptor)?.flags & libc::O_NONBLOCK as u32 == 0;
            return match waits && self.state.is_alone() {
                true => Ok(Outcome::Idle),
                false => self.wait_for(descriptor, super::readiness::IN, 0),
            };
        }
        let now = rest.len().min(len as usize);
        copy_out(process, to, &rest[..now])?;
        self.streams.taken += now;
        Ok(Outcome::Value(now as u64))
    }

    pub(super) fn readv(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> Served {
        let pieces = pieces(process, vector, count)?;
        if self.state.table.get(descriptor)?.open.is_stream() {
            return self.take(process, descriptor, &pieces, false);
        }
        if self.state.table.get(descriptor)?.open == Open::Input {
            // One piece at a time is a short read, which is allowed.
            let &(to, len) = pieces.first().unwrap_or(&(0, 0));
            return self.read(process, descriptor, to, len);
        }
        let offset = self.state.table.get(descriptor)?.offset();
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        self.advance(descriptor, done)?;
        Ok(Outcome::Value(done))
    }

    pub(super) fn preadv(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
        offset: u64,
    ) -> Served {
        check_offset(offset)?;
        let pieces = pieces(process, vector, count)?;
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        self.accessed(descriptor, done)?;
        Ok(Outcome::Value(done))
    }

    /// Reads at `offset` into pieces until one is not filled.
    fn scatter(
        &self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        offset: u64,
    ) -> Served<u64> {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        let mut done = 0;
        for &(to, len) in pieces {
            let bytes = self.bytes_at(description, offset.saturating_add(done), len)?;
            copy_out(process, to, &bytes)?;
            done += bytes.len() as u64;
            if (bytes.len() as u64) < len {
                break;
            }
        }
        Ok(done)
    }

    /// Where the bytes go that `call` waits for, and how many.
    pub(crate) fn input_place(
        &self,
        process: &Process,
        call: &Call,
    ) -> Result<(u64, u64), PlatformError> {
        if call.number == libc::SYS_read {
            return Ok((call.args[1], call.args[2]));
        }
        match pieces(process, call.args[1], call.args[2]) {
            Ok(pieces) => Ok(pieces.first().copied().unwrap_or((0, 0))),
            Err(Stop::Errno(_)) => Ok((0, 0)),
            Err(Stop::Broken(error)) => Err(error),
        }
    }

    pub(super) fn pread(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
        offset: u64,
    ) -> Served {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        if description.open == Open::Input || description.open.is_stream() {
            return Err(Errno::SPIPE.into());
        }
        check_offset(offset)?;
        let bytes = self.bytes_at(description, offset, len.min(most(description)))?;
        copy_out(process, to, &bytes)?;
        self.accessed(descriptor, bytes.len() as u64)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }

    pub(super) fn bytes_at(
        &self,
        description: &Description,
        offset: u64,
        len: u64,
    ) -> Served<Vec<u8>> {
        match &description.open {
            Open::File(open) => {
                // Buffers are often larger than what is left of a file.
                let size = self.state.tree.stat(open.node)?.size;
                let mut bytes = vec![0; len.min(size.saturating_sub(offset)) as usize];
                let read = open.read_at(&self.state.tree, offset, &mut bytes)?;
                bytes.truncate(read);
                Ok(bytes)
            }
            Open::Device(Device::Null | Device::Host, _) => Ok(Vec::new()),
            Open::Device(Device::Zero, _) => Ok(vec![0; len as usize]),
            Open::Device(Device::Random, _) => fresh(len),
            Open::Folder(..) => Err(Errno::ISDIR.into()),
            _ => Err(Errno::SPIPE.into()),
        }
    }

    pub(super) fn write(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        from: u64,
        len: u64,
    ) -> Served {
        let most = most(self.state.table.get(descriptor)?);
        let bytes = copy_in(process, from, len.min(most) as usize)?;
        self.put(descriptor, &bytes, None)
    }

    pub(super) fn writev(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
    ) -> Served {
        self.state.table.get(descriptor)?;
        let bytes = gather(process, vector, count)?;
        self.put(descriptor, &bytes, None)
    }

    pub(super) fn pwritev(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        vector: u64,
        count: u64,
        offset: u64,
    ) -> Served {
        self.state.table.get(descriptor)?;
        check_offset(offset)?;
        let bytes = gather(process, vector, count)?;
        self.put(descriptor, &bytes, Some(offset))
    }

    pub(super) fn pwrite(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        from: u64,
        len: u64,
        offset: u64,
    ) -> Served {
        let most = most(self.state.table.get(descriptor)?);
        check_offset(offset)?;
        let bytes = copy_in(process, from, len.min(most) as usize)?;
        self.put(descriptor, &bytes, Some(offset))
    }

    pub(super) fn put(&mut self, descriptor: u64, bytes: &[u8], at: Option<u64>) -> Served {
        let description = self.state.table.get(descriptor)?;
        if !description.writes() {
            return Err(Errno::BADF.into());
        }
        match &description.open {
            Open::Output | Open::Messages if at.is_some() => return Err(Errno::SPIPE.into()),
            open if open.is_stream() => {
                return match at {
                    Some(_) => Err(Errno::SPIPE.into()),
                    None => self.pour(descriptor, bytes, false),
                };
            }
            open @ (Open::Output | Open::Device(Device::Host, _)) => {
                let channel = match open {
                    Open::Output => Channel::Output,
                    _ => Channel::Host,
                };
                let from = self.writer(channel);
                if let Err(end) = self.streams.put_out(from, bytes, self.output_limit) {
                    return Ok(Outcome::End(end));
                }
            }
            Open::Messages => {
                let from = self.writer(Channel::Messages);
                if let Err(end) = self.streams.hear_message(from, bytes, self.output_limit) {
                    return Ok(Outcome::End(end));
                }
                let messages = &mut self.streams.messages;
                messages.extend(bytes);
                let surplus = messages.len().saturating_sub(MESSAGES);
                messages.drain(..surplus);
            }
            Open::Device(..) => {}
            Open::File(open) => {
                let (node, size) = (open.node, self.state.tree.stat(open.node)?.size);
                let from = if open.access.append { size } else { at.unwrap_or(open.offset) };
                let end = from.saturating_add(bytes.len() as u64);
                self.state.seals.may_write(node, end, size)?;
                let State { table, tree, .. } = self.change();
                let Open::File(open) = &mut table.get_mut(descriptor)?.open else {
                    return Err(Errno::BADF.into());
                };
                let now = super::clock_calls::now();
                let written = match at {
                    Some(at) => open.write_at(tree, at, bytes, now)?,
                    None => open.write(tree, bytes, now)?,
                };
                if self.state.watchers > 0 {
                    let found = self.state.table.get(descriptor)?.found.clone();
                    self.change().tell_found(node, found.as_ref(), libc::IN_MODIFY);
                }
                return Ok(Outcome::Value(written as u64));
            }
            _ => return Err(Errno::BADF.into()),
        }
        Ok(Outcome::Value(bytes.len() as u64))
    }

    /// Random bytes: new ones of the host's at every call.
    pub(super) fn random(&mut self, process: &mut Process, to: u64, len: u64) -> Served {
        let bytes = fresh(len.min(AT_ONCE))?;
        copy_out(process, to, &bytes)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }
}

fn fresh(len: u64) -> Served<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while done < bytes.len() {
        done += getrandom(&mut bytes[done..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}
