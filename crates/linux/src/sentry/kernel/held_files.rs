//! Open files of waiting calls, whose descriptors another thread has closed.
//!
//! Promises: as in Linux, a call uses the open file that its descriptor had when it began. `close`
//! and `dup2` of another thread change neither its object nor its result, and the object ends with
//! the call. `poll` and `select` wait for the events of their open files, and look their
//! descriptors up again after an event. May break it: a call that waits with a descriptor and is
//! missing in [`descriptors`].

use crate::platform::calls;
use crate::sentry::kernel::fd_table::FdTable;
use crate::sentry::kernel::held_file::{HeldFile, HeldFiles, PackedHeldFiles};
use crate::sentry::kernel::resource_limits::DESCRIPTORS;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Thread, Wait, WaitReason};
use crate::sentry::result::SyscallControl;

/// The error of files that a call cannot hold.
pub(in crate::sentry) const UNHELD: &str = "a call holds a file that it does not wait for";

/// Descriptors among the arguments of a call that can wait. Calls that wait for a list of
/// descriptors have none.
fn descriptors(number: i64, args: &[u64; 6]) -> [Option<u32>; 2] {
    let (first, second, third) = (args[0] as u32, args[1] as u32, args[2] as u32);
    match number {
        libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_pread64
        | libc::SYS_preadv
        | libc::SYS_preadv2
        | libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_pwrite64
        | libc::SYS_pwritev
        | libc::SYS_pwritev2
        | libc::SYS_vmsplice
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_connect
        | libc::SYS_flock
        | libc::SYS_ioctl
        | libc::SYS_mq_timedsend
        | libc::SYS_mq_timedreceive
        | calls::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2 => [Some(first), None],
        // After a wait for another lock Linux looks for the descriptor again.
        libc::SYS_fcntl if args[1] as i32 == libc::F_OFD_SETLKW => [Some(first), None],
        libc::SYS_tee | libc::SYS_sendfile => [Some(first), Some(second)],
        libc::SYS_splice | libc::SYS_copy_file_range => [Some(first), Some(third)],
        _ => [None; 2],
    }
}

/// The file that the waiting call of a thread keeps when `number` is closed.
fn held_file(thread: &Thread, number: u32, description: u64) -> Option<HeldFile> {
    let listed = match &thread.wait.as_ref()?.reason {
        WaitReason::Files(list) => list.iter().any(|(id, _)| *id == description),
        WaitReason::Lock(_) | WaitReason::Stop | WaitReason::Nothing => false,
        _ => return None,
    };
    let (call, args) = thread.context.as_ref()?.call()?;
    match call {
        calls::SYS_poll | libc::SYS_ppoll | calls::SYS_select | libc::SYS_pselect6 => {
            listed.then_some(HeldFile { number: None, description })
        }
        call => descriptors(call, &args)
            .contains(&Some(number))
            .then_some(HeldFile { number: Some(number), description }),
    }
}

/// Maximum held files of a wait.
fn max_held(wait: &Wait) -> usize {
    wait.items().max(2)
}

/// Whether a call that waits can hold these files.
fn may_hold(wait: &Wait, held: &[HeldFile], table: &FdTable) -> bool {
    held.len() <= max_held(wait)
        && held.iter().all(|held| {
            let numbered = held.number.is_none_or(|number| number < DESCRIPTORS);
            numbered && table.description(held.description).is_some()
        })
}

impl Kernel {
    /// Before descriptors of the current process are closed: waiting calls of its other threads
    /// keep their descriptions.
    pub(in crate::sentry) fn hold_for_waits(&mut self, numbers: &[u64]) {
        let Self { table, processes, .. } = self;
        if processes.current.threads.len() == 1 {
            return;
        }
        for number in numbers.iter().map(|number| *number as u32) {
            let Ok(description) = table.id(number.into()) else { continue };
            for thread in processes.current.threads.values_mut() {
                let Some(file) = held_file(thread, number, description) else { continue };
                let Some(wait) = &mut thread.wait else { continue };
                let is_held = wait.held.iter().any(|held| match file.number {
                    Some(number) => held.number == Some(number),
                    None => held.description == description,
                });
                if !is_held && wait.held.len() < max_held(wait) {
                    wait.held.push(file);
                    table.hold(description);
                }
            }
        }
    }

    /// Ends the holds of a call.
    pub(crate) fn release_held(&mut self, held: HeldFiles) {
        if held.is_empty() {
            return;
        }
        for gone in self.table.unused(held.into_iter().map(|held| held.description).collect()) {
            self.forget(Some(gone));
        }
        self.drop_unowned();
    }

