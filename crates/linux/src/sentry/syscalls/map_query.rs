//! `ioctl(PROCMAP_QUERY)` of an open `/proc/<process>/maps`: one mapping in binary form.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::directory_paths::DirectoryPaths;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::{Mapping, PAGE};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallResult, ZERO};

/// Bytes of `struct procmap_query`, and of its part that a caller must give.
const QUERY_LEN: usize = 104;
const MIN_QUERY_LEN: u64 = 24;
/// Where the sizes and the addresses of the name and the build number are.
const NAME_LEN: usize = 80;
const BUILD_LEN: usize = 84;
const NAME_AT: usize = 88;
const BUILD_AT: usize = 96;

// Flags of a query. The first four are rights, as those of a mapping.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;
const RIGHTS: u64 = READABLE | WRITABLE | EXECUTABLE | SHARED;
const COVERING_OR_NEXT: u64 = 0x10;
const FILE_BACKED: u64 = 0x20;

/// The rights of a mapping.
fn rights(mapping: &Mapping) -> u64 {
    let asked = Kernel::asked_protection(mapping);
    let right = |protection: i32, bit: u64| if asked & protection as u64 != 0 { bit } else { 0 };
    right(libc::PROT_READ, READABLE)
        | right(libc::PROT_WRITE, WRITABLE)
        | right(libc::PROT_EXEC, EXECUTABLE)
        | if mapping.share.is_some() { SHARED } else { 0 }
}

impl Sentry {
    /// Answers a query at `at` about a memory. No mapping has a build number.
    pub(in crate::sentry) fn query_mapping(
        &self,
        process: &mut Process,
        memory: u32,
        at: u64,
    ) -> SyscallResult {
        let word = |bytes: &[u8], at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
        };
        let len = word(&copy_in(process, at, 8)?, 0);
        if len > PAGE {
            return Err(Errno::TOOBIG.into());
        }
        if len < MIN_QUERY_LEN {
            return Err(Errno::INVAL.into());
        }
        let given = copy_in(process, at, len as usize)?;
        let (known, rest) = given.split_at(given.len().min(QUERY_LEN));
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Errno::TOOBIG.into());
        }
        let mut query = [0; QUERY_LEN];
        query[..known.len()].copy_from_slice(known);
        let int = |at: usize| word(&query, at) as u32;
        let (flags, address) = (word(&query, 8), word(&query, 16));
        let names = (int(NAME_LEN), word(&query, NAME_AT));
        let pairs = [names, (int(BUILD_LEN), word(&query, BUILD_AT))];
        let is_half = pairs.iter().any(|(len, at)| (*len == 0) != (*at == 0));
        if flags & !(RIGHTS | COVERING_OR_NEXT | FILE_BACKED) != 0 || is_half {
            return Err(Errno::INVAL.into());
        }
        let layout = self.state.layout_of(memory).ok_or(Errno::SRCH)?;
        let covering = layout.mapping_at(address).into_iter();
        let meets = |mapping: &Mapping| {
            let has_file = mapping.share.or(mapping.origin).is_some();
            rights(mapping) & flags & RIGHTS == flags & RIGHTS
                && (flags & FILE_BACKED == 0 || has_file)
        };
        let next = layout.all_from(address.saturating_add(1));
        let next = next.take(if flags & COVERING_OR_NEXT != 0 { usize::MAX } else { 0 });
        let mut found = covering.chain(next).filter(|(_, mapping)| meets(mapping));
        let (range, mapping) = found.next().ok_or(Errno::NOENT)?;
        let (device, inode, offset) = self.state.mapped_file(range.start, mapping);
        let mut name = Vec::new();
        if names.0 > 0 {
            let paths = &mut DirectoryPaths::default();
            name = self.state.mapping_name(memory, (&range, mapping), paths).into_bytes();
            if !name.is_empty() {
                name.push(0);
            }
        }
        if name.len() > names.0 as usize {
            return Err(Errno::NAMETOOLONG.into());
        }
        let reply = StructBuilder::default()
            .word(len)
            .word(flags)
            .word(address)
            .word(range.start)
            .word(range.end)
            .word(rights(mapping))
            .word(PAGE)
            .word(offset)
            .word(inode)
            .int(0)
            .int(device)
            .int(name.len() as u32)
            .int(0)
            .word(names.1)
            .word(pairs[1].1);
        if !name.is_empty() {
            copy_out(process, names.1, &name)?;
        }
        copy_out(process, at, &reply.0[..known.len()])?;
        Ok(ZERO)
    }
}
