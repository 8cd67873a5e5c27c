//! The code inside of x86-64: see [`crate::platform::inside`].

use crate::platform::inside::{
    ANSWERS_AT, ATTRIBUTE_LEN, ATTRIBUTES_END, Answer, BUFFER, CALL, CHANGED, CLOSED, CURSOR,
    DESCRIPTOR, DESCRIPTOR_LEN, DESCRIPTORS, NUMBER, NUMBERS_LEN, PATH, PLACE, STAT, STAT_LEN,
    TRIED, WINDOW,
};
use crate::platform::stub;

/// Offsets in the answers for a descriptor.
const OFFSET: usize = 8;
const SIZE: usize = 16;

/// Numbers of calls that may be answered inside.
const NUMBERS: [libc::c_long; 16] = [
    libc::SYS_read,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_ioctl,
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_geteuid,
    libc::SYS_getegid,
    libc::SYS_getppid,
    libc::SYS_getpgrp,
    libc::SYS_gettid,
    libc::SYS_newfstatat,
];

/// Whether calls of this number may be answered inside.
pub(crate) fn is_answered_inside(number: u32) -> bool {
    NUMBERS.contains(&number.into())
}

/// Finds the answers of the descriptor in `edi`, if it is not closed: `rcx` is their address, and
/// `r11` that of its new offset.
macro_rules! find_descriptor {
    () => {
        "mov ecx, edi
        and ecx, {descriptors} - 1
        imul rcx, rcx, {descriptor_len}
        lea rcx, [r11 + rcx + {numbers_len}]
        mov eax, edi
        add rax, 1
        cmp rax, [rcx]
        jne 90f
        mov eax, edi
        and eax, {descriptors} - 1
        movabs r11, {words}
        bt qword ptr [r11 + {closed}], rax
        jc 90f
        lea r11, [r11 + rax * 8]"
    };
}

/// Loads the offset of that descriptor into `rax`.
macro_rules! load_offset {
    () => {
        "mov rax, [r11]
        sub rax, 1
        jae 99f
        mov rax, [rcx + {offset}]
    99:"
    };
}

