//! Calls that change the guest's memory map. The layout decides; what a file holds is read here.

use afresh_files::Kind;
use rustix::io::Errno;

use super::devices::Device;
use super::table::Open;
use super::{Outcome, Person, Served};
use crate::platform::Process;

impl Person {
    pub(super) fn map(&mut self, _: &Process, a: &[u64; 6]) -> Served {
        let [address, len, protection, flags, descriptor, offset] = *a;
        let flags = flags as i32;
        let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
        if flags & libc::MAP_HUGETLB != 0 {
            return Err(Errno::NOMEM.into());
        }
        // The budget comes before the bytes of a file.
        let content = if flags & libc::MAP_ANONYMOUS != 0 {
            None
        } else {
            self.state.layout.clone().map(
                fixed.then_some(address),
                false,
                len,
                protection,
                None,
            )?;
            if shared && protection & libc::PROT_WRITE as u64 != 0 {
                return Err(Errno::NODEV.into());
            }
            self.file_content(descriptor, offset, len)?
        };
        if flags & libc::MAP_FIXED_NOREPLACE != 0 && flags & libc::MAP_FIXED == 0 {
            let end = address.checked_add(len).ok_or(Errno::INVAL)?;
            if self.state.layout.touches(&(address..end)) {
                return Err(Errno::EXIST.into());
            }
        }
        let low = flags & libc::MAP_32BIT != 0;
        let (start, change) =
            self.change().layout.map(fixed.then_some(address), low, len, protection, content)?;
        Ok(Outcome::Memory(start, change))
    }

    /// The bytes that a mapping of a file begins with.
    fn file_content(&self, descriptor: u64, offset: u64, len: u64) -> Served<Option<Vec<u8>>> {
        if !offset.is_multiple_of(super::PAGE) {
            return Err(Errno::INVAL.into());
        }
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::ACCESS.into());
        }
        match &description.open {
            Open::File(open) => {
                let stat = self.state.tree.stat(open.node)?;
                if stat.kind != Kind::File {
                    return Err(Errno::NODEV.into());
                }
                let mut bytes = vec![0; len.min(stat.size.saturating_sub(offset)) as usize];
                let read = self.state.tree.read(open.node, offset, &mut bytes)?;
                bytes.truncate(read);
                Ok(Some(bytes))
            }
            Open::Device(Device::Zero, _) => Ok(None),
            _ => Err(Errno::NODEV.into()),
        }
    }

    pub(super) fn unmap(&mut self, start: u64, len: u64) -> Served {
        let change = self.change().layout.unmap(start, len)?;
        Ok(Outcome::Memory(0, change))
    }

    pub(super) fn protect(&mut self, start: u64, len: u64, protection: u64) -> Served {
        let change = self.change().layout.protect(start, len, protection)?;
        Ok(Outcome::Memory(0, change))
    }

    pub(super) fn advise(&mut self, start: u64, len: u64, advice: u64) -> Served {
        let change = self.change().layout.advise(start, len, advice)?;
        Ok(Outcome::Memory(0, change))
    }

    pub(super) fn remap(&mut self, old: u64, old_len: u64, new_len: u64, flags: u64) -> Served {
        let (start, change) = self.change().layout.remap(old, old_len, new_len, flags)?;
        Ok(Outcome::Memory(start, change))
    }

    pub(super) fn brk(&mut self, brk: u64) -> Served {
        let (brk, change) = self.change().layout.set_brk(brk);
        Ok(Outcome::Memory(brk, change))
    }
}
