//! The code that runs inside the guest process for the sentry, and its addresses.
//!
//! It starts as a program of one page: this code. That process maps a control area, carries out the
//! sentry's orders there, and is the zygote from then on: for each further control area that it
//! receives, it forks, and the child carries out the orders in that one (maps, the filter), and
//! requests more. In the child it then is the handler of SIGSYS, which the filter raises at system
//! calls that need more than an answer: it notifies the sentry, carries out its orders, wipes them,
//! and returns to the guest by `rt_sigreturn`, which loads every register from the frame that the
//! sentry has prepared. A call that sets or queries the action for a signal goes to the code inside
//! first, if that has answers.
//!
//! ```text
//! 0x0000_0001_0000 .. CODE     the guest's, laid out by the sentry
//! CODE                         this code, one page, r-x
//! INSIDE                       code that answers calls of the guest, one page, r-x
//! VDSO                         the vDSO of the guest, r-x
//! CONTROL                      orders: header, system calls, copies, data; rw, shared with the sentry
//! SIGNAL_STACK                 the frame with the guest's registers; rw, shared with the sentry
//! CLOCK_PAGE                   clock offsets and answers; read-only, shared with the sentry
//! WINDOW                       bytes of a file for calls inside; read-only, shared with the sentry
//! ACTIONS                      actions for signals, one page; read-only, shared with the sentry
//! CLOCK                        the kernel's vDSO, from which that of the guest reads the time; read-only
//! IMAGE .. ABOVE               the warm image, read-only
//! ```
//!
//! None of it is trusted. The guest may jump anywhere into this code and may write its own orders.
//! It gains only system calls from this page, and the sentry lets one of those through only if it
//! equals, to the last argument, its own next order.
//!
//! A guest can also have the processor interrupt this code, for example by a trap flag that it sets
//! with `rt_sigreturn`: the kernel then enters the handler at its start, and orders are left
//! undone. So orders carry a receipt, a random word that the code reads only after the last of
//! them, and returns with its next question. The guest cannot know it: it does not run between the
//! sentry's write and the wipe.

use std::ops::Range;
use std::time::Duration;

use super::arch;

/// Time limit of the stub for its orders, and of the start of a new process.
pub(super) const STUB_TIMEOUT: Duration = Duration::from_secs(20);

