//! System calls on the memory map. The layout decides; contents of files are read here.

use std::ops::Range;

use afresh_files::{Access, Kind, Node};
use rustix::io::Errno;

use crate::file_cache::FileCache;
use crate::platform::{GUEST, Process};
use crate::sentry::Sentry;
use crate::sentry::abi::MAP_LOW;
use crate::sentry::fs::seals;
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::resource_limits::is_data;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::file_backing::FileBacking;
use crate::sentry::mm::file_part::{FilePart, MAX_WHOLE};
use crate::sentry::mm::layout::traits::MappingTraits;
use crate::sentry::mm::layout::{Layout, PAGE, pages, readable};
use crate::sentry::mm::shared::writes;
use crate::sentry::mm::stub_calls::{Change, Content};
use crate::sentry::mm::user_memory::path_in;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::text::restore_text;

/// Flags that `MAP_SHARED_VALIDATE` accepts.
const VALIDATED: i32 = libc::MAP_SHARED_VALIDATE
    | libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_ANONYMOUS
    | libc::MAP_DENYWRITE
    | libc::MAP_EXECUTABLE
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_LOCKED
    | libc::MAP_NONBLOCK
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_STACK
    | MAP_LOW;

/// The sizes of huge pages in the flags of `memfd_create`.
const HUGE_SIZES: u32 = 0x3f << 26;
/// Never a program, and sealed so.
const MFD_NOEXEC_SEAL: u32 = 8;

impl Sentry {
    /// `mmap(2)`: a hint of an address is ignored, and `MAP_HUGETLB` is `ENOMEM`. Pages after the
    /// end of a file read 0 in private and in read-only mappings. A mapping with `MAP_GROWSDOWN`
    /// grows at accesses of instructions, and not at those of calls.
    pub(in crate::sentry) fn sys_mmap(
        &mut self,
        _: &Process,
        &[addr, length, prot, flags, fd, offset]: &[u64; 6],
    ) -> SyscallResult {
        let unreadable = readable(prot) != prot;
        let prot = readable(prot);
        let flags = flags as i32;
        let shared = match flags & libc::MAP_TYPE {
            libc::MAP_PRIVATE => false,
            libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE => true,
            // `MAP_DROPPABLE`, for one: with it the vDSO would keep a generator of random numbers
            // in memory that is brought back.
            _ => return Err(Errno::INVAL.into()),
        };
        let named = flags & libc::MAP_ANONYMOUS == 0;
        if !named && flags & libc::MAP_TYPE == libc::MAP_SHARED_VALIDATE {
            return Err(Errno::INVAL.into());
        }
        if flags & libc::MAP_TYPE == libc::MAP_SHARED_VALIDATE && flags & !VALIDATED != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
        if flags & libc::MAP_HUGETLB != 0 {
            return Err(Errno::NOMEM.into());
        }
        if named && self.state.table.get(fd)?.flags & libc::O_PATH as u32 != 0 {
            return Err(Errno::BADF.into());
        }
        if named && !offset.is_multiple_of(PAGE) {
            return Err(Errno::INVAL.into());
        }
        if named && !is_within_files(offset, length) {
            return Err(Errno::OVERFLOW.into());
        }
        let opened = if named { Some(self.state.table.get(fd)?.writes()) } else { None };
        let named = named && (!shared || !self.shares_zeros(fd, prot)?);
        let at = fixed.then_some(addr);
        let watched = named
            && matches!(
                self.state.table.get(fd)?.open,
                FileObject::Device(Device::Generation(_), _)
            );
        // A private mapping follows the device, too, because it is never written.
        let shared = shared || watched;
        // Also with `MAP_FIXED`: it must not replace anything.
        if flags & libc::MAP_FIXED_NOREPLACE != 0 {
            let end = addr.checked_add(length).ok_or(Errno::INVAL)?;
            if self.state.layout.touches(&(addr..end)) {
                return Err(Errno::EXIST.into());
            }
        }
        let low = flags & MAP_LOW != 0;
        // The budget comes before the bytes of a file.
        let sparse = flags & libc::MAP_NORESERVE != 0
            && !named
            && !shared
            && Layout::is_sparse_length(length)
            && flags & libc::MAP_LOCKED == 0
            && !self.state.layout.locks_new();
        let access = if sparse { 0 } else { prot };
        let planned = self.state.layout.plan(at, low, length, access, named || shared)?;
        let whole = planned.end - planned.start;
        self.state.check_address_space(whole, &planned, is_data(prot, shared))?;
        let locked = flags & libc::MAP_LOCKED != 0 || self.state.layout.locks_new();
        if flags & libc::MAP_LOCKED != 0 && self.state.current().info.limits.locked_bytes() == 0 {
            return Err(Errno::PERM.into());
        }
        if locked {
            self.may_lock_more(whole - self.state.layout.locked_within(&planned))?;
            // It merges with no mapping that is not locked, and may have pages beyond the end of
            // its file.
            let pieces = if named && !shared { 2 } else { 1 };
            self.state.layout.check_room(self.state.layout.growth(&planned, pieces))?;
        }
        let traits = MappingTraits {
            unreadable,
            grows: flags & libc::MAP_GROWSDOWN != 0 && !named && !shared && !sparse,
            ..MappingTraits::default()
        };
        if traits != MappingTraits::default() {
            // It merges with no mapping that is unlike it.
            self.state.layout.check_room(self.state.layout.growth(&planned, 2))?;
        }
        // Other devices share nothing: their mappings are private.
        let node = match shared {
            true => self.shared_file(named.then_some(fd), offset, length, prot)?,
            false => None,
        };
        let offset = if named { offset } else { 0 };
        let origin = match node {
            None if named => self.origin_of(fd, &planned, offset)?,
            _ => None,
        };
        let content = match node {
            Some(node) => self.shared_content(node, offset, whole, prot).map(Some),
            None if named => self.file_content(fd, offset, length, prot),
            None => Ok(None),
        };
        let mapped = content.and_then(|content| {
            let layout = &mut self.change().layout;
            Ok(match origin {
                Some((origin, size)) => layout.map_file(planned, prot, content, origin, size)?,
                None if sparse => layout.map_sparse(at, low, length, prot)?,
                None => layout.map(at, low, length, prot, content)?,
            })
        });
        let (start, change) = match mapped {
            Ok(mapped) => mapped,
            Err(error) => {
                self.drop_unshared()?;
                return Err(error);
            }
        };
        let read_only = node
            .is_some_and(|node| opened == Some(false) || self.state.seals.may_map(node).is_err());
        if let Some(node) = node {
            let state = self.change();
            state.layout.share(start..start + whole, FileBacking::new(node, start, offset));
            self.count_shared()?;
        }
        let traits = MappingTraits { read_only, ..traits };
        if traits != MappingTraits::default() {
            self.change().layout.set_traits(&(start..start + whole), traits);
        }
        if locked {
            self.change().layout.set_locked(&(start..start + whole), true)?;
        }
        Ok(SyscallControl::Memory(start, change))
    }

