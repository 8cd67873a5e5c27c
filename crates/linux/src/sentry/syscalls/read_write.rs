//! System calls that move bytes. One call moves as many bytes as Linux moves, of files and devices
//! in parts of [`MAX_TRANSFER`] bytes, because callers do not expect less there.
//!
//! Promises: a call holds at most one part in memory, and checks its limits behind each. May break
//! it: a buffer in sparse memory, of which a call uses the first [`MAX_TRANSFER`] bytes.

use afresh_snapshot::OutputStream;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::platform::{Call, PlatformError, Process};
use crate::sentry::Sentry;
use crate::sentry::fs::proc_settings::{ProcFile, ProcSetting};
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::generation;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::streams::End;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};
use crate::sentry::syscalls::stream_write::cut;

/// Maximum bytes of one part of a transfer.
pub(in crate::sentry) const MAX_TRANSFER: u64 = 8 << 20;
/// Maximum bytes of one call, as in Linux.
pub(in crate::sentry) const MAX_COUNT: u64 = 0x7fff_f000;
/// Steps of work that a part counts as, which are those between two checks of the limits.
const PART_STEPS: usize = 1 << 10;
/// Pieces that a vector may have, as in Linux.
pub(in crate::sentry) const PIECES: u64 = 1024;
/// Bytes of messages that are kept.
const MESSAGES: usize = 64 << 10;

/// Pieces of guest memory: address and length, at most [`MAX_TRANSFER`] bytes together.
pub(in crate::sentry) fn pieces(
    process: &Process,
    vector: u64,
    count: u64,
) -> SyscallResult<Vec<(u64, u64)>> {
    pieces_of(process, vector, count, MAX_TRANSFER)
}

