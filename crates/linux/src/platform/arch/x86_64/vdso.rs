//! The code of the vDSO of guests on x86-64: see [`crate::platform::vdso`].

use crate::platform::stub;
use crate::platform::vdso::{BOOT, EPOCH, MONOTONIC, NANOS};

/// A jump: `jmp [rip]` with the address behind it.
pub(in crate::platform) const JUMP: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];
pub(in crate::platform) const JUMP_LEN: usize = JUMP.len() + 8;
/// The beginning of the names of functions.
pub(in crate::platform) const NAME_PREFIX: &[u8] = b"__vdso_";
/// Functions that stay as they are.
pub(in crate::platform) const KEPT_FUNCTIONS: [&[u8]; 0] = [];

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_vdso,\"a\",@progbits",
    ".globl afresh_linux_vdso, afresh_linux_vdso_cpu, afresh_linux_vdso_kernel, afresh_linux_vdso_end",
    // clock_gettime(edi, rsi).
    "afresh_linux_vdso:",
    "    push rbx",
    "    push rbp",
    "    sub rsp, 8",
    "    mov ebx, edi",
    "    mov rbp, rsi",
    "    movabs rdx, {page}",
    "2:  mov rax, [rdx + {epoch}]",
    "    mov [rsp], rax",
    "    mov edi, ebx",
    "    mov rsi, rbp",
    "    call [rip + afresh_linux_vdso_kernel]",
    "    test eax, eax",
    "    jnz 9f",
    "    movabs rdx, {page}",
    "    cmp ebx, {monotonic_clock}",
    "    je 3f",
    "    cmp ebx, {coarse_clock}",
    "    je 3f",
    "    cmp ebx, {raw_clock}",
    "    je 3f",
    "    cmp ebx, {boot_clock}",
    "    jne 9f",
    "    mov rcx, [rdx + {boot}]",
    "    mov r8, [rdx + {boot} + 8]",
    "    jmp 4f",
    "3:  mov rcx, [rdx + {monotonic}]",
    "    mov r8, [rdx + {monotonic} + 8]",
    "4:  add rcx, [rbp]",
    "    add r8, [rbp + 8]",
    "    cmp r8, {nanos}",
    "    jl 5f",
    "    sub r8, {nanos}",
    "    inc rcx",
    "5:  mov [rbp], rcx",
    "    mov [rbp + 8], r8",
    // A reset between the two reads has changed the offsets.
    "    mov rax, [rsp]",
    "    cmp rax, [rdx + {epoch}]",
    "    jne 2b",
    "    xor eax, eax",
    "9:  add rsp, 8",
    "    pop rbp",
    "    pop rbx",
    "    ret",
    // getcpu(rdi, rsi): the only processor that the guest can see.
    "afresh_linux_vdso_cpu:",
    "    xor eax, eax",
    "    test rdi, rdi",
    "    jz 6f",
    "    mov [rdi], eax",
    "6:  test rsi, rsi",
    "    jz 7f",
    "    mov [rsi], eax",
    "7:  ret",
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
