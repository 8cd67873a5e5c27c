//! The stub of arm64: see [`crate::platform::stub`].
//!
//! `x19` is the place in the control area, `x20` the first argument of a call, `x21` and `x22`
//! count calls and copies, `x23` is the first error, and `x24` the step after the orders. The
//! kernel keeps all registers but `x0` in a call.

use crate::platform::stub::{
    ASK, CALLS, CONTINUATION, CONTROL, CONTROL_FILE, CONTROL_LEN, COPIES, FIRST, FIRST_BASE,
    FORK_FLAGS, FORKS, FRAME, LENT_LEN, MESSAGE, RECEIPT, SOCKET, WIPE, WORD,
};

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_stub,\"a\",@progbits",
    ".balign 8",
    ".globl afresh_linux_stub, afresh_linux_stub_boot, afresh_linux_stub_asked, afresh_linux_stub_end",
    ".macro afresh_linux_address register, address",
    "    movz \\register, \\address & 0xffff",
    "    movk \\register, (\\address >> 16) & 0xffff, lsl 16",
    "    movk \\register, (\\address >> 32) & 0xffff, lsl 32",
    ".endm",
    "afresh_linux_stub:",
    "    mov x23, xzr",
    // A signal handler has executed no orders.
    "    mov x22, xzr",
    // Ask: the bases, the frame, the first error and the receipt go as arguments.
    "2:  mrs x0, tpidr_el0",
    "    mov x1, xzr",
    "    mov x2, sp",
    "    mov x3, x23",
    "    mov x4, x22",
    "    mov x8, {ask}",
    "    svc #0",
    "afresh_linux_stub_asked:",
    "    mov x23, xzr",
    "3:  afresh_linux_address x19, {control}",
    "    ldr x21, [x19, {calls}]",
    "    ldr x22, [x19, {copies}]",
    "    add x19, x19, {first}",
    // System calls: number, six arguments, a spare word.
    "4:  cbz x21, 6f",
    "    ldp x8, x0, [x19]",
    "    ldp x1, x2, [x19, 16]",
    "    ldp x3, x4, [x19, 32]",
    "    ldr x5, [x19, 48]",
    "    mov x20, x0",
    "    svc #0",
    "    cbz x0, 24f",
    "    cmn x0, 4095",
    "    b.lo 5f",
    "    cmp x23, xzr",
    "    csel x23, x0, x23, eq",
    "5:  add x19, x19, 64",
    "    sub x21, x21, 1",
    "    b 4b",
    // Copies: to, from, length.
    "6:  cbz x22, 7f",
    "    ldp x0, x1, [x19]",
    "    ldr x2, [x19, 16]",
    "    mov x3, x0",
    "    mov x4, x2",
    "10: cmp x2, 16",
    "    b.lo 11f",
    "    ldp x5, x6, [x1], 16",
    "    stp x5, x6, [x3], 16",
    "    sub x2, x2, 16",
    "    b 10b",
    "11: cbz x2, 12f",
    "    ldrb w5, [x1], 1",
    "    strb w5, [x3], 1",
    "    sub x2, x2, 1",
    "    b 11b",
    // The bytes may be instructions. A processor reports that it keeps its caches equal by itself
    // (`IDC` and `DIC`). No line is smaller than 16 bytes.
    "12: mrs x5, ctr_el0",
    "    ubfx x5, x5, 28, 2",
    "    cmp x5, 3",
    "    b.eq 15f",
    "    add x4, x0, x4",
    "    and x5, x0, -16",
    "13: cmp x5, x4",
    "    b.hs 14f",
    "    dc cvau, x5",
    "    add x5, x5, 16",
    "    b 13b",
    "14: dsb ish",
    "    and x5, x0, -16",
    "16: cmp x5, x4",
    "    b.hs 15f",
    "    ic ivau, x5",
    "    add x5, x5, 16",
    "    b 16b",
    "15: dsb ish",
    "    isb",
    "    add x19, x19, 24",
    "    sub x22, x22, 1",
    "    b 6b",
    // Wipe the commands: those of one call are not for the next to read.
    "7:  afresh_linux_address x19, {control}",
    // Only this path, behind the last copy, reads the receipt.
    "    ldr x22, [x19, {receipt}]",
    "    ldr x24, [x19, {continuation}]",
    "    ldr x9, [x19, {first_base}]",
    "    ldr x10, [x19, {frame}]",
    "    ldr x11, [x19, {wipe}]",
    "    mov sp, x10",
    "    mov x12, x19",
    "8:  cmp x11, 16",
    "    b.lo 9f",
    "    stp xzr, xzr, [x12], 16",
    "    sub x11, x11, 16",
    "    b 8b",
    "9:  cbz x11, 17f",
    "    strb wzr, [x12], 1",
    "    sub x11, x11, 1",
    "    b 9b",
    // State that a signal frame does not hold.
    "17: msr tpidr_el0, x9",
    "    cmp x24, {forks}",
    "    b.eq 20f",
    "    cbnz x23, 2b",
    "    cbnz x24, 2b",
    "    mov x8, {rt_sigreturn}",
    "    svc #0",
    "    udf #0",
    // Where the process starts: descriptor 0 is the control area.
    "afresh_linux_stub_boot:",
    "    afresh_linux_address x0, {control}",
    "    mov x1, {control_len}",
    "    mov x2, 3",
    "    mov x3, 0x11",
    "    mov x4, xzr",
    "    mov x5, xzr",
    "    mov x8, {mmap}",
    "    svc #0",
    // The kernel has mapped everything for the program by now, which the sentry waits for.
    "    afresh_linux_address x19, {word}",
    "    mov x0, {socket}",
    "    mov x1, x19",
    "    mov x2, 8",
    "    mov x3, 0x4000",
    "    mov x4, xzr",
    "    mov x5, xzr",
    "    mov x8, {sendto}",
    "    svc #0",
    // The orders are there when a word comes.
    "    mov x0, {socket}",
    "    mov x1, x19",
    "    mov x2, 8",
    "    mov x3, xzr",
    "    mov x4, xzr",
    "    mov x5, xzr",
    "    mov x8, {recvfrom}",
    "    svc #0",
    "    mov x23, xzr",
    "    b 3b",
    // The zygote reports that it is ready, or the failed step, and later the PID of each child, or
    // the error.
    "20: afresh_linux_address x19, {word}",
    "    str x23, [x19]",
    "21: mov x0, {socket}",
    "    mov x1, x19",
    "    mov x2, 8",
    "    mov x3, 0x4000",
    "    mov x4, xzr",
    "    mov x5, xzr",
    "    mov x8, {sendto}",
    "    svc #0",
    // The received descriptors belong to the child.
    "    mov x0, 3",
    "    mov w1, -1",
    "    mov x2, xzr",
    "    mov x8, {close_range}",
    "    svc #0",
    "    mov x9, {lent_len}",
    "    str x9, [x19, {lent}]",
    "    mov x0, {socket}",
    "    add x1, x19, {message}",
    "    mov x2, xzr",
    "    mov x8, {recvmsg}",
    "    svc #0",
    "    cmp x0, 1",
    "    b.ne 23f",
    // No address for the PID: the zygote reports it.
    "    movz x0, {clone_flags} & 0xffff",
    "    movk x0, {clone_flags} >> 16, lsl 16",
    "    mov x1, xzr",
    "    mov x2, xzr",
    "    mov x3, xzr",
    "    mov x4, xzr",
    "    mov x8, {clone}",
    "    svc #0",
    "    cbz x0, 22f",
    "    str x0, [x19]",
    "    b 21b",
    // The child of a fork of the guest, which returns from that call with zero, is like a child of
    // the zygote.
    "24: cmp x8, {clone}",
    "    b.ne 5b",
    "    movz x9, {clone_flags} & 0xffff",
    "    movk x9, {clone_flags} >> 16, lsl 16",
    "    cmp x20, x9",
    "    b.ne 5b",
    // It has its parent's descriptors, the listener among them. While it has that, its calls wait
    // for an answer even if the sentry has ended.
    "    mov x0, xzr",
    "    mov w1, -1",
    "    mov x2, xzr",
    "    mov x8, {close_range}",
    "    svc #0",
    // The child: its control area is the first descriptor that came.
    "22: afresh_linux_address x19, {control}",
    "    mov x0, x19",
    "    mov x1, {control_len}",
    "    mov x2, 3",
    "    mov x3, 0x11",
    "    mov x4, {control_file}",
    "    mov x5, xzr",
    "    mov x8, {mmap}",
    "    svc #0",
    // Without it, the orders there would be those of its parent.
    "    cmp x0, x19",
    "    b.ne 23f",
    "    mov x23, xzr",
    "    b 3b",
    // The sentry has closed the socket or has ended, or there is no control area.
    "23: mov x0, xzr",
    "    mov x8, {exit_group}",
    "    svc #0",
    "    udf #0",
    "afresh_linux_stub_end:",
    ".popsection",
    ask = const ASK,
    control = const CONTROL,
    control_len = const CONTROL_LEN,
    control_file = const CONTROL_FILE,
    calls = const CALLS,
    copies = const COPIES,
    continuation = const CONTINUATION,
    first_base = const FIRST_BASE,
    wipe = const WIPE,
    frame = const FRAME,
    receipt = const RECEIPT,
    first = const FIRST,
    forks = const FORKS,
    socket = const SOCKET,
    word = const CONTROL + WORD as u64,
    message = const MESSAGE - WORD,
    // The length of `struct msghdr` that the kernel changes.
    lent = const MESSAGE - WORD + 40,
    lent_len = const LENT_LEN,
    clone_flags = const FORK_FLAGS,
    clone = const libc::SYS_clone,
    close_range = const libc::SYS_close_range,
    exit_group = const libc::SYS_exit_group,
    mmap = const libc::SYS_mmap,
    recvfrom = const libc::SYS_recvfrom,
    recvmsg = const libc::SYS_recvmsg,
    rt_sigreturn = const libc::SYS_rt_sigreturn,
    sendto = const libc::SYS_sendto,
);

unsafe extern "C" {
    static afresh_linux_stub: u8;
    static afresh_linux_stub_boot: u8;
    static afresh_linux_stub_asked: u8;
    static afresh_linux_stub_end: u8;
}

fn offset_of(label: *const u8) -> usize {
    label.addr() - (&raw const afresh_linux_stub).addr()
}

/// The code.
pub(in crate::platform) fn code() -> &'static [u8] {
    let length = offset_of(&raw const afresh_linux_stub_end);
    // SAFETY: both labels are in the same section of this very assembly, the second after the
    // first, so the bytes between them are initialised and belong to the program's read-only data.
    unsafe { std::slice::from_raw_parts(&raw const afresh_linux_stub, length) }
}

/// Where a process starts.
pub(in crate::platform) fn boot_offset() -> usize {
    offset_of(&raw const afresh_linux_stub_boot)
}

/// The instruction after the request of the stub.
pub(in crate::platform) fn asked_offset() -> usize {
    offset_of(&raw const afresh_linux_stub_asked)
}
