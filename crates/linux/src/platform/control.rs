//! The control area: memory that the sentry and the stub share, and behind it a page, a window and
//! another page that the guest can only read.
//!
//! The guest can write it at any time it runs. So the sentry copies out of it once, and treats the
//! values as ones that a guest might have put into its registers.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::time::Duration;

use afresh_sys::Memfd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::inside::ACTIONS_LEN;
use super::vdso::ClockOffsets;
use super::{PlatformError, stub};

/// Bytes of the control area, and of everything behind it.
const LEN: usize = stub::CONTROL_LEN + stub::READ_ONLY_LEN;
/// Offset of the window.
const WINDOW: usize = stub::CONTROL_LEN + stub::CLOCK_PAGE_LEN;
/// Offset of the actions for signals.
const ACTIONS: usize = WINDOW + stub::WINDOW_LEN;

/// The sentry's mapping of a control area.
#[derive(Debug)]
pub(crate) struct Control {
    base: NonNull<u8>,
    file: Memfd,
    /// Bytes of the window that may not be zero.
    shown: usize,
}

// SAFETY: the mapping belongs to this value alone, is not bound to a thread, and is reached through
// `&self` and `&mut self` by copies only.
unsafe impl Send for Control {}

impl Control {
    pub(crate) fn new() -> Result<Self, PlatformError> {
        let kernel = |error: afresh_sys::SysError| {
            PlatformError::kernel(
                "making the control area",
                std::io::Error::from_raw_os_error(error.errno),
            )
        };
        let file = Memfd::new(c"afresh-control").map_err(kernel)?;
        file.set_len(LEN).map_err(kernel)?;
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                LEN,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(|error| PlatformError::kernel("mapping the control area", error))?;
        let base = NonNull::new(base.cast()).expect("a mapping that succeeded is not at null");
        Ok(Self { base, file, shown: 0 })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Waits until a process that boots has reached [`stub::BOOTED`], or for `timeout`.
    pub(super) fn await_boot(&self, timeout: Duration) {
        let limit = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the word is inside the mapping, which lives as long as `self`, and is aligned.
        // The kernel only compares it, and reads the limit, which lives through the call.
        unsafe {
            let word = self.base.as_ptr().add(stub::BOOTED);
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, 0, &raw const limit);
        }
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset <= LEN && bytes.len() <= LEN - offset);
        // SAFETY: the assertion keeps the range inside the mapping, which is unmapped only when
        // `self` is dropped. The guest may write the same bytes at the same time: it is another
        // process, so this is no data race within this program, and any mixture is as good as a
        // value written by the guest afterwards.
        unsafe {
            self.base.add(offset).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len())
        };
    }

    /// Copies `out.len()` bytes from `offset`.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset <= stub::CONTROL_LEN && out.len() <= stub::CONTROL_LEN - offset);
        // SAFETY: as in `write`; the bytes are only copied, with any value.
        unsafe {
            self.base.add(offset).copy_to_nonoverlapping(NonNull::from(&mut *out).cast(), out.len())
        };
    }

    /// Writes the clock offsets of the guest, while the guest does not run.
    pub(super) fn set_clock(&mut self, offsets: ClockOffsets) {
        for (index, word) in offsets.encode().into_iter().enumerate() {
            self.write_word(stub::CONTROL_LEN + 8 * index, word);
        }
    }

    /// Has the window show `bytes`, followed by zeros.
    pub(super) fn show(&mut self, bytes: &[u8]) {
        self.write(WINDOW, bytes);
        let rest = self.shown.saturating_sub(bytes.len());
        self.write(WINDOW + bytes.len(), &vec![0; rest]);
        self.shown = bytes.len();
    }

    /// Sets the actions for signals.
    pub(super) fn set_actions(&mut self, actions: &[u8; ACTIONS_LEN]) {
        self.write(ACTIONS, actions);
    }

    pub(crate) fn write_word(&mut self, offset: usize, word: u64) {
        self.write(offset, &word.to_le_bytes());
    }

    pub(crate) fn read_word(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, and nothing points into it any more.
        // A failure would leave the memory mapped, which is harmless.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), LEN) };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::platform::{boot, zygote};

    #[test]
    fn the_sentry_sleeps_until_a_process_has_booted() {
        let long = Duration::from_secs(60);
        let mut control = Control::new().unwrap();
        boot::write_child(&mut control, None, &[]);
        let mut born = match zygote::start(&control, &[]) {
            Ok(born) => born,
            Err(error @ PlatformError::Missing { .. }) => return println!("SKIPPED: {error}"),
            Err(error) => panic!("{error}"),
        };
        let started = Instant::now();
        // A signal may end a wait early.
        while control.read_word(stub::BOOTED) == 0 && started.elapsed() < long {
            control.await_boot(long);
        }
        assert_ne!(control.read_word(stub::BOOTED), 0);
        born.kill();
        born.wait().unwrap();
        let control = Control::new().unwrap();
        control.await_boot(Duration::from_millis(1));
        assert_eq!(control.read_word(stub::BOOTED), 0, "no process has it");
    }
}
