//! The stub of x86-64: see [`crate::platform::stub`].

use crate::platform::arch::frame::Register;
use crate::platform::stub::{
    ASK, CALLS, CONTINUATION, CONTROL, CONTROL_FILE, CONTROL_LEN, COPIES, FIRST, FIRST_BASE,
    FORK_FLAGS, FORKS, FRAME, LENT_LEN, MESSAGE, RECEIPT, SECOND_BASE, SOCKET, WIPE, WORD,
};

/// Where a frame holds the flags.
const FLAGS: usize = Register::Flags.offset();

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_stub,\"a\",@progbits",
    ".globl afresh_linux_stub, afresh_linux_stub_boot, afresh_linux_stub_asked, afresh_linux_stub_end",
    "afresh_linux_stub:",
    "    xor r14d, r14d",
    // A signal handler has executed no orders.
    "    xor r13d, r13d",
    // Ask: the bases, the frame, the first error and the receipt go as arguments.
    "2:  rdfsbase rdi",
    "    rdgsbase rsi",
    "    mov rdx, rsp",
    "    mov r10, r14",
    "    mov r8, r13",
    "    mov eax, {ask}",
    "    syscall",
    "afresh_linux_stub_asked:",
    // The direction flag may be set by a jump to here.
    "    cld",
    "    xor r14d, r14d",
    "3:  movabs rbx, {control}",
    "    mov r12, [rbx + {calls}]",
    "    mov r13, [rbx + {copies}]",
    "    lea rbx, [rbx + {first}]",
    // System calls: number, six arguments, a spare word.
    "4:  test r12, r12",
    "    jz 6f",
    "    mov rax, [rbx]",
    "    mov rdi, [rbx + 8]",
    "    mov rsi, [rbx + 16]",
    "    mov rdx, [rbx + 24]",
    "    mov r10, [rbx + 32]",
    "    mov r8, [rbx + 40]",
    "    mov r9, [rbx + 48]",
    "    syscall",
    "    test rax, rax",
    "    jz 24f",
    "    cmp rax, -4095",
    "    jb 5f",
    "    test r14, r14",
    "    cmovz r14, rax",
    "5:  add rbx, 64",
    "    dec r12",
    "    jmp 4b",
    // Copies: to, from, length.
    "6:  test r13, r13",
    "    jz 7f",
    "    mov rdi, [rbx]",
    "    mov rsi, [rbx + 8]",
    "    mov rcx, [rbx + 16]",
    "    rep movsb",
    "    add rbx, 24",
    "    dec r13",
    "    jmp 6b",
    // Wipe the commands: those of one call are not for the next to read.
    "7:  movabs rbx, {control}",
    // Only this path, behind the last copy, reads the receipt.
    "    mov r13, [rbx + {receipt}]",
    "    mov r15, [rbx + {continuation}]",
    "    mov r8, [rbx + {first_base}]",
    "    mov r9, [rbx + {second_base}]",
    "    mov rsp, [rbx + {frame}]",
    "    mov rcx, [rbx + {wipe}]",
    "    mov rdi, rbx",
    "    xor eax, eax",
    "    rep stosb",
    // `rt_sigreturn` leaves these two flags as they are, so that they would outlive a reset.
    "    mov rcx, [rsp + {flags}]",
    "    and ecx, {kept_flags}",
    "    mov r11, rsp",
    "    lea rsp, [rbx + 8]",
    "    push rcx",
    "    popfq",
    "    mov qword ptr [rbx], 0",
    "    mov rsp, r11",
    // State that a signal frame does not hold: data selectors and the two bases.
    "    mov ds, eax",
    "    mov es, eax",
    "    mov fs, eax",
    "    mov gs, eax",
    "    wrfsbase r8",
    "    wrgsbase r9",
    "    cmp r15, {forks}",
    "    je 20f",
    "    test r14, r14",
    "    jnz 2b",
    "    test r15, r15",
    "    jnz 2b",
    "    add rsp, 8",
    "    mov eax, 15",
    "    syscall",
    "    ud2",
    // Where the process starts: descriptor 0 is the control area.
    "afresh_linux_stub_boot:",
    "    mov eax, 9",
    "    movabs rdi, {control}",
    "    mov esi, {control_len}",
    "    mov edx, 3",
    "    mov r10d, 0x11",
    "    xor r8d, r8d",
    "    xor r9d, r9d",
    "    syscall",
    // The kernel has mapped everything for the program by now, which the sentry waits for.
    "    mov eax, 44",
    "    mov edi, {socket}",
    "    movabs rsi, {word}",
    "    mov edx, 8",
    "    mov r10d, 0x4000",
    "    xor r8d, r8d",
    "    xor r9d, r9d",
    "    syscall",
    // The orders are there when a word comes.
    "    mov eax, 45",
    "    mov edi, {socket}",
    "    movabs rsi, {word}",
    "    mov edx, 8",
    "    xor r10d, r10d",
    "    xor r8d, r8d",
    "    syscall",
    "    xor r14d, r14d",
    "    jmp 3b",
    // The zygote reports that it is ready, or the failed step, and later the PID of each child, or
    // the error.
    "20: movabs rbx, {word}",
    "    mov [rbx], r14",
    "21: mov eax, 44",
    "    mov edi, {socket}",
    "    mov rsi, rbx",
    "    mov edx, 8",
    "    mov r10d, 0x4000",
    "    xor r8d, r8d",
    "    xor r9d, r9d",
    "    syscall",
    // The received descriptors belong to the child.
    "    mov eax, 436",
    "    mov edi, 3",
    "    mov esi, -1",
    "    xor edx, edx",
    "    syscall",
    "    mov qword ptr [rbx + {lent}], {lent_len}",
    "    mov eax, 47",
    "    mov edi, {socket}",
    "    lea rsi, [rbx + {message}]",
    "    xor edx, edx",
    "    syscall",
    "    cmp rax, 1",
    "    jne 23f",
    // No address for the PID: the zygote reports it.
    "    mov eax, 56",
    "    mov edi, {clone}",
    "    xor esi, esi",
    "    xor edx, edx",
    "    xor r10d, r10d",
    "    xor r8d, r8d",
    "    syscall",
    "    test rax, rax",
    "    jz 22f",
    "    mov [rbx], rax",
    "    jmp 21b",
    // The child of a fork of the guest, which returns from that call with zero, is like a child of
    // the zygote.
    "24: cmp edi, {clone}",
    "    jne 5b",
    // It has its parent's descriptors, the listener among them. While it has that, its calls wait
    // for an answer even if the sentry has ended.
    "    mov eax, 436",
    "    xor edi, edi",
    "    mov esi, -1",
    "    xor edx, edx",
    "    syscall",
    // The child: its control area is the first descriptor that came.
    "22: mov eax, 9",
    "    movabs rdi, {control}",
    "    mov esi, {control_len}",
    "    mov edx, 3",
    "    mov r10d, 0x11",
    "    mov r8d, {control_file}",
    "    xor r9d, r9d",
    "    syscall",
    // Without it, the orders there would be those of its parent.
    "    cmp rax, rdi",
    "    jne 23f",
    "    xor r14d, r14d",
    "    jmp 3b",
    // The sentry has closed the socket or has ended, or there is no control area.
    "23: mov eax, 231",
    "    xor edi, edi",
    "    syscall",
    "    ud2",
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
    second_base = const SECOND_BASE,
    wipe = const WIPE,
    frame = const FRAME,
    receipt = const RECEIPT,
    flags = const FLAGS,
    // NT and ID.
    kept_flags = const 1 << 14 | 1 << 21,
    first = const FIRST,
    forks = const FORKS,
    socket = const SOCKET,
    word = const CONTROL + WORD as u64,
    message = const MESSAGE - WORD,
    // The length of `struct msghdr` that the kernel changes.
    lent = const MESSAGE - WORD + 40,
    lent_len = const LENT_LEN,
    clone = const FORK_FLAGS,
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
