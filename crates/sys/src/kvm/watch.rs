//! Stopping a running vCPU from another thread.
//!
//! Promises: after `StopFlag::raise` and a signal to the vCPU's thread, `KVM_RUN` returns `EINTR`,
//! whether it was running, about to run, or not running yet (then the next one returns at once).
//! That includes a thread that blocks the kick signal: [`KickSignal::admit_all`] gives KVM a
//! separate mask for running vCPUs.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_ioctls::VcpuFd;

use super::{call, result_of};
use crate::{InheritedCell, SysError};

/// `_IOW(0xAE, 0x8b, struct kvm_signal_mask)`.
const KVM_SET_SIGNAL_MASK: libc::Ioctl = 0x4004_ae8b_u32 as libc::Ioctl;
/// Size of a signal set in system calls, in bytes.
const SIGSET_LEN: usize = 8;

/// `struct kvm_signal_mask` with its set.
#[repr(C, packed)]
struct SignalMask {
    len: u32,
    set: u64,
}

/// The `immediate_exit` byte of one vCPU, writable from any thread while the vCPU is open.
#[derive(Debug)]
pub struct StopFlag {
    byte: *mut u8,
}

// SAFETY: the byte is only accessed atomically; the constructor's contract covers its lifetime.
unsafe impl Send for StopFlag {}
// SAFETY: as above.
unsafe impl Sync for StopFlag {}

impl StopFlag {
    /// The flag of `vcpu`.
    ///
    /// # Safety
    /// The flag must not be used after `vcpu` is dropped.
    pub unsafe fn new(vcpu: &mut VcpuFd) -> Self {
        Self { byte: &raw mut vcpu.get_kvm_run().immediate_exit }
    }

    fn atomic(&self) -> &AtomicU8 {
        // SAFETY: the byte is in the vCPU's shared mapping, alive by the constructor's contract.
        unsafe { AtomicU8::from_ptr(self.byte) }
    }

    /// Makes the next, or with a signal the current, `KVM_RUN` return.
    pub fn raise(&self) {
        self.atomic().store(1, Ordering::Release);
    }

    /// Allows the vCPU to run again.
    pub fn lower(&self) {
        self.atomic().store(0, Ordering::Release);
    }
}

/// The signal that interrupts a running vCPU: the first real-time signal the C library leaves free.
#[derive(Clone, Copy, Debug)]
pub struct KickSignal(i32);

/// Installs, once a process, a handler that does nothing for the kick signal.
///
/// # Errors
/// Any error of `sigaction`, or `AlreadyExists` where the program uses that signal itself.
pub fn install_kick_handler() -> io::Result<KickSignal> {
    // A child inherits the handler with the number.
    static INSTALLED: InheritedCell<Result<i32, i32>> = InheritedCell::new();
    extern "C" fn ignore(_: libc::c_int) {}
    let number = libc::SIGRTMIN() + 4;
    let outcome = INSTALLED.get_or_make(|| {
        // SAFETY: plain sigaction calls with initialised structures; the handler is
        // async-signal-safe because it does nothing.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(number, std::ptr::null(), &mut old) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
            }
            // Another thread may be here at the same time, and have installed it already.
            let ours = ignore as extern "C" fn(libc::c_int) as usize;
            if old.sa_sigaction != libc::SIG_DFL && old.sa_sigaction != ours {
                return Err(libc::EEXIST);
            }
            let mut new: libc::sigaction = std::mem::zeroed();
            new.sa_sigaction = ours;
            new.sa_flags = libc::SA_RESTART;
            if libc::sigaction(number, &new, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
            }
        }
        Ok(number)
    });
    outcome.map(KickSignal).map_err(io::Error::from_raw_os_error)
}

/// Has KVM block the signals in `set`, and no others, while `vcpu` runs.
fn set_mask(vcpu: &VcpuFd, set: impl FnOnce() -> io::Result<u64>) -> Result<(), SysError> {
    call("KVM_SET_SIGNAL_MASK", || {
        let mask = SignalMask { len: SIGSET_LEN as u32, set: set()? };
        // SAFETY: the request reads this structure, whose length field covers its set.
        result_of(unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_SIGNAL_MASK, &raw const mask) })
    })
    .map(drop)
}

impl KickSignal {
    fn bit(self) -> u64 {
        1 << (self.0 - 1)
    }

    /// Lets every signal interrupt `vcpu`, this one among them, whether the calling thread blocks
    /// it or not.
    ///
    /// # Errors
    /// Any error of `KVM_SET_SIGNAL_MASK`.
    pub fn admit_all(self, vcpu: &VcpuFd) -> Result<(), SysError> {
        set_mask(vcpu, || Ok(0))
    }

    /// Lets the signal interrupt `vcpu`, and otherwise those that the calling thread does not block
    /// now. A pending signal that it blocks would interrupt every run.
    ///
    /// # Errors
    /// Any error of `rt_sigprocmask` or `KVM_SET_SIGNAL_MASK`.
    pub fn admit(self, vcpu: &VcpuFd) -> Result<(), SysError> {
        set_mask(vcpu, || {
            let mut blocked = 0u64;
            // SAFETY: reads the thread's mask into a set of that size.
            let read = unsafe {
                libc::syscall(
                    libc::SYS_rt_sigprocmask,
                    libc::SIG_BLOCK,
                    std::ptr::null::<u64>(),
                    &raw mut blocked,
                    SIGSET_LEN,
                )
            };
            if read == 0 { Ok(blocked & !self.bit()) } else { Err(io::Error::last_os_error()) }
        })
    }

    /// Discards a signal that is pending because the calling thread blocks it. It would interrupt
    /// the thread's next vCPU.
    pub fn discard(self) {
        let (set, now) = (self.bit(), libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the call only reads the set, which has that size, and the time limit.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigtimedwait,
                &raw const set,
                std::ptr::null_mut::<libc::siginfo_t>(),
                &raw const now,
                SIGSET_LEN,
            );
        }
    }

    /// Sends the signal to thread `tid` of this process. A thread that has ended is not an error.
    pub fn send(self, tid: i32) {
        // SAFETY: tgkill only delivers a signal whose handler does nothing, inside this process.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, self.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Barrier;

    use super::*;

    /// Set in the processes that the test starts.
    const CHILD: &str = "AFRESH_TEST_KICK";

    #[test]
    fn threads_that_install_the_handler_at_the_same_time_all_have_it() {
        if std::env::var_os(CHILD).is_some() {
            let barrier = Barrier::new(8);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        barrier.wait();
                        install_kick_handler().unwrap();
                    });
                }
            });
            return;
        }
        // Only the first time in a process can two meet.
        let name =
            "kvm::watch::tests::threads_that_install_the_handler_at_the_same_time_all_have_it";
        for round in 0..200 {
            let mut child = Command::new(std::env::current_exe().unwrap());
            let output = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("1 passed"), "round {round}: {said}");
        }
    }
}
