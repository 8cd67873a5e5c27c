//! The code of the vDSO of guests on arm64: see [`crate::platform::vdso`].

use crate::platform::stub;
use crate::platform::vdso::{BOOT, EPOCH, MONOTONIC, NANOS};

/// A jump: `ldr x16, .+8` and `br x16`, with the address behind them.
pub(in crate::platform) const JUMP: [u8; 8] = [0x50, 0, 0, 0x58, 0, 0x02, 0x1f, 0xd6];
pub(in crate::platform) const JUMP_LEN: usize = JUMP.len() + 8;
/// The beginning of the names of functions.
pub(in crate::platform) const NAME_PREFIX: &[u8] = b"__kernel_";
/// Functions that stay as they are: the end of a handler, which unwinders recognise.
pub(in crate::platform) const KEPT_FUNCTIONS: [&[u8]; 1] = [b"rt_sigreturn"];

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_vdso,\"a\",@progbits",
    ".balign 8",
    ".globl afresh_linux_vdso, afresh_linux_vdso_cpu, afresh_linux_vdso_kernel, afresh_linux_vdso_end",
    // clock_gettime(w0, x1).
    "afresh_linux_vdso:",
    "    stp x29, x30, [sp, -48]!",
    "    mov x29, sp",
    "    stp x19, x20, [sp, 16]",
    "    str x21, [sp, 32]",
    "    mov w19, w0",
    "    mov x20, x1",
    "2:  movz x9, {page} & 0xffff",
    "    movk x9, ({page} >> 16) & 0xffff, lsl 16",
    "    movk x9, ({page} >> 32) & 0xffff, lsl 32",
    "    ldr x21, [x9, {epoch}]",
    "    mov w0, w19",
    "    mov x1, x20",
    "    ldr x16, afresh_linux_vdso_kernel",
    "    blr x16",
    "    cbnz w0, 9f",
    "    movz x9, {page} & 0xffff",
    "    movk x9, ({page} >> 16) & 0xffff, lsl 16",
    "    movk x9, ({page} >> 32) & 0xffff, lsl 32",
    "    cmp w19, {monotonic_clock}",
    "    b.eq 3f",
    "    cmp w19, {coarse_clock}",
    "    b.eq 3f",
    "    cmp w19, {raw_clock}",
    "    b.eq 3f",
    "    cmp w19, {boot_clock}",
    "    b.ne 9f",
    "    ldp x10, x11, [x9, {boot}]",
    "    b 4f",
    "3:  ldp x10, x11, [x9, {monotonic}]",
    "4:  ldp x12, x13, [x20]",
    "    add x12, x12, x10",
    "    add x13, x13, x11",
    "    movz x14, {nanos} & 0xffff",
    "    movk x14, {nanos} >> 16, lsl 16",
    "    cmp x13, x14",
    "    b.lt 5f",
    "    sub x13, x13, x14",
    "    add x12, x12, 1",
    "5:  stp x12, x13, [x20]",
    // A reset between the two reads has changed the offsets.
    "    ldr x10, [x9, {epoch}]",
    "    cmp x10, x21",
    "    b.ne 2b",
    "    mov w0, wzr",
    "9:  ldr x21, [sp, 32]",
    "    ldp x19, x20, [sp, 16]",
    "    ldp x29, x30, [sp], 48",
    "    ret",
    // getcpu(x0, x1): the only processor that the guest can see.
    "afresh_linux_vdso_cpu:",
    "    cbz x0, 6f",
    "    str wzr, [x0]",
    "6:  cbz x1, 7f",
    "    str wzr, [x1]",
    "7:  mov w0, wzr",
    "    ret",
    "    .balign 8",
    // The address of the original `clock_gettime`.
    "afresh_linux_vdso_kernel:",
    "    .quad 0",
    "afresh_linux_vdso_end:",
    ".popsection",
    page = const stub::CLOCK_PAGE,
    epoch = const EPOCH,
    monotonic = const MONOTONIC,
    boot = const BOOT,
    nanos = const NANOS,
    monotonic_clock = const libc::CLOCK_MONOTONIC,
    coarse_clock = const libc::CLOCK_MONOTONIC_COARSE,
    raw_clock = const libc::CLOCK_MONOTONIC_RAW,
    boot_clock = const libc::CLOCK_BOOTTIME,
);