/// Copies its `struct stat` to the address in a register.
macro_rules! copy_stat {
    ($to:literal) => {
        concat!(
            ".irp at, 0,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120,128,136
            mov rax, [rcx + {stat} + \\at]
            mov [",
            $to,
            " + \\at], rax
            .endr
            xor eax, eax
            jmp 85f"
        )
    };
}

std::arch::global_asm!(
    ".pushsection .rodata.afresh_linux_inside,\"a\",@progbits",
    ".globl afresh_linux_inside, afresh_linux_inside_kept, afresh_linux_inside_done",
    ".globl afresh_linux_inside_end, afresh_linux_inside_copies, afresh_linux_inside_copied",
    "afresh_linux_inside:",
    "    movabs r11, {words}",
    "    mov [r11 + {call}], rcx",
    "    mov [r11 + {number}], rax",
    "afresh_linux_inside_kept:",
    "    movabs r11, {answers}",
    "    cmp dword ptr [r11], 0",
    "    je 90f",
    "    cmp eax, {newfstatat}",
    "    je 30f",
    "    cmp eax, {lseek}",
    "    je 10f",
    "    cmp eax, {read}",
    "    je 20f",
    "    cmp eax, {close}",
    "    je 70f",
    "    cmp eax, {ioctl}",
    "    je 40f",
    "    cmp eax, {fstat}",
    "    je 35f",
    "    cmp eax, {rt_sigaction}",
    "    je 50f",
    "    cmp eax, {rt_sigprocmask}",
    "    je 55f",
    "    mov ecx, {process}",
    "    cmp eax, {getpid}",
    "    je 60f",
    "    mov ecx, {thread}",
    "    cmp eax, {gettid}",
    "    je 60f",
    "    mov ecx, {parent}",
    "    cmp eax, {getppid}",
    "    je 60f",
    "    mov ecx, {user}",
    "    cmp eax, {getuid}",
    "    je 60f",
    "    mov ecx, {effective_user}",
    "    cmp eax, {geteuid}",
    "    je 60f",
    "    mov ecx, {group}",
    "    cmp eax, {getgid}",
    "    je 60f",
    "    mov ecx, {effective_group}",
    "    cmp eax, {getegid}",
    "    je 60f",
    "    mov ecx, {process_group}",
    "    cmp eax, {getpgrp}",
    "    je 60f",
    "    jmp 90f",
    // The numbers.
    "60: mov rax, [r11 + rcx * 8]",
    "    jmp 85f",
    // lseek(edi, rsi, edx).
    "10:",
    find_descriptor!(),
    "    cmp edx, 1",
    "    je 12f",
    "    ja 13f",
    "    mov rax, rsi",
    "    jmp 15f",
    "12:",
    load_offset!(),
    "    jmp 14f",
    "13: cmp edx, 2",
    "    jne 90f",
    "    mov rax, [rcx + {size}]",
    "14: add rax, rsi",
    "    jo 90f",
    "15: test rax, rax",
    "    js 90f",
    "    lea rcx, [rax + 1]",
    "    jmp 80f",
    // read(edi, rsi, rdx), from the window or at the end of the file.
    "20:",
    find_descriptor!(),
    "    mov rax, r11",
    "    movabs r11, {words}",
    "    mov [r11 + {place}], rax",
    "    mov [r11 + {descriptor}], rdi",
    "    mov [r11 + {buffer}], rsi",
    "    mov r11, rax",
    load_offset!(),
    "    cmp rax, [rcx + {size}]",
    "    jae 25f",
    "    mov rcx, [rcx + {window}]",
    "    sub rcx, rax",
    "    jbe 90f",
    "    cmp rcx, rdx",
    "    cmova rcx, rdx",
    "    test rcx, rcx",
    "    jz 90f",
    // From rsi to rdi, up to rcx.
    "afresh_linux_inside_copies:",
    "    mov rdi, rsi",
    "    movabs rsi, {window_at}",
    "    add rsi, rax",
    "    add rcx, rdi",
    "    jc 24f",
    "21: lea rax, [rdi + 8]",
    "    cmp rax, rcx",
    "    ja 22f",
    "    mov rax, [rsi]",
    "    mov [rdi], rax",
    "    add rsi, 8",
    "    add rdi, 8",
    "    jmp 21b",
    "22: cmp rdi, rcx",
    "    jae 23f",
    "    mov al, [rsi]",
    "    mov [rdi], al",
    "    add rsi, 1",
    "    add rdi, 1",
    "    jmp 22b",
    // The result, and the new offset plus one.
    "23: movabs r11, {words}",
    "    mov rax, rdi",
    "    sub rax, [r11 + {buffer}]",
    "    movabs rcx, {window_at}",
    "    sub rsi, rcx",
    "    lea rcx, [rsi + 1]",
    "    mov rsi, [r11 + {buffer}]",
    "    mov rdi, [r11 + {descriptor}]",
    "    mov r11, [r11 + {place}]",
    "    jmp 80f",
    "24: movabs r11, {words}",
    "    mov rsi, [r11 + {buffer}]",
    "    mov rdi, [r11 + {descriptor}]",
    "afresh_linux_inside_copied:",
    "    jmp 90f",
    "25: xor eax, eax",
    "    jmp 85f",
    // close(edi).
    "70:",
    find_descriptor!(),
    "    mov ecx, edi",
    "    and ecx, {descriptors} - 1",
    "    movabs r11, {words}",
    "    mov rax, [r11 + {closed}]",
    "    bts rax, rcx",
    // The list becomes longer by this place.
    "    mov r11, rax",
    "    shr r11, 8",
    "    shl r11, 11",
    "    shl ecx, 8",
    "    or r11, rcx",
    "    movzx ecx, al",
    "    or rcx, r11",
    "    xor eax, eax",
    "    movabs r11, {words}",
    "    lea r11, [r11 + {closed}]",
    "    jmp 80f",
    // newfstatat(edi, rsi, rdx, r10d), without a path.
    "30: cmp r10d, {nofollow}",
    "    je 36f",
    "    cmp r10d, {empty_path}",
    "    jne 90f",
    "    test rsi, rsi",
    "    jz 90f",
    "    cmp byte ptr [rsi], 0",
    "    jne 90f",
    find_descriptor!(),
    copy_stat!("rdx"),
    // newfstatat(edi, rsi, rdx), which follows no link: the attributes from the cursor on.
    "36: movabs rcx, {words}",
    "    mov r11, [rcx + {cursor}]",
    "37: movabs rcx, {attributes_end}",
    "    cmp r11, [rcx]",
    "    jae 90f",
    "    cmp edi, [r11]",
    "    jne 39f",
    "    xor ecx, ecx",
    "38: mov al, [rsi + rcx]",
    "    cmp al, [r11 + rcx + {path}]",
    "    jne 39f",
    "    add rcx, 1",
    "    test al, al",
    "    jnz 38b",
    ".irp at, 0,8,16,24,32,40,48,56,64,72,80,88,96,104,112,120,128,136",
    "    mov rax, [r11 + {attribute_len} - {stat_len} + \\at]",
    "    mov [rdx + \\at], rax",
    ".endr",
    "    lea rax, [r11 + {attribute_len}]",
    "    movabs r11, {words}",
    "    mov [r11 + {cursor}], rax",
    "    xor eax, eax",
    "    jmp 85f",
    "39: add r11, {attribute_len}",
    "    jmp 37b",
    // fstat(edi, rsi).
    "35:",
    find_descriptor!(),
    copy_stat!("rsi"),
    // ioctl(edi, esi): it is no terminal.
    "40: cmp esi, {tcgets}",
    "    jne 90f",
    find_descriptor!(),
    "    mov rax, {enotty}",
    "    jmp 85f",
    // rt_sigaction(edi, rsi, rdx, r10), with one new action for each signal.
    "50: cmp r10, 8",
    "    jne 90f",
    "    lea ecx, [rdi - 1]",
    "    cmp ecx, 64",
    "    jae 90f",
    // The old action is stored before the commit, and must not be stored over the new one.
    "    mov rax, rsi",
    "    sub rax, rdx",
    "    add rax, 31",
    "    cmp rax, 62",
    "    jbe 90f",
    "    movabs r11, {words}",
    "    bt qword ptr [r11 + {changed}], rcx",
    "    jc 51f",
    "    shl ecx, 5",
    "    test rsi, rsi",
    "    jz 52f",
    "    cmp ecx, ({sigkill} - 1) * 32",
    "    je 90f",
    "    cmp ecx, ({sigstop} - 1) * 32",
    "    je 90f",
    // The place counts from the commit on.
    "    movabs r11, {new_actions}",
    "    add r11, rcx",
    ".irp at, 0,8,16,24",
    "    mov rax, [rsi + \\at]",
    "    mov [r11 + \\at], rax",
    ".endr",
    "52: test rdx, rdx",
    "    jz 53f",
    "    movabs rax, {actions_at}",
    "    add rcx, rax",
    ".irp at, 0,8,16,24",
    "    mov rax, [rcx + \\at]",
    "    mov [rdx + \\at], rax",
    ".endr",
    "53: xor eax, eax",
    "    test rsi, rsi",
    "    jz 85f",
    "    lea ecx, [rdi - 1]",
    "    movabs r11, {words}",
    "    mov rax, [r11 + {changed}]",
    "    bts rax, rcx",
    "    mov rcx, rax",
    "    xor eax, eax",
    "    lea r11, [r11 + {changed}]",
    "    jmp 80f",
    // The same action again.
    "51: test rdx, rdx",
    "    jnz 90f",
    "    test rsi, rsi",
    "    jz 90f",
    "    shl ecx, 5",
    "    movabs r11, {new_actions}",
    "    add r11, rcx",
    ".irp at, 0,8,16,24",
    "    mov rax, [rsi + \\at]",
    "    cmp rax, [r11 + \\at]",
    "    jne 90f",
    ".endr",
    "    xor eax, eax",
    "    jmp 85f",
    // rt_sigprocmask(edi, rsi, rdx, r10): a question.
    "55: test rsi, rsi",
    "    jnz 90f",
    "    cmp r10, 8",
    "    jne 90f",
    "    mov rcx, [r11 + 8 * {blocked}]",
    "    xor eax, eax",
    "    test rdx, rdx",
    "    jz 85f",
    "    mov [rdx], rcx",
    "    jmp 85f",
    // Without an answer: the call is made.
    "90: movabs r11, {words}",
    "    mov rcx, [r11 + {call}]",
    "    mov rax, [r11 + {number}]",
    "    mov [r11 + {tried}], rcx",
    "    jmp rcx",
    // The commit.
    "80: mov [r11], rcx",
    "afresh_linux_inside_done:",
    "85: movabs r11, {words}",
    "    mov rcx, [r11 + {call}]",
    // As behind a system call: the address behind it, and the flags.
    "    lea rcx, [rcx + 2]",
    "    mov r11d, 0x246",
    "    jmp rcx",
    "afresh_linux_inside_end:",
    ".popsection",
    words = const stub::CONTROL + stub::INSIDE_WORDS as u64,
    answers = const stub::CONTROL + ANSWERS_AT as u64,
    call = const CALL,
    number = const NUMBER,
    closed = const CLOSED,
    changed = const CHANGED,
    tried = const TRIED,
    cursor = const CURSOR,
    attributes_end = const stub::CONTROL + (ANSWERS_AT + ATTRIBUTES_END) as u64,
    attribute_len = const ATTRIBUTE_LEN,
    stat_len = const STAT_LEN,
    path = const PATH,
    nofollow = const libc::AT_SYMLINK_NOFOLLOW,
    new_actions = const stub::CONTROL + stub::NEW_ACTIONS as u64,
    sigkill = const libc::SIGKILL,
    sigstop = const libc::SIGSTOP,
    descriptor = const DESCRIPTOR,
    buffer = const BUFFER,
    place = const PLACE,
    window = const WINDOW,
    window_at = const stub::WINDOW,
    descriptors = const DESCRIPTORS,
    descriptor_len = const DESCRIPTOR_LEN,
    numbers_len = const NUMBERS_LEN,
    offset = const OFFSET,
    size = const SIZE,
    stat = const STAT,
    read = const libc::SYS_read,
    close = const libc::SYS_close,
    fstat = const libc::SYS_fstat,
    lseek = const libc::SYS_lseek,
    rt_sigaction = const libc::SYS_rt_sigaction,
    rt_sigprocmask = const libc::SYS_rt_sigprocmask,
    ioctl = const libc::SYS_ioctl,
    getpid = const libc::SYS_getpid,
    getuid = const libc::SYS_getuid,
    getgid = const libc::SYS_getgid,
    geteuid = const libc::SYS_geteuid,
    getegid = const libc::SYS_getegid,
    getppid = const libc::SYS_getppid,
    getpgrp = const libc::SYS_getpgrp,
    gettid = const libc::SYS_gettid,
    newfstatat = const libc::SYS_newfstatat,
    process = const Answer::Process as usize,
    thread = const Answer::Thread as usize,
    parent = const Answer::Parent as usize,
    user = const Answer::User as usize,
    effective_user = const Answer::EffectiveUser as usize,
    group = const Answer::Group as usize,
    effective_group = const Answer::EffectiveGroup as usize,
    process_group = const Answer::ProcessGroup as usize,
    blocked = const Answer::Blocked as usize,
    actions_at = const stub::ACTIONS,
    empty_path = const libc::AT_EMPTY_PATH,
    tcgets = const libc::TCGETS,
    enotty = const -libc::ENOTTY,
);

unsafe extern "C" {
    static afresh_linux_inside: u8;
    static afresh_linux_inside_kept: u8;
    static afresh_linux_inside_copies: u8;
    static afresh_linux_inside_copied: u8;
    static afresh_linux_inside_done: u8;
    static afresh_linux_inside_end: u8;
}

fn offset_of(label: *const u8) -> usize {
    label.addr() - (&raw const afresh_linux_inside).addr()
}

/// The code, for the page [`stub::INSIDE`].
pub(in crate::platform) fn code() -> &'static [u8] {
    let length = offset_of(&raw const afresh_linux_inside_end);
    // SAFETY: both labels are in the same section of this very assembly, the second after the
    // first, so the bytes between them are initialised and belong to the program's read-only data.
    unsafe { std::slice::from_raw_parts(&raw const afresh_linux_inside, length) }
}

/// How far the code inside has come with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::platform) enum Progress {
    /// The registers have its number and its address.
    Begun,
    /// The words have them.
    Kept,
    /// The words have them, and the first two arguments.
    Copies,
    /// It is answered.
    Answered,
}

/// How far the code has come whose next instruction is at `pointer`; `None` if that is not of it.
pub(in crate::platform) fn progress(pointer: u64) -> Option<Progress> {
    let offset = usize::try_from(pointer.checked_sub(stub::INSIDE)?).ok()?;
    let [kept, copies, copied, done, end] = [
        &raw const afresh_linux_inside_kept,
        &raw const afresh_linux_inside_copies,
        &raw const afresh_linux_inside_copied,
        &raw const afresh_linux_inside_done,
        &raw const afresh_linux_inside_end,
    ]
    .map(offset_of);
    (offset < end).then_some(match offset {
        offset if offset < kept => Progress::Begun,
        offset if (copies..copied).contains(&offset) => Progress::Copies,
        offset if offset < done => Progress::Kept,
        _ => Progress::Answered,
    })
}
