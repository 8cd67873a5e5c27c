//! `openat2`: opening with conditions on the way to a file.

use afresh_files::{Kind, Tree, Walk};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::KERNEL_LARGEFILE;
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::fs::proc_paths::ProcTarget;
use crate::sentry::mm::user_memory::{copy_in, path_in};
use crate::sentry::result::SyscallResult;

/// Length of `struct open_how`, and the longest that a later one may have.
const LEN: u64 = 24;
const MAX_OPEN_HOW_SIZE: u64 = 4096;
/// Flags of an open that are known.
const FLAGS: u64 = (libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_NOCTTY
    | libc::O_TRUNC
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_ASYNC
    | libc::O_DIRECT
    | libc::O_LARGEFILE
    | KERNEL_LARGEFILE
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_CLOEXEC
    | libc::O_PATH
    | libc::O_TMPFILE) as u64;
const WITH_PATH: u64 =
    (libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;

/// Conditions on the way to a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::sentry) struct Resolve(u64);

impl Resolve {
    const NO_XDEV: u64 = 1;
    const NO_MAGICLINKS: u64 = 2;
    const NO_SYMLINKS: u64 = 4;
    const BENEATH: u64 = 8;
    const IN_ROOT: u64 = 16;
    const CACHED: u64 = 32;
    const ALL: u64 = 63;

    fn has(self, bits: u64) -> bool {
        self.0 & bits != 0
    }
}

impl Sentry {
    /// `openat2(2)`: as `openat`. All files are in memory, so that `RESOLVE_CACHED` finds each of
    /// them.
    pub(in crate::sentry) fn sys_openat2(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        how: u64,
        len: u64,
    ) -> SyscallResult {
        if len < LEN {
            return Err(Errno::INVAL.into());
        }
        if len > MAX_OPEN_HOW_SIZE {
            return Err(Errno::TOOBIG.into());
        }
        let bytes = copy_in(process, how, len as usize)?;
        if bytes[LEN as usize..].iter().any(|byte| *byte != 0) {
            return Err(Errno::TOOBIG.into());
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (flags, mode, resolve) = (word(0), word(8), Resolve(word(16)));
        let has = |flag: i32| flags & flag as u64 == flag as u64;
        let makes = has(libc::O_CREAT) || has(libc::O_TMPFILE);
        let both = resolve.has(Resolve::BENEATH) && resolve.has(Resolve::IN_ROOT);
        if flags & !FLAGS != 0
            || resolve.has(!Resolve::ALL)
            || both
            || mode & !0o7777 != 0
            || mode != 0 && !makes
            || has(libc::O_PATH) && flags & !WITH_PATH != 0
        {
            return Err(Errno::INVAL.into());
        }
        // All files are in memory, but a change may wait.
        if resolve.has(Resolve::CACHED) && (makes || has(libc::O_TRUNC)) {
            return Err(Errno::AGAIN.into());
        }
        let path = path_in(process, path)?;
        self.open_within(at, &path, flags, mode, resolve)
    }

    /// As [`Sentry::reach`], under conditions.
    pub(in crate::sentry) fn reach_within(
        &self,
        at: u64,
        path: &[u8],
        resolve: Resolve,
        how: impl Fn(Walk) -> Walk,
    ) -> SyscallResult<ResolvedPath> {
        let within = resolve.has(Resolve::BENEATH | Resolve::IN_ROOT);
        if resolve.has(Resolve::NO_SYMLINKS) {
            self.check_links(at, path, how(Walk::new(Tree::ROOT)))?;
        }
        if resolve.has(Resolve::NO_MAGICLINKS)
            && how(Walk::new(Tree::ROOT)).follow
            && let Ok(
                ResolvedPath::Own(ProcTarget::Program(_) | ProcTarget::Current(_))
                | ResolvedPath::Own(ProcTarget::Root(_)),
            ) = self.reach(at, path, |walk| walk.follow(false))
        {
            return Err(Errno::LOOP.into());
        }
        if !within {
            let reached = self.reach(at, path, how)?;
            let leaves = resolve.has(Resolve::NO_MAGICLINKS | Resolve::NO_SYMLINKS);
            return match &reached {
                ResolvedPath::Own(ProcTarget::Descriptor(..)) if leaves => Err(Errno::LOOP.into()),
                ResolvedPath::Own(_) if resolve.has(Resolve::NO_XDEV) => Err(Errno::XDEV.into()),
                _ => Ok(reached),
            };
        }
        if path.is_empty() {
            return Err(Errno::NOENT.into());
        }
        let from = self.base(at, b".")?;
        if resolve.has(Resolve::BENEATH) {
            let walk = how(self.state.searching(Walk::beneath(from)));
            return match self.state.tree.walk(path, walk) {
                Err(afresh_files::Refused::NotPermitted) => Err(Errno::XDEV.into()),
                place => Ok(ResolvedPath::Place(place?)),
            };
        }
        let walk = how(self.state.searching(Walk::new(from)).root(from));
        Ok(ResolvedPath::Place(self.state.tree.walk(path, walk)?))
    }

    /// Refuses a path that leads through a symbolic link, or to one that would be followed.
    fn check_links(&self, at: u64, path: &[u8], how: Walk) -> SyscallResult<()> {
        let names = path.split(|byte| *byte == b'/');
        let mut end = 0;
        for name in names {
            end += name.len();
            let last = end == path.len();
            if !name.is_empty()
                && (!last || how.follow && !how.name)
                && let Ok(ResolvedPath::Place(place)) =
                    self.reach(at, &path[..end], |walk| walk.follow(false))
                && place.found.is_some_and(|(_, kind)| kind == Kind::Link)
            {
                return Err(Errno::LOOP.into());
            }
            end += 1;
        }
        Ok(())
    }
}