    /// Whether a descriptor is `/dev/zero`: a shared mapping of it is shared memory without a file.
    /// `EACCES` if it does not allow the protection.
    fn shares_zeros(&self, descriptor: u64, protection: u64) -> SyscallResult<bool> {
        let description = self.state.table.get(descriptor)?;
        if !matches!(description.open, FileObject::Device(Device::Zero, _)) {
            return Ok(false);
        }
        match description.reads() && (description.writes() || !writes(protection)) {
            true => Ok(true),
            false => Err(Errno::ACCESS.into()),
        }
    }

    /// The part of the file of `descriptor` that a private mapping at `planned` begins as, and the
    /// file's size; `None` for a device.
    fn origin_of(
        &self,
        descriptor: u64,
        planned: &Range<u64>,
        offset: u64,
    ) -> SyscallResult<Option<(FileBacking, u64)>> {
        let FileObject::File(open) = &self.state.table.get(descriptor)?.open else {
            return Ok(None);
        };
        let size = self.state.tree.stat(open.node)?.size;
        Ok(Some((FileBacking::new(open.node, planned.start, offset), size)))
    }

    /// The file that a shared mapping shows, which is kept: that of `descriptor`, or a new one
    /// without a name.
    fn shared_file(
        &mut self,
        descriptor: Option<u64>,
        offset: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult<Option<Node>> {
        let Some(descriptor) = descriptor else {
            let size = len.checked_next_multiple_of(PAGE).ok_or(Errno::NOMEM)?;
            let tree = &mut self.change().tree;
            let node = tree.create_unnamed(0o600, crate::sentry::kernel::time::now())?;
            let sized = tree.set_size(node, size, crate::sentry::kernel::time::now());
            // A child may make it writable.
            let live = sized
                .map_err(|refused| refused.errno())
                .and_then(|()| self.make_live(node, 0..size, true))
                .and_then(|()| self.change().keep_shared(node));
            self.change().tree.release(node);
            live?;
            return Ok(Some(node));
        };
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::ACCESS.into());
        }
        let open = match &description.open {
            FileObject::File(open) => open,
            FileObject::Device(Device::Generation(_), _) => {
                return self.map_generation(offset, len, protection).map(Some);
            }
            _ => return Ok(None),
        };
        let (node, access) = (open.node, open.access);
        let stat = self.state.tree.stat(node)?;
        if stat.kind != Kind::File {
            return Err(Errno::NODEV.into());
        }
        if writes(protection) {
            if !access.write {
                return Err(Errno::ACCESS.into());
            }
            self.state.seals.may_map(node)?;
        }
        let len = len.checked_next_multiple_of(PAGE).ok_or(Errno::NOMEM)?;
        let range = offset..offset.saturating_add(len);
        if range.end > stat.size.next_multiple_of(PAGE) {
            // Only the memory of a live file has an end.
            self.make_live(node, range.clone(), writes(protection))?;
        }
        self.keep_mapped(node, range, protection)?;
        Ok(Some(node))
    }

    /// `msync(2)`: checks its arguments. Writes are shared already.
    pub(in crate::sentry) fn sys_msync(
        &mut self,
        start: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        let (flags, both) = (flags as i32, libc::MS_ASYNC | libc::MS_SYNC);
        if flags & !(both | libc::MS_INVALIDATE) != 0
            || flags & both == both
            || !start.is_multiple_of(PAGE)
        {
            return Err(Errno::INVAL.into());
        }
        let end = len.checked_next_multiple_of(PAGE).and_then(|len| start.checked_add(len));
        let end = end.ok_or(Errno::NOMEM)?;
        if end > start && !self.state.layout.allows(&(start..end), 0) {
            return Err(Errno::NOMEM.into());
        }
        let locked = self.state.layout.locked_within(&(start..end)) > 0;
        if flags & libc::MS_INVALIDATE != 0 && locked {
            return Err(Errno::BUSY.into());
        }
        Ok(ZERO)
    }

    /// `memfd_create(2)`: `MFD_HUGETLB` is `ENODEV`, as on a machine without huge pages.
    pub(in crate::sentry) fn sys_memfd_create(
        &mut self,
        process: &Process,
        name: u64,
        flags: u64,
    ) -> SyscallResult {
        const MAX_NAME: usize = 249;
        let flags = flags as u32;
        let both = libc::MFD_EXEC | MFD_NOEXEC_SEAL;
        let is_huge = flags & libc::MFD_HUGETLB != 0;
        let huge = if is_huge { libc::MFD_HUGETLB | HUGE_SIZES } else { 0 };
        let known = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | both | huge;
        if flags & !known != 0 || flags & both == both {
            return Err(Errno::INVAL.into());
        }
        let plain = flags & MFD_NOEXEC_SEAL != 0;
        if path_in(process, name)?.len() > MAX_NAME {
            return Err(Errno::INVAL.into());
        }
        if is_huge {
            return Err(Errno::NODEV.into());
        }
        self.state.table.check_room()?;
        let access = Access { read: true, write: true, append: false };
        let mode = if plain { 0o666 } else { 0o777 };
        let state = self.change();
        let node = state.tree.create_unnamed(mode, crate::sentry::kernel::time::now())?;
        if let Err(error) = state.own_new(node) {
            state.tree.release(node);
            return Err(error);
        }
        let Kernel { tree, seals, .. } = state;
        let open = tree.open(node, access);
        tree.release(node);
        let begun = match flags & libc::MFD_ALLOW_SEALING != 0 || plain {
            true => {
                if plain {
                    seals::EXEC
                } else {
                    0
                }
            }
            false => seals::SEAL,
        };
        seals.begin(node, begun, tree);
        let close = if flags & libc::MFD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 };
        self.add(FileObject::File(open?), libc::O_RDWR | close)
    }

    /// The bytes that a mapping of a file begins with.
    fn file_content(
        &mut self,
        descriptor: u64,
        offset: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult<Option<Content>> {
        if !offset.is_multiple_of(PAGE) {
            return Err(Errno::INVAL.into());
        }
        let description = self.state.table.get(descriptor)?;
        if !description.reads() {
            return Err(Errno::ACCESS.into());
        }
        match &description.open {
            FileObject::File(open) => {
                let node = open.node;
                self.content_of(node, offset, len, protection).map(Some)
            }
            FileObject::Device(Device::Zero | Device::Full, _) => Ok(None),
            FileObject::Device(Device::Generation(_), _) => {
                let node = self.map_generation(offset, len, protection)?;
                self.content_of(node, offset, len, protection).map(Some)
            }
            _ => Err(Errno::NODEV.into()),
        }
    }

    /// The bytes of a file that a mapping of it begins with.
    pub(in crate::sentry) fn content_of(
        &mut self,
        node: Node,
        offset: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult<Content> {
        let stat = self.state.tree.stat(node)?;
        if stat.kind != Kind::File {
            return Err(Errno::NODEV.into());
        }
        let most = self.state.layout.limit() / FileCache::SHARE;
        let tree = &self.state.tree;
        let shown = self.contents.show(tree, node, (offset, len, protection), most)?;
        if let Some((shown, len)) = shown {
            return Ok(Content::Shown(shown, len, protection));
        }
        let len = len.min(stat.size.saturating_sub(offset));
        if len > MAX_WHOLE {
            return Ok(Content::Copied(FilePart::new(tree, node, offset..offset + len)?));
        }
        let mut bytes = vec![0; len as usize];
        let read = tree.read(node, offset, &mut bytes)?;
        bytes.truncate(read);
        Ok(Content::Bytes(bytes))
    }

    /// `munmap(2)`, as on Linux.
    pub(in crate::sentry) fn sys_munmap(&mut self, start: u64, len: u64) -> SyscallResult {
        let change = self.change().layout.unmap(start, len)?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// `mseal(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mseal(
        &mut self,
        start: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags != 0 || !start.is_multiple_of(PAGE) {
            return Err(Errno::INVAL.into());
        }
        if len > 0 {
            let range = pages(start, len)?;
            self.change().layout.seal(&range)?;
        }
        Ok(ZERO)
    }

    /// `mprotect(2)`, as on Linux.
    pub(in crate::sentry) fn sys_mprotect(
        &mut self,
        process: &Process,
        start: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult {
        self.state.may_open_memory(start, len, protection)?;
        let texts = if writes(protection) { self.twins_in(start, len) } else { Vec::new() };
        if writes(protection) && !self.state.shares.is_empty() {
            let end = start.saturating_add(len);
            let shared = self.state.layout.shared().into_iter();
            let touched = shared.filter(|s| s.range.start < end && start < s.range.end);
            let nodes = touched.map(|shared| shared.share.node).collect();
            self.make_all_live(nodes)?;
            if self.unattached {
                self.count_shared()?;
            }
        }
        let mut change = self.change().layout.protect_as(start, len, protection)?;
        for text in texts {
            restore_text(process, &text, &mut change)?;
        }
        Ok(SyscallControl::Memory(0, change))
    }

    /// `madvise(2)`: only `MADV_DONTNEED` has an effect, on private memory, and on a file for one
    /// mapping a call. Hints such as `MADV_FREE` and `MADV_DONTFORK` are accepted, and other advice
    /// is `EINVAL`.
    pub(in crate::sentry) fn sys_madvise(
        &mut self,
        process: &Process,
        start: u64,
        len: u64,
        advice: u64,
    ) -> SyscallResult {
        if advice as i32 == libc::MADV_DONTNEED && self.shows_twin(process, start, len)? {
            // Written text is no twin, so that this was never written.
            return Ok(SyscallControl::Memory(0, Change::default()));
        }
        if advice as i32 == libc::MADV_DONTNEED
            && let Some(change) = self.renew_file_pages(start, len)?
        {
            return Ok(SyscallControl::Memory(0, change));
        }
        let change = self.change().layout.advise(start, len, advice)?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// Discards the pages of one private mapping of a file, which then shows the file again; `None`
    /// for other memory.
    fn renew_file_pages(&mut self, start: u64, len: u64) -> SyscallResult<Option<Change>> {
        let Ok(range) = pages(start, len) else { return Ok(None) };
        let parts = self.state.layout.parts(&range);
        let [(part, mapping)] = &parts[..] else { return Ok(None) };
        let (Some(origin), false) = (mapping.origin, mapping.reserved) else { return Ok(None) };
        if *part != range || mapping.share.is_some() || mapping.locked {
            return Ok(None);
        }
        let (node, offset) = (origin.node, origin.offset(range.start));
        if self.state.tree.stat(node).is_err() {
            return Ok(None);
        }
        // It may be written through a shared mapping.
        self.publish_part(node, offset..offset.saturating_add(len))?;
        let content = self.content_of(node, offset, range.end - range.start, mapping.protection)?;
        let (at, len) = (Some(range.start), range.end - range.start);
        let layout = &mut self.change().layout;
        let (_, change) = layout.map(at, false, len, mapping.protection, Some(content))?;
        layout.originate(range, origin);
        Ok(Some(change))
    }

    /// `brk(2)`, as on Linux.
    pub(in crate::sentry) fn sys_brk(&mut self, brk: u64) -> SyscallResult {
        let now = self.state.layout.brk();
        // A break that is not allowed stays, as one without memory.
        let allowed =
            self.state.check_address_space(brk.saturating_sub(now), &(0..0), true).is_ok();
        let allowed = allowed
            && (!self.state.layout.locks_new()
                || self.may_lock_more(brk.saturating_sub(now)).is_ok());
        let brk = if brk > now && !allowed { now } else { brk };
        let (brk, change) = self.change().layout.set_brk(brk);
        Ok(SyscallControl::Memory(brk, change))
    }
}

/// Whether a file can be long enough for a mapping. One without room among the addresses has
/// another error.
fn is_within_files(offset: u64, len: u64) -> bool {
    let len = if len > GUEST.end { 0 } else { len.next_multiple_of(PAGE) };
    offset.checked_add(len).is_some_and(|end| end <= i64::MAX as u64)
}
