//! Calls that list mounts: `listmount` and `statmount`. The mounts are the same in every guest.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::mounts::{FileSystem, MOUNTS, Mount, UNIQUE_OFFSET};
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult, ZERO};

/// The root of the caller, in place of the number of a mount.
const LSMT_ROOT: u64 = u64::MAX;
const LISTMOUNT_REVERSE: u64 = 1;
/// Numbers that one call may have room for.
const MAX_LISTED: u64 = 1_000_000;
/// Bytes of the first `struct mnt_id_req`, and of a later one.
const REQUEST_LEN: u64 = 24;
const MAX_REQUEST_LEN: u64 = 32;
/// Bytes of `struct statmount` in front of its strings.
const STATMOUNT_LEN: usize = 512;
const MOUNT_ATTR_RDONLY: u64 = 1;
const MS_PRIVATE: u64 = 1 << 18;

// Parts of `struct statmount`.
const SB_BASIC: u64 = 1;
const MNT_BASIC: u64 = 2;
const PROPAGATE_FROM: u64 = 4;
const MNT_ROOT: u64 = 8;
const MNT_POINT: u64 = 0x10;
const FS_TYPE: u64 = 0x20;
const MNT_OPTS: u64 = 0x80;

/// `struct mnt_id_req`.
struct MountRequest {
    mount: u64,
    /// The parts that are asked for, or the mount behind which a list begins.
    parameter: u64,
}

impl MountRequest {
    fn decode(process: &Process, at: u64) -> SyscallResult<Self> {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let len = word(&[&copy_in(process, at, 4)?[..], &[0; 4]].concat());
        if len > PAGE {
            return Err(Errno::TOOBIG.into());
        }
        if len < REQUEST_LEN {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, at, len as usize)?;
        let rest = bytes.get(MAX_REQUEST_LEN as usize..).unwrap_or_default();
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Errno::TOOBIG.into());
        }
        let request = Self { mount: word(&bytes[8..16]), parameter: word(&bytes[16..24]) };
        let is_zero = |bytes: Option<&[u8]>| bytes.is_none_or(|bytes| word(bytes) == 0);
        // There is one namespace of mounts.
        if bytes[4..8] != [0; 4] || request.mount <= UNIQUE_OFFSET {
            return Err(Errno::INVAL.into());
        }
        if !is_zero(bytes.get(24..32)) {
            return Err(Errno::NOENT.into());
        }
        Ok(request)
    }

    fn mount(&self) -> Result<&'static Mount, Errno> {
        let is_meant = |mount: &&Mount| mount.system.mount_id(true) == self.mount;
        MOUNTS.iter().find(is_meant).ok_or(Errno::NOENT)
    }
}

/// Whether a mount is `above`, or is mounted somewhere below it.
fn is_below(mount: &Mount, above: FileSystem) -> bool {
    mount.system == above
        || mount.system != mount.parent
            && mount.parent.mount().is_some_and(|parent| is_below(parent, above))
}

impl Sentry {
    /// `listmount(2)`: a guest has one namespace of mounts, and no call changes it.
    pub(in crate::sentry) fn sys_listmount(
        &mut self,
        process: &mut Process,
        request: u64,
        to: u64,
        count: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as u32 as u64 & !LISTMOUNT_REVERSE != 0 {
            return Err(Errno::INVAL.into());
        }
        if count > MAX_LISTED {
            return Err(Errno::OVERFLOW.into());
        }
        let request = MountRequest::decode(process, request)?;
        if request.parameter != 0 && request.parameter <= UNIQUE_OFFSET {
            return Err(Errno::INVAL.into());
        }
        let above = match request.mount {
            LSMT_ROOT => FileSystem::Root,
            _ => request.mount()?.system,
        };
        let reverse = flags & LISTMOUNT_REVERSE != 0;
        let listed = MOUNTS.iter().filter(|mount| is_below(mount, above));
        let mut ids: Vec<u64> = listed.map(|mount| mount.system.mount_id(true)).collect();
        if reverse {
            ids.reverse();
        }
        let is_behind = |id: u64| match (request.parameter, reverse) {
            (0, _) => true,
            (last, false) => id > last,
            (last, true) => id < last,
        };
        ids.retain(|id| *id != request.mount && is_behind(*id));
        ids.truncate(count as usize);
        let bytes = ids.iter().fold(StructBuilder::default(), |bytes, id| bytes.word(*id)).0;
        copy_out(process, to, &bytes)?;
        Ok(SyscallControl::Value(ids.len() as u64))
    }

