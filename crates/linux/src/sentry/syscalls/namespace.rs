//! User namespaces and capabilities: `unshare`, `setns`, `capget` and `capset`.
//!
//! Promises: a process in a new namespace gains no right over the rest of its guest. A guest
//! has no further namespaces of other kinds, as on a kernel that is built without them.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::fs::proc_settings::{ProcFile, ProcSetting, USER_KIND};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::shared_parts::SharedPart;
use crate::sentry::kernel::user_namespaces::{ALL_CAPABILITIES, Credentials, INITIAL, SYS_ADMIN};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallResult, ZERO};

/// Forms of `capget` and `capset`, each with the words of a set, and the last of them
/// (`_LINUX_CAPABILITY_VERSION_3`).
const FORMS: [(u32, usize); 3] = [(0x1998_0330, 1), (0x2007_1026, 2), (FORM, 2)];
const FORM: u32 = 0x2008_0522;
/// Namespaces of kinds that a guest has one of.
const SINGLE: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWTIME;
/// Parts of a process that threads share, and no other processes.
const SHARED: i32 = libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_THREAD
    | libc::CLONE_SIGHAND
    | libc::CLONE_VM;

impl Sentry {
    /// Refuses flags of `clone` and `unshare` for namespaces that cannot be made.
    pub(in crate::sentry) fn check_namespace_flags(&self, flags: i32) -> Result<(), Errno> {
        let new = flags & libc::CLONE_NEWUSER != 0;
        let own = self.state.credentials();
        let privileged = own.namespace != INITIAL && own.effective & 1 << SYS_ADMIN != 0;
        match flags & SINGLE {
            0 => {}
            _ if new || privileged => return Err(Errno::INVAL),
            _ => return Err(Errno::PERM),
        }
        match new {
            true if flags & libc::CLONE_FS != 0 => Err(Errno::INVAL),
            true if self.state.has_own_root() => Err(Errno::PERM),
            _ => Ok(()),
        }
    }

    /// `unshare(2)`: user namespaces. Other kinds are `EINVAL`, and threads share files and
    /// descriptors.
    pub(in crate::sentry) fn sys_unshare(&mut self, flags: u64) -> SyscallResult {
        let flags = flags as i32;
        if flags & !(SINGLE | SHARED | libc::CLONE_NEWUSER) != 0 {
            return Err(Errno::INVAL.into());
        }
        let is_single = self.state.current().threads.len() == 1;
        let apart = libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;
        if !is_single && flags & apart != 0 {
            return Err(Errno::INVAL.into());
        }
        self.check_namespace_flags(flags & !libc::CLONE_FS)?;
        // Threads share directory and descriptors permanently.
        if !is_single && flags & SHARED != 0 {
            return self.refuse_unknown(libc::SYS_unshare);
        }
        let id = self.state.processes.current_id();
        if flags & libc::CLONE_FILES != 0 && self.state.table.is_shared(id) {
            self.state.table.check_unshare(id)?;
            self.change().table.unshare(id);
        }
        if flags & libc::CLONE_FS != 0 {
            self.change().shared_parts.leave(SharedPart::Directories, id);
        }
        if flags & libc::CLONE_NEWUSER != 0 {
            self.change().enter_new_namespace(id)?;
        }
        Ok(ZERO)
    }