/// The signal that takes the processor from a guest's thread.
pub(super) const INTERRUPT: i32 = libc::SIGURG;
/// Signals that the processor raises for instructions of the guest.
pub(super) const FAULTS: [i32; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// Address of the code: the only page whose system calls may be continued.
pub(crate) const CODE: u64 = 0x7000_0000_0000;
/// Code that answers calls in the process ([`super::inside`]). Its calls are those of the guest.
pub(crate) const INSIDE: u64 = CODE + 0x1000;
/// The vDSO of the guest, and the room for it.
pub(crate) const VDSO: u64 = CODE + 0x2000;
pub(crate) const VDSO_LEN: u64 = CONTROL - 0x1000 - VDSO;
/// The control area.
pub(crate) const CONTROL: u64 = CODE + 0x1_0000;
/// Bytes for orders at the start of the control area. A reset wipes them all, so they are few.
pub(crate) const ORDERS_LEN: usize = 32 << 10;
/// The stack on which SIGSYS is handled, at the end of the control area.
pub(crate) const SIGNAL_STACK: u64 = CONTROL + ORDERS_LEN as u64;
/// Its length; the processor's whole state must fit.
pub(crate) const SIGNAL_STACK_LEN: usize = 16 << 10;
/// Length of the control area.
pub(crate) const CONTROL_LEN: usize = ORDERS_LEN + SIGNAL_STACK_LEN;
/// The page behind the control area, which the guest can only read.
pub(crate) const CLOCK_PAGE: u64 = CONTROL + CONTROL_LEN as u64;
/// Its length.
pub(crate) const CLOCK_PAGE_LEN: usize = 4096;
/// The window behind that page, with the bytes of a file. The guest can only read it, too.
pub(crate) const WINDOW: u64 = CLOCK_PAGE + CLOCK_PAGE_LEN as u64;
/// Its length.
pub(crate) const WINDOW_LEN: usize = 64 << 10;
/// The page behind the window, with the actions for signals. The guest can only read it.
pub(crate) const ACTIONS: u64 = WINDOW + WINDOW_LEN as u64;
/// Its length.
pub(crate) const ACTIONS_LEN: usize = 4096;
const _: () = assert!(ACTIONS + ACTIONS_LEN as u64 <= CLOCK.start);
/// Length of everything behind the control area that the guest can only read.
pub(crate) const READ_ONLY_LEN: usize = CLOCK_PAGE_LEN + WINDOW_LEN + ACTIONS_LEN;
/// Where the kernel's vDSO and its data are moved to, and how long they may be.
pub(crate) const CLOCK: Range<u64> = CODE + 0x10_0000..CODE + 0x20_0000;
/// Where the image is mapped for copying.
pub(crate) const IMAGE: u64 = 0x7100_0000_0000;
/// Longest image.
pub(crate) const IMAGE_LEN: u64 = 1 << 40;
/// The end of our mappings; everything above is free.
pub(crate) const ABOVE: u64 = IMAGE + IMAGE_LEN;
/// One past the last address of user memory.
pub(crate) const TOP: u64 = arch::TOP;
/// Addresses that the guest may map.
pub(crate) const GUEST: Range<u64> = 0x1_0000..CODE;

/// The zygote's message area: a word, a `struct msghdr`, and its buffers.
pub(crate) const WORD: usize = CONTROL_LEN - 4096;
pub(crate) const MESSAGE: usize = WORD + 64;
pub(crate) const MESSAGE_PARTS: usize = WORD + 128;
/// A word that is not zero once a process has all but installed its filter.
pub(crate) const BOOTED: usize = WORD + 32;
/// Data for calls of the boot.
pub(crate) const BOOT_DATA: usize = WORD + 256;
/// Bytes for descriptors in such a message.
pub(crate) const LENT_LEN: usize = 64;
/// The zygote's socket.
pub(crate) const SOCKET: i32 = 1;
/// Value under [`CONTINUATION`] for a process that becomes the zygote.
pub(crate) const FORKS: u64 = 2;

/// The system call for requests of the stub, which is never passed on.
pub(crate) const ASK: i64 = libc::SYS_getppid;

/// Flags of the calls that fork. A child's parent is the one that its maker has: this process. The
/// kernel writes the PID of a child to [`CHILD_PID`] before the child runs. No other order has
/// these flags as its first argument: that is an address, a descriptor or a small number.
pub(crate) const FORK_FLAGS: i32 = libc::CLONE_PARENT | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
/// Offset in the control area of the PID of a forked child, behind all orders.
pub(crate) const CHILD_PID: usize = ORDERS_LEN - 8;
/// Offset in the control area of the words of [`super::inside`], behind all orders.
pub(crate) const INSIDE_WORDS: usize = ORDERS_LEN - 192;
/// Offset in the control area of the actions for signals that the guest sets inside.
pub(crate) const NEW_ACTIONS: usize = INSIDE_WORDS - 2048;
/// Descriptor of the control area in a child.
pub(crate) const CONTROL_FILE: u64 = 3;

// Header of the orders: offsets in the control area.
pub(crate) const CALLS: usize = 0;
pub(crate) const COPIES: usize = 8;
pub(crate) const CONTINUATION: usize = 16;
pub(crate) const FIRST_BASE: usize = 24;
pub(crate) const SECOND_BASE: usize = 32;
pub(crate) const WIPE: usize = 40;
pub(crate) const FRAME: usize = 48;
pub(crate) const RECEIPT: usize = 56;
/// Offset of the first command.
pub(crate) const FIRST: usize = 64;

/// Whether `pointer` is in the stub's page.
pub(crate) fn holds(pointer: u64) -> bool {
    pointer & !0xfff == CODE
}

/// The instruction after the stub's request: a question comes only from there.
pub(crate) fn asked_at() -> u64 {
    CODE + asked_offset() as u64
}

/// The code as a program: a static ELF file of two segments, and a third one with the vDSO of
/// guests.
pub(crate) fn program() -> Vec<u8> {
    let code = code();
    let length = code.len();
    let entry = CODE + boot_offset() as u64;
    let vdso = super::vdso::of_guests();
    let mut elf = Vec::with_capacity(4096 + length);
    elf.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for half in [2u16, arch::ELF_MACHINE] {
        elf.extend(half.to_le_bytes()); // an executable, for this processor
    }
    elf.extend(1u32.to_le_bytes());
    for word in [entry, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 3 + u16::from(vdso.is_some()), 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let mut segment = |kind: u32, flags: u32, words: [u64; 6]| {
        elf.extend(kind.to_le_bytes());
        elf.extend(flags.to_le_bytes());
        words.iter().for_each(|word| elf.extend(word.to_le_bytes()));
    };
    segment(1, 5, [4096, CODE, CODE, length as u64, length as u64, 4096]);
    let inside = arch::inside::code();
    let length = inside.len() as u64;
    segment(1, 5, [8192, INSIDE, INSIDE, length, length, 4096]);
    if let Some(vdso) = vdso {
        let length = vdso.len() as u64;
        segment(1, 5, [12288, VDSO, VDSO, length, length, 4096]);
    }
    segment(0x6474_e551, 6, [0, 0, 0, 0, 0, 16]); // a stack that is not executable
    elf.resize(4096, 0);
    elf.extend(code);
    elf.resize(8192, 0);
    elf.extend(inside);
    if let Some(vdso) = vdso {
        elf.resize(12288, 0);
        elf.extend(vdso);
    }
    elf
}

// Labels in the code of the processor, in `arch`.
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
fn code() -> &'static [u8] {
    let length = offset_of(&raw const afresh_linux_stub_end);
    // SAFETY: both labels are in the same section of the assembly in `arch`, the second after the
    // first, so the bytes between them are initialised and belong to the program's read-only data.
    unsafe { std::slice::from_raw_parts(&raw const afresh_linux_stub, length) }
}

/// Where a process starts.
fn boot_offset() -> usize {
    offset_of(&raw const afresh_linux_stub_boot)
}

/// The instruction after the request of the stub.
fn asked_offset() -> usize {
    offset_of(&raw const afresh_linux_stub_asked)
}