/// Pieces of guest memory, at most `room` bytes together.
pub(in crate::sentry) fn pieces_of(
    process: &Process,
    vector: u64,
    count: u64,
    mut room: u64,
) -> SyscallResult<Vec<(u64, u64)>> {
    if count > PIECES {
        return Err(Errno::INVAL.into());
    }
    let bytes = copy_in(process, vector, count as usize * 16)?;
    let mut pieces = Vec::new();
    let word = |piece: &[u8], at: usize| {
        piece[at..at + 8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
    };
    // A length beyond `SSIZE_MAX`.
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

/// The parts of a piece of memory; one that is empty has one.
fn parts((start, len): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let offsets = (0..len.max(1)).step_by(MAX_TRANSFER as usize);
    offsets.map(move |offset| (start.wrapping_add(offset), (len - offset).min(MAX_TRANSFER)))
}

/// Refuses offsets that are negative for the guest.
pub(in crate::sentry) fn check_offset(offset: u64) -> SyscallResult<()> {
    if offset > i64::MAX as u64 { Err(Errno::INVAL.into()) } else { Ok(()) }
}

/// The bytes of all pieces.
pub(in crate::sentry) fn gather(
    process: &Process,
    vector: u64,
    count: u64,
) -> SyscallResult<Vec<u8>> {
    let mut bytes = Vec::new();
    for (from, len) in pieces(process, vector, count)? {
        bytes.extend(copy_in(process, from, len as usize)?);
    }
    Ok(bytes)
}

/// The bytes of pieces up to the first page that cannot be read; an error if that is the first one.
fn gather_some(process: &Process, pieces: &[(u64, u64)]) -> SyscallResult<Vec<u8>> {
    let mut bytes = Vec::new();
    for &(from, len) in pieces {
        match copy_in(process, from, len as usize) {
            Ok(whole) => bytes.extend(whole),
            Err(error) => {
                let mut at = from;
                while at - from < len {
                    let page =
                        (crate::sentry::PAGE - at % crate::sentry::PAGE).min(len - (at - from));
                    let Ok(part) = copy_in(process, at, page as usize) else { break };
                    bytes.extend(part);
                    at = at.wrapping_add(page);
                }
                return if bytes.is_empty() { Err(error) } else { Ok(bytes) };
            }
        }
    }
    Ok(bytes)
}

/// Stores bytes up to the first page that cannot be written, and returns their number; an error if
/// that is the first one.
pub(in crate::sentry) fn copy_out_some(
    process: &mut Process,
    to: u64,
    bytes: &[u8],
) -> SyscallResult<u64> {
    let Err(error) = copy_out(process, to, bytes) else { return Ok(bytes.len() as u64) };
    let mut done = 0;
    while done < bytes.len() {
        let at = to.wrapping_add(done as u64);
        let page = (crate::sentry::PAGE - at % crate::sentry::PAGE) as usize;
        let part = &bytes[done..(done + page).min(bytes.len())];
        if copy_out(process, at, part).is_err() {
            break;
        }
        done += part.len();
    }
    if done == 0 { Err(error) } else { Ok(done as u64) }
}

/// The bytes that a write takes: all of them, or for a file those in front of memory that cannot be
/// read.
pub(in crate::sentry) fn written(
    process: &Process,
    description: &Description,
    pieces: &[(u64, u64)],
) -> SyscallResult<Vec<u8>> {
    if matches!(description.open, FileObject::File(_)) {
        return gather_some(process, pieces);
    }
    let mut bytes = Vec::new();
    for &(from, len) in pieces {
        bytes.extend(copy_in(process, from, len as usize)?);
    }
    Ok(bytes)
}

impl Sentry {
    /// `read(2)`, as on Linux.
    pub(in crate::sentry) fn sys_read(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        if let Some(control) = self.read_peer(descriptor, None, (to, len))? {
            return Ok(control);
        }
        let description = self.state.table.get(descriptor)?;
        if description.open == FileObject::Input {
            return self.take_input(process, descriptor, &[(to, len.min(MAX_TRANSFER))]);
        }
        if description.open.is_stream() {
            return self.take(process, descriptor, &[(to, len.min(MAX_TRANSFER))], false);
        }
        let offset = description.offset();
        let done = self.scatter(process, descriptor, &[(to, len.min(MAX_COUNT))], offset)?;
        self.advance(descriptor, done)?;
        Ok(SyscallControl::Value(done))
    }

    /// Reads at `offset` into pieces until one is not filled, in parts.
    pub(in crate::sentry) fn scatter(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        offset: u64,
    ) -> SyscallResult<u64> {
        if !self.state.table.get(descriptor)?.reads() {
            return Err(Errno::BADF.into());
        }
        let mut done = 0;
        for part in pieces.iter().flat_map(|piece| parts(*piece)) {
            let (to, len) = part;
            let description = self.state.table.get(descriptor)?;
            let read = self
                .bytes_or_memory_at(process, description, offset.saturating_add(done), len)
                .and_then(|bytes| copy_out_some(process, to, &bytes));
            let read = match read {
                Err(SyscallError::Errno(_)) if done > 0 => 0,
                read => read?,
            };
            done += read;
            let steps = (read as usize).div_ceil(MAX_TRANSFER as usize / PART_STEPS);
            if read < len || self.is_spent(steps) {
                break;
            }
        }
        Ok(done)
    }

    /// So many bytes of a file were read.
    pub(in crate::sentry) fn accessed(&mut self, descriptor: u64, len: u64) -> SyscallResult<()> {
        if matches!(
            self.state.table.get(descriptor)?.open,
            FileObject::Device(Device::Generation(_), _)
        ) {
            return self.see_generation(descriptor);
        }
        if self.state.is_watched()
            && len > 0
            && let FileObject::File(open) = &self.state.table.get(descriptor)?.open
        {
            let (node, found) = (open.node, self.state.table.get(descriptor)?.found.clone());
            self.change().notify_found(node, found.as_ref(), libc::IN_ACCESS);
        }
        Ok(())
    }

    /// Moves the position of an open file on.
    pub(in crate::sentry) fn advance(&mut self, descriptor: u64, by: u64) -> SyscallResult<()> {
        let open = &self.state.table.get(descriptor)?.open;
        if matches!(open, FileObject::Device(Device::Generation(_), _)) {
            return self.see_generation(descriptor);
        }
        if by == 0 || !matches!(open, FileObject::File(_) | FileObject::Proc(_)) {
            return Ok(());
        }
        match &mut self.change().table.get_mut(descriptor)?.open {
            FileObject::File(open) => open.offset += by,
            FileObject::Proc(file) => file.offset += by,
            _ => {}
        }
        self.accessed(descriptor, by)?;
        Ok(())
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
            Err(SyscallError::Errno(_) | SyscallError::Paused) => Ok((0, 0)),
            Err(SyscallError::Broken(error)) => Err(error),
        }
    }

    /// `pread64(2)`, as on Linux.
    pub(in crate::sentry) fn sys_pread64(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        to: u64,
        len: u64,
        offset: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        description.check_positions()?;
        check_offset(offset)?;
        if !description.reads() {
            return Err(Errno::BADF.into());
        }
        // The end of the read is a position, too.
        check_offset(offset.saturating_add(len))?;
        if let Some(control) = self.read_peer(descriptor, Some(offset), (to, len))? {
            return Ok(control);
        }
        let done = self.scatter(process, descriptor, &[(to, len.min(MAX_COUNT))], offset)?;
        self.accessed(descriptor, done)?;
        Ok(SyscallControl::Value(done))
    }

    pub(in crate::sentry) fn bytes_at(
        &self,
        description: &Description,
        offset: u64,
        len: u64,
    ) -> SyscallResult<Vec<u8>> {
        match &description.open {
            FileObject::File(open) => {
                // Buffers are often larger than the rest of a file.
                let size = self.state.tree.stat(open.node)?.size;
                let mut bytes = vec![0; len.min(size.saturating_sub(offset)) as usize];
                let read = open.read_at(&self.state.tree, offset, &mut bytes)?;
                bytes.truncate(read);
                self.shared.read_over(open.node, offset, &mut bytes)?;
                Ok(bytes)
            }
            FileObject::Device(Device::Null | Device::Host, _) => Ok(Vec::new()),
            FileObject::Device(Device::Zero | Device::Full, _) => Ok(vec![0; len as usize]),
            FileObject::Device(Device::Random, _) => fresh(len),
            FileObject::Device(Device::Generation(_), _) if len < generation::LEN => {
                Err(Errno::INVAL.into())
            }
            FileObject::Device(Device::Generation(_), _) => {
                Ok(self.streams.generation.get().to_le_bytes().to_vec())
            }
            FileObject::Folder(..) => Err(Errno::ISDIR.into()),
            FileObject::Proc(ProcFile { setting: ProcSetting::PageMap(id), .. }) => {
                Ok(self.state.page_map(*id, offset, len)?)
            }
            FileObject::Proc(file) => {
                let mut bytes = self.state.proc_content(file)?;
                bytes.drain(..bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX)));
                bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
                Ok(bytes)
            }
            _ => Err(Errno::SPIPE.into()),
        }
    }

    /// `write(2)`: one call writes at most 8 MiB to a stream.
    pub(in crate::sentry) fn sys_write(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        from: u64,
        len: u64,
    ) -> SyscallResult {
        if let Some(control) = self.write_peer(process, descriptor, None, (from, len))? {
            return Ok(control);
        }
        let most = self.most(descriptor)?;
        self.write_pieces(process, descriptor, &[(from, len.min(most))])
    }

    /// Maximum bytes of one call on `descriptor`.
    pub(in crate::sentry) fn most(&self, descriptor: u64) -> SyscallResult<u64> {
        let is_stream = self.state.table.get(descriptor)?.open.is_stream();
        Ok(if is_stream { MAX_TRANSFER } else { MAX_COUNT })
    }

    /// Writes pieces of memory at the position of a file, or to a stream.
    pub(in crate::sentry) fn write_pieces(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if description.open.is_stream() && description.writes() {
            let written = self.stream_write(process, descriptor, pieces)?;
            return self.pour_part(descriptor, &written);
        }
        self.write_parts(process, descriptor, pieces, None)
    }

    /// Writes pieces of memory to a file or a device at `at`, or at its position, in parts.
    pub(in crate::sentry) fn write_parts(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        pieces: &[(u64, u64)],
        at: Option<u64>,
    ) -> SyscallResult {
        let len: u64 = pieces.iter().map(|(_, len)| len).sum();
        let description = self.state.table.get(descriptor)?;
        let forgets =
            matches!(description.open, FileObject::Device(Device::Null | Device::Zero, _));
        if forgets && description.writes() {
            return Ok(SyscallControl::Value(len));
        }
        // A write that was paused continues after the bytes that it has written.
        let mut done = self.resumed_bytes();
        loop {
            let description = self.state.table.get(descriptor)?;
            if done > 0 && self.is_at_size_limit(description, at.map(|at| at + done))? {
                return Ok(SyscallControl::Value(done));
            }
            let part = cut(pieces, done, MAX_TRANSFER);
            let wanted = part.iter().map(|(_, len)| len).sum::<u64>();
            let written = written(process, description, &part).and_then(|bytes| {
                self.put_or_write_memory(process, descriptor, &bytes, at.map(|at| at + done))
            });
            let put = match written {
                Ok(SyscallControl::Value(put)) => put,
                Err(SyscallError::Paused) if done > 0 => return Ok(self.pause(done)),
                Err(SyscallError::Errno(_)) if done > 0 => 0,
                other => return other,
            };
            done += put;
            if put < wanted || done >= len {
                return Ok(SyscallControl::Value(done));
            }
            // A caller expects no less of a file than all bytes.
            if self.is_spent(PART_STEPS) {
                return Ok(self.pause(done));
            }
        }
    }

    /// Whether a write at `at`, or at the position of a file, begins at or above the largest size
    /// that its process may give files.
    fn is_at_size_limit(&self, description: &Description, at: Option<u64>) -> SyscallResult<bool> {
        let FileObject::File(open) = &description.open else { return Ok(false) };
        let from = match at {
            _ if open.access.append => self.state.tree.stat(open.node)?.size,
            Some(at) => at,
            None => open.offset,
        };
        Ok(from >= self.state.current().info.limits.file_size())
    }

    /// `pwrite64(2)`, as on Linux.
    pub(in crate::sentry) fn sys_pwrite64(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        from: u64,
        len: u64,
        offset: u64,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        description.check_positions()?;
        check_offset(offset)?;
        // The end of the write is a position, too.
        check_offset(offset.saturating_add(len))?;
        if let Some(control) = self.write_peer(process, descriptor, Some(offset), (from, len))? {
            return Ok(control);
        }
        self.write_parts(process, descriptor, &[(from, len.min(MAX_COUNT))], Some(offset))
    }

    pub(in crate::sentry) fn put(
        &mut self,
        descriptor: u64,
        bytes: &[u8],
        at: Option<u64>,
    ) -> SyscallResult {
        let description = self.state.table.get(descriptor)?;
        if !description.writes() {
            return Err(Errno::BADF.into());
        }
        match &description.open {
            FileObject::Output | FileObject::Messages if at.is_some() => {
                return Err(Errno::SPIPE.into());
            }
            open if open.is_stream() => {
                return match at {
                    Some(_) => Err(Errno::SPIPE.into()),
                    None => self.pour(descriptor, bytes),
                };
            }
            open @ (FileObject::Output | FileObject::Device(Device::Host, _)) => {
                let stream = match open {
                    FileObject::Output => OutputStream::Output,
                    _ => OutputStream::Host,
                };
                let from = self.output_source(stream);
                match self.streams.put_stdout(from, bytes, self.output_limit) {
                    Err(End::Unheard) if self.console.is_some() => return self.output_failed(),
                    Err(end) => return Ok(SyscallControl::End(end)),
                    Ok(()) => {}
                }
            }
            FileObject::Messages => {
                let from = self.output_source(OutputStream::Error);
                match self.streams.hear_message(from, bytes, self.output_limit) {
                    Err(End::Unheard) if self.console.is_some() => return self.output_failed(),
                    Err(end) => return Ok(SyscallControl::End(end)),
                    Ok(()) => {}
                }
                let messages = &mut self.streams.messages;
                messages.extend(bytes);
                let surplus = messages.len().saturating_sub(MESSAGES);
                messages.drain(..surplus);
            }
            FileObject::Device(Device::Full, _) => return Err(Errno::NOSPC.into()),
            FileObject::Proc(file) => {
                let file = *file;
                let from = at.unwrap_or(file.offset);
                check_offset(from.saturating_add(bytes.len() as u64))?;
                self.change().write_setting(&file, bytes, from)?;
                if at.is_none() {
                    self.advance(descriptor, bytes.len() as u64)?;
                }
            }
            FileObject::Device(..) => {}
            FileObject::File(open) => {
                let (node, size) = (open.node, self.state.tree.stat(open.node)?.size);
                let from = if open.access.append { size } else { at.unwrap_or(open.offset) };
                let own = self.state.current().info.limits.file_size();
                if from >= own && !bytes.is_empty() {
                    return Err(self.too_large().into());
                }
                let limit = own.min(self.host_size_limit(node));
                if from >= limit && !bytes.is_empty() {
                    return Err(Errno::FBIG.into());
                }
                let bytes = &bytes[..(limit - from.min(limit)).min(bytes.len() as u64) as usize];
                let end = from.saturating_add(bytes.len() as u64);
                if !bytes.is_empty() {
                    self.state.seals.may_write(node, end, size)?;
                    self.check_room_for(node, from..end)?;
                    self.publish_part(node, from.min(size)..end)?;
                }
                let Kernel { table, tree, .. } = self.change();
                let FileObject::File(open) = &mut table.get_mut(descriptor)?.open else {
                    return Err(Errno::BADF.into());
                };
                let now = crate::sentry::kernel::time::now();
                let written = match at {
                    Some(at) => open.write_at(tree, at, bytes, now)?,
                    None => open.write(tree, bytes, now)?,
                };
                if self.state.is_watched() {
                    let found = self.state.table.get(descriptor)?.found.clone();
                    self.change().notify_found(node, found.as_ref(), libc::IN_MODIFY);
                }
                return Ok(SyscallControl::Value(written as u64));
            }
            _ => return Err(Errno::BADF.into()),
        }
        Ok(SyscallControl::Value(bytes.len() as u64))
    }

    /// `getrandom(2)`: the bytes are fresh ones of the host, whatever the flags.
    pub(in crate::sentry) fn sys_getrandom(
        &mut self,
        process: &mut Process,
        to: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags & !7 != 0 {
            return Err(Errno::INVAL.into());
        }
        let (len, mut done) = (len.min(i32::MAX as u64), 0);
        loop {
            let bytes = fresh((len - done).min(MAX_TRANSFER))?;
            match copy_out(process, to.wrapping_add(done), &bytes) {
                Err(SyscallError::Errno(_)) if done > 0 => break,
                copied => copied?,
            }
            done += bytes.len() as u64;
            if done == len || self.is_spent(PART_STEPS) {
                break;
            }
        }
        Ok(SyscallControl::Value(done))
    }
}

fn fresh(len: u64) -> SyscallResult<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while done < bytes.len() {
        done += getrandom(&mut bytes[done..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}