    /// `setns(2)`: user namespaces. Other kinds are `EINVAL` or `EPERM`.
    pub(in crate::sentry) fn sys_setns(&mut self, descriptor: u64, kinds: u64) -> SyscallResult {
        let kinds = kinds as i32;
        let (kind, namespace) = match &self.state.table.get(descriptor)?.open {
            FileObject::Proc(ProcFile { setting: ProcSetting::Namespace(kind, id), .. }) => {
                (*kind, *id)
            }
            FileObject::Process(id) => {
                if kinds == 0 || kinds & !(SINGLE | libc::CLONE_NEWUSER) != 0 {
                    return Err(Errno::INVAL.into());
                }
                if !self.state.processes.lives(*id) {
                    return Err(Errno::SRCH.into());
                }
                if kinds != libc::CLONE_NEWUSER {
                    return Err(Errno::PERM.into());
                }
                (USER_KIND, self.state.namespaces.of(*id).namespace)
            }
            _ => return Err(Errno::INVAL.into()),
        };
        if kind != USER_KIND {
            return Err(
                if kinds & libc::CLONE_NEWUSER == 0 { Errno::PERM } else { Errno::INVAL }.into()
            );
        }
        if kinds != 0 && kinds != libc::CLONE_NEWUSER {
            return Err(Errno::INVAL.into());
        }
        let own = self.state.credentials();
        if own.namespace == namespace || self.state.current().threads.len() > 1 {
            return Err(Errno::INVAL.into());
        }
        if !self.state.has_over_namespace(namespace, SYS_ADMIN) {
            return Err(Errno::PERM.into());
        }
        self.change().enter_namespace(namespace);
        Ok(ZERO)
    }

    /// The process that the head of `capget` and `capset` names, and the words of a set; `None` for
    /// an unknown form.
    fn capability_target(
        &self,
        process: &mut Process,
        head: u64,
    ) -> SyscallResult<Option<(u32, usize)>> {
        let bytes = copy_in(process, head, 8)?;
        let (ints, _) = bytes.as_chunks::<4>();
        let [form, id] = [0, 1].map(|at| u32::from_le_bytes(ints[at]));
        let Some((_, words)) = FORMS.into_iter().find(|(known, _)| *known == form) else {
            copy_out(process, head, &FORM.to_le_bytes())?;
            return Ok(None);
        };
        if (id as i32) < 0 {
            return Err(Errno::INVAL.into());
        }
        let own = self.state.processes.current_id();
        if id == 0 || self.state.current().threads.get(id).is_some() {
            return Ok(Some((own, words)));
        }
        if self.state.processes.lives(id) { Ok(Some((id, words))) } else { Err(Errno::SRCH.into()) }
    }

    /// `capget(2)`, as on Linux.
    pub(in crate::sentry) fn sys_capget(
        &mut self,
        process: &mut Process,
        head: u64,
        to: u64,
    ) -> SyscallResult {
        let Some((id, words)) = self.capability_target(process, head)? else {
            return if to == 0 { Ok(ZERO) } else { Err(Errno::INVAL.into()) };
        };
        if to != 0 {
            let Credentials { effective, permitted, inheritable, .. } =
                self.state.namespaces.of(id);
            let sets = [effective, permitted, inheritable];
            let halves = [0, 32].into_iter().take(words);
            let halves = halves.flat_map(|shift| sets.map(|set| (set >> shift) as u32));
            copy_out(process, to, &halves.fold(StructBuilder::default(), StructBuilder::int).0)?;
        }
        Ok(ZERO)
    }

    /// `capset(2)`: no capability can be added, and only a user namespace gives some.
    pub(in crate::sentry) fn sys_capset(
        &mut self,
        process: &mut Process,
        head: u64,
        from: u64,
    ) -> SyscallResult {
        let (id, words) = self.capability_target(process, head)?.ok_or(Errno::INVAL)?;
        if id != self.state.processes.current_id() {
            return Err(Errno::PERM.into());
        }
        // The oldest form leaves the second half at 0.
        let mut bytes = copy_in(process, from, 12 * words)?;
        bytes.resize(24, 0);
        let (ints, _) = bytes.as_chunks::<4>();
        let word = |at: usize| u64::from(u32::from_le_bytes(ints[at]));
        let [effective, permitted, inheritable] =
            [0, 1, 2].map(|at| (word(at) | word(at + 3) << 32) & ALL_CAPABILITIES);
        let own = self.state.credentials();
        let inherits = own.permitted | own.inheritable;
        if permitted & !own.permitted != 0
            || effective & !permitted != 0
            || inheritable & !inherits != 0
        {
            return Err(Errno::PERM.into());
        }
        let new = Credentials { effective, permitted, inheritable, ..own };
        self.change().namespaces.set(id, new);
        Ok(ZERO)
    }
}