    /// Whether the call that is served is one with held files.
    pub(crate) fn holds_files(&self) -> bool {
        !self.table.held.is_empty()
    }

    /// Before a call is made again: it uses the held files of its wait.
    pub(crate) fn use_held(&mut self, wait: &mut Wait) {
        self.table.held = std::mem::take(&mut wait.held);
    }

    /// After a call that was made again: it keeps its held files if it waits again.
    pub(crate) fn leave_held(&mut self, control: &mut SyscallControl) {
        let mut ended = std::mem::take(&mut self.table.held);
        if let SyscallControl::Wait(wait) = control {
            (wait.held, ended) = ended.into_iter().partition(|held| held.number.is_some());
        }
        self.release_held(ended);
    }

    /// Whether all calls that wait can hold the files that they hold.
    pub(in crate::sentry) fn are_held_files_sound(&self) -> bool {
        let mut waits = self.processes.threads().filter_map(|(_, thread)| thread.wait.as_ref());
        waits.all(|wait| may_hold(wait, &wait.held, &self.table))
    }

    /// The held files of all threads.
    pub(in crate::sentry) fn packed_held(&self) -> PackedHeldFiles {
        let held = |thread: &Thread| Some(thread.wait.as_ref()?.held.clone());
        let threads = self.processes.threads();
        let all = threads.filter_map(|(id, thread)| Some((id, held(thread)?)));
        all.filter(|(_, held)| !held.is_empty()).collect()
    }

    /// Gives threads of a snapshot their held files, if they fit.
    pub(in crate::sentry) fn unpack_held(&mut self, packed: PackedHeldFiles) -> Option<()> {
        let Self { table, processes, .. } = self;
        for (id, held) in packed {
            let mut threads = processes.threads_mut();
            let thread = threads.find_map(|threads| threads.get_mut(id))?;
            let wait = thread.wait.as_mut()?;
            if !may_hold(wait, &held, table) {
                return None;
            }
            held.iter().for_each(|held| table.hold(held.description));
            wait.held = held;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Tree};

    use super::*;
    use crate::sentry::kernel::fd_table::{Description, FileObject};
    use crate::sentry::mm::layout::Layout;

    #[test]
    fn held_files_of_a_snapshot_belong_to_waits_and_to_open_descriptions() {
        let tree = || Tree::new(Budget::default());
        let mut state = Kernel::new(Layout::new(1 << 20), tree(), None, Vec::new());
        let object = Description::new(FileObject::Process(2), 0);
        let number = state.table.add(object, false).ok().unwrap();
        let id = state.table.id(number.into()).unwrap();
        let thread = state.current().threads.current_id();
        let file = |number, description| HeldFile { number: Some(number), description };
        let packed = |number, id| PackedHeldFiles::from([(thread, vec![file(number, id)])]);
        assert_eq!(state.clone().unpack_held(packed(9, id)), None, "it does not wait");
        let reason = WaitReason::Files(vec![(id, 1)]);
        state.current_mut().threads.current_mut().wait = Some(Wait::new(reason, None));
        assert_eq!(state.clone().unpack_held(packed(9, id + 1)), None, "it is not open");
        assert_eq!(state.clone().unpack_held(packed(DESCRIPTORS, id)), None);
        let many = PackedHeldFiles::from([(thread, vec![file(9, id); 3])]);
        assert_eq!(state.clone().unpack_held(many), None);
        let other = PackedHeldFiles::from([(thread + 1, vec![file(9, id)])]);
        assert_eq!(state.clone().unpack_held(other), None, "no thread has this number");

        assert_eq!(state.unpack_held(packed(9, id)), Some(()));
        assert_eq!(state.packed_held(), packed(9, id));
        state.close_all(&[number.into()]);
        assert!(state.table.description(id).is_some());
        let mut wait = state.current_mut().threads.current_mut().wait.take().unwrap();
        state.use_held(&mut wait);
        assert_eq!((state.table.id(9), state.table.numbers(9, 9)), (Ok(id), vec![]));
        let mut control = SyscallControl::Wait(wait);
        state.leave_held(&mut control);
        assert!(state.table.id(9).is_err() && state.table.description(id).is_some());
        let SyscallControl::Wait(wait) = control else { unreachable!() };
        state.release_held(wait.held);
        assert!(state.table.description(id).is_none());
    }
}
