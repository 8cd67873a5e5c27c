//! The page behind the stub on arm64: the end of signal handlers. No code answers calls there.
//!
//! Programs set no restorer on arm64, so that handlers return to code of the kernel, which guests
//! do not have. Unwinders recognise these two instructions.

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_return,\"a\",@progbits",
    ".balign 4",
    ".globl afresh_linux_return",
    "afresh_linux_return:",
    "    mov x8, {rt_sigreturn}",
    "    svc #0",
    ".popsection",
    rt_sigreturn = const libc::SYS_rt_sigreturn,
);

unsafe extern "C" {
    static afresh_linux_return: [u8; 8];
}

/// The code, for the page [`crate::platform::stub::INSIDE`].
pub(in crate::platform) fn code() -> &'static [u8] {
    // SAFETY: the label is at two instructions of the assembly above, which are initialised and
    // belong to the read-only data of the program.
    unsafe { &*(&raw const afresh_linux_return) }
}

/// Whether calls of this number may be answered inside: none are.
pub(crate) fn is_answered_inside(_number: u32) -> bool {
    false
}
