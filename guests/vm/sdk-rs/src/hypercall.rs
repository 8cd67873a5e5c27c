//! The hypercall itself and the ones that need no more than their arguments.

use core::arch::asm;

use crate::abi::{CALL_GENERATION, CALL_LOG, CALL_PANIC, CALL_RANDOM, PORT};

/// Makes a hypercall; the host checks every argument.
#[inline]
pub(crate) fn hypercall(call: u32, arguments: [u64; 5]) -> i64 {
    let result: u64;
    // SAFETY: the host reads the arguments and at most writes the memory that they name; the asm
    // is a barrier for memory.
    unsafe {
        asm!(
            "out {port}, eax",
            port = const PORT,
            inlateout("rax") u64::from(call) => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            options(nostack),
        );
    }
    result as i64
}

/// How important a log message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Level {
    /// Something failed.
    Error = 1,
    /// Something is odd.
    Warn = 2,
    /// Worth knowing.
    Info = 3,
    /// For developers.
    Debug = 4,
    /// For debugging this guest.
    Trace = 5,
}

/// Sends a message to the host's log. At most 64 KiB.
pub fn log(level: Level, message: &str) {
    hypercall(CALL_LOG, [level as u64, message.as_ptr() as u64, message.len() as u64, 0, 0]);
}

/// Ends the call, or the initialisation, as a panic with this message.
pub fn fail(message: &str) -> ! {
    loop {
        hypercall(CALL_PANIC, [message.as_ptr() as u64, message.len() as u64, 0, 0, 0]);
    }
}

/// Fills a buffer with randomness that differs in every restore and every fork.
pub fn fill_random(buffer: &mut [u8]) {
    hypercall(CALL_RANDOM, [buffer.as_mut_ptr() as u64, buffer.len() as u64, 0, 0, 0]);
}

/// A number that no other restore or fork shares: reseed generators when it changes.
pub fn generation() -> u64 {
    hypercall(CALL_GENERATION, [0; 5]) as u64
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    use core::fmt::Write;
    let mut message = Message { bytes: [0; 1024], len: 0 };
    let _ = write!(message, "{info}");
    let text = core::str::from_utf8(&message.bytes[..message.len]).unwrap_or("panic");
    fail(text)
}

/// A message on the stack, for when the heap has failed. Cut at a character's boundary.
struct Message {
    bytes: [u8; 1024],
    len: usize,
}

impl core::fmt::Write for Message {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let mut take = text.len().min(self.bytes.len() - self.len);
        while !text.is_char_boundary(take) {
            take -= 1;
        }
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}
