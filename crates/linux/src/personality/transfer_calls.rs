//! Calls that move bytes. A length is a wish: at most [`AT_ONCE`] bytes go at a time, which callers must expect.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::table::{Description, Open};
use super::tree::{Device, Kind};
use super::{DONE, End, Outcome, Person, Served, Stop, copy_in, copy_out};
use crate::platform::{Call, PlatformError, Process};

/// Most bytes that one call moves.
const AT_ONCE: u64 = 1 << 20;
/// Pieces that a vector may have, as in Linux.
const PIECES: u64 = 1024;
/// Bytes of messages that are kept.
const MESSAGES: usize = 64 << 10;

/// Pieces of guest memory: address and length, at most [`AT_ONCE`] bytes together.
fn pieces(process: &Process, vector: u64, count: u64) -> Served<Vec<(u64, u64)>> {
    if count > PIECES {
        return Err(Errno::INVAL.into());
    }
    let bytes = copy_in(process, vector, count as usize * 16)?;
    let mut room = AT_ONCE;
    let mut pieces = Vec::new();
    for piece in bytes.chunks_exact(16) {
        let word = |at: usize| {
            piece[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        let len = word(8).min(room);
        room -= len;
        if len > 0 {
            pieces.push((word(0), len));
        }
    }
    Ok(pieces)
}

/// Refuses what is negative to the guest.
fn check_offset(offset: u64) -> Served<()> {
    if offset > i64::MAX as u64 { Err(Errno::INVAL.into()) } else { Ok(()) }
}

/// The bytes of all pieces.
fn gather(process: &Process, vector: u64, count: u64) -> Served<Vec<u8>> {
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
        let len = len.min(AT_ONCE);
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        if description.open == Open::Input {
            return self.take_input(process, to, len);
        }
        let offset = description.offset;
        let bytes = self.bytes_at(description, offset, len)?;
        copy_out(process, to, &bytes)?;
        if !bytes.is_empty() {
            self.change().table.get_mut(descriptor)?.offset += bytes.len() as u64;
        }
        Ok(Outcome::Value(bytes.len() as u64))
    }

    /// Bytes of the request; when none are left the guest is idle.
    fn take_input(&mut self, process: &mut Process, to: u64, len: u64) -> Served {
        let rest = &self.streams.input[self.streams.taken..];
        if len == 0 {
            return Ok(DONE);
        }
        if rest.is_empty() {
            return Ok(Outcome::Idle);
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
        if self.state.table.get(descriptor)?.open == Open::Input {
            // One piece at a time is a short read, which is allowed.
            let &(to, len) = pieces.first().unwrap_or(&(0, 0));
            return self.read(process, descriptor, to, len);
        }
        let mut offset = self.state.table.get(descriptor)?.offset;
        let done = self.scatter(process, descriptor, &pieces, offset)?;
        offset += done;
        if done > 0 {
            self.change().table.get_mut(descriptor)?.offset = offset;
        }
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
        let pieces = pieces(process, vector, count)?;
        check_offset(offset)?;
        Ok(Outcome::Value(self.scatter(process, descriptor, &pieces, offset)?))
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
        if matches!(description.open, Open::Input) {
            return Err(Errno::SPIPE.into());
        }
        check_offset(offset)?;
        let bytes = self.bytes_at(description, offset, len.min(AT_ONCE))?;
        copy_out(process, to, &bytes)?;
        Ok(Outcome::Value(bytes.len() as u64))
    }

    fn bytes_at(&self, description: &Description, offset: u64, len: u64) -> Served<Vec<u8>> {
        match &description.open {
            Open::Host(file) => {
                let mut bytes = vec![0; len as usize];
                let n = rustix::io::pread(&file.file, &mut bytes[..], offset)?;
                bytes.truncate(n);
                Ok(bytes)
            }
            Open::Layer(inode) => match &self.state.tree.inode(*inode)?.kind {
                Kind::File(bytes) => {
                    let start = offset.min(bytes.len() as u64) as usize;
                    let end = bytes.len().min(start + len as usize);
                    Ok(bytes[start..end].to_vec())
                }
                _ => Err(Errno::INVAL.into()),
            },
            Open::Device(Device::Null) => Ok(Vec::new()),
            Open::Device(Device::Zero) => Ok(vec![0; len as usize]),
            Open::Device(Device::Random) => fresh(len),
            Open::Directory(_) => Err(Errno::ISDIR.into()),
            Open::Input | Open::Output | Open::Messages | Open::Place => Err(Errno::BADF.into()),
        }
    }

    pub(super) fn write(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        from: u64,
        len: u64,
    ) -> Served {
        self.state.table.get(descriptor)?;
        let bytes = copy_in(process, from, len.min(AT_ONCE) as usize)?;
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
        self.state.table.get(descriptor)?;
        check_offset(offset)?;
        let bytes = copy_in(process, from, len.min(AT_ONCE) as usize)?;
        self.put(descriptor, &bytes, Some(offset))
    }

    fn put(&mut self, descriptor: u64, bytes: &[u8], at: Option<u64>) -> Served {
        let description = self.state.table.get(descriptor)?;
        if !description.writes() {
            return Err(Errno::BADF.into());
        }
        match &description.open {
            Open::Output | Open::Messages if at.is_some() => return Err(Errno::SPIPE.into()),
            Open::Output => {
                if self.streams.output.len() + bytes.len() > self.output_limit {
                    return Ok(Outcome::End(End::Output));
                }
                self.streams.output.extend(bytes);
            }
            Open::Messages => {
                let messages = &mut self.streams.messages;
                messages.extend(bytes);
                let surplus = messages.len().saturating_sub(MESSAGES);
                messages.drain(..surplus);
            }
            Open::Device(_) => {}
            Open::Layer(inode) => {
                let inode = *inode;
                let append = description.flags & libc::O_APPEND as u32 != 0;
                let size = self.state.tree.attributes(&super::Found::Layer(inode))?.size;
                let start = at.unwrap_or(if append { size } else { description.offset });
                let end = start.checked_add(bytes.len() as u64).ok_or(Errno::FBIG)?;
                let now = super::clock_calls::now();
                let state = self.change();
                if !bytes.is_empty() {
                    state.tree.edit(inode, end, |file| {
                        if file.len() < end as usize {
                            file.resize(end as usize, 0);
                        }
                        file[start as usize..end as usize].copy_from_slice(bytes);
                    })?;
                    state.tree.inode_mut(inode)?.modified = now;
                }
                if at.is_none() {
                    state.table.get_mut(descriptor)?.offset = end;
                }
            }
            Open::Host(_) | Open::Directory(_) | Open::Input | Open::Place => {
                return Err(Errno::BADF.into());
            }
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