    /// `statmount(2)`: the number of the namespace is not reported.
    pub(in crate::sentry) fn sys_statmount(
        &mut self,
        process: &mut Process,
        request: u64,
        to: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let request = MountRequest::decode(process, request)?;
        let bytes = describe_mount(request.mount()?, request.parameter);
        let has_strings = bytes.len() > STATMOUNT_LEN;
        if has_strings && len < bytes.len() as u64 {
            return Err(SyscallError::Errno(Errno::OVERFLOW));
        }
        copy_out(process, to, &bytes[..bytes.len().min(len as usize)])?;
        Ok(ZERO)
    }
}

/// `struct statmount` with the parts in `wanted`.
fn describe_mount(mount: &Mount, wanted: u64) -> Vec<u8> {
    let has = |part: u64| wanted & part != 0;
    let given = |part: u64, value: u64| if has(part) { value } else { 0 };
    let options = if mount.read_only { "ro" } else { "rw" };
    let (mut strings, mut places) = (Vec::new(), [0; 4]);
    let texts =
        [(MNT_OPTS, options), (FS_TYPE, mount.kind), (MNT_ROOT, "/"), (MNT_POINT, mount.path)];
    for (place, (part, text)) in places.iter_mut().zip(texts) {
        if has(part) {
            *place = strings.len() as u32;
            strings.extend(text.as_bytes());
            strings.push(0);
        }
    }
    let [options, kind, root, point] = places;
    let [own, parent] = [mount.system, mount.parent];
    let known = SB_BASIC | MNT_BASIC | PROPAGATE_FROM | MNT_ROOT | MNT_POINT | FS_TYPE | MNT_OPTS;
    let read_only = u64::from(mount.read_only) * MOUNT_ATTR_RDONLY;
    let bytes = StructBuilder::default()
        .int((STATMOUNT_LEN + strings.len()) as u32)
        .int(options)
        .word(wanted & known)
        .int(0)
        .int(given(SB_BASIC, own.device().into()) as u32)
        .word(given(SB_BASIC, own.magic()))
        .int(given(SB_BASIC, read_only) as u32)
        .int(kind)
        .word(given(MNT_BASIC, own.mount_id(true)))
        .word(given(MNT_BASIC, parent.mount_id(true)))
        .int(given(MNT_BASIC, own.mount_id(false)) as u32)
        .int(given(MNT_BASIC, parent.mount_id(false)) as u32)
        .word(given(MNT_BASIC, read_only))
        .word(given(MNT_BASIC, MS_PRIVATE))
        .zeros(24)
        .int(root)
        .int(point);
    let mut bytes = bytes.0;
    bytes.resize(STATMOUNT_LEN, 0);
    bytes.extend(strings);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_described_by_the_parts_that_are_asked_for() {
        let shm = FileSystem::SharedMemory.mount().unwrap();
        let bytes = describe_mount(shm, FS_TYPE | MNT_POINT | MNT_BASIC);
        let int = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(int(0) as usize, bytes.len());
        assert_eq!((int(56), int(60)), (6, 4), "numbers of mountinfo");
        assert_eq!(&bytes[STATMOUNT_LEN..], b"tmpfs\0/dev/shm\0");
        assert_eq!(int(108), 6, "the place of the path");
        assert_eq!(describe_mount(shm, 0).len(), STATMOUNT_LEN);
    }

    #[test]
    fn mounts_below_one_are_found() {
        let below = |above| MOUNTS.iter().filter(|mount| is_below(mount, above)).count();
        assert_eq!([FileSystem::Root, FileSystem::Dev, FileSystem::Sys].map(below), [6, 3, 1]);
    }
}
