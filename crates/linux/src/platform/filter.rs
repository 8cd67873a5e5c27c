//! The seccomp filter of guest processes.
//!
//! It lets three calls through by itself, from the stub's page only: `rt_sigreturn`, which changes
//! registers, the signal mask and the signal stack of the process, and `close` and `close_range`. A
//! process needs none of its descriptors once it has booted, and has the sentry's files only while
//! the stub executes orders. All else stops. From the stub's page it becomes a question to the
//! sentry, and one that makes a process ends the process, except `clone` with the flags that the
//! sentry orders for a fork of the guest. From anywhere else, calls whose answer may need new
//! registers or maps raise SIGSYS, so that the stub can carry out orders; the others also become
//! questions. A read is of the former kind if it may be the caller's input, which mostly waits;
//! reads of other files mostly do not. On arm64 a call of the former kind becomes a question too if
//! the kernel would change its first argument: see [`arch::RESTARTS`]. Calls that the code inside
//! the process may answer raise SIGSYS as well: see [`super::inside`]. Calls of other kinds, by
//! `int 0x80` or of x32, fail with ENOSYS everywhere, as on a kernel without them: none is
//! executed, so none has to end the process.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_TRAP, SECCOMP_RET_USER_NOTIF,
    sock_filter,
};

use super::arch::{self, calls};
use super::stub;

const ARCH: u32 = arch::AUDIT_ARCH;
/// The bit in the number of calls of the x32 kind; -1 has it, too.
const X32: u32 = 0x4000_0000;
/// The error of calls of other kinds.
const UNKNOWN_KIND: u32 = SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const POINTER_LOW: u32 = 8;
const POINTER_HIGH: u32 = 12;
const FIRST_ARGUMENT: u32 = 16;
const FOURTH_ARGUMENT: u32 = 40;

/// Descriptors below are those that programs begin with.
const STREAMS: u32 = 3;

/// Calls at which orders may have to be carried out, or at which a thread of the guest may wait,
/// end, or be given other registers.
const ORDERED: [libc::c_long; 45] = [
    libc::SYS_readv,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_shmat,
    libc::SYS_shmdt,
    libc::SYS_brk,
    calls::SYS_arch_prctl,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    calls::SYS_pause,
    libc::SYS_clone,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    calls::SYS_poll,
    libc::SYS_ppoll,
    calls::SYS_select,
    libc::SYS_pselect6,
    calls::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_waitid,
    calls::SYS_fork,
    calls::SYS_vfork,
    libc::SYS_clone3,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_sigaltstack,
    libc::SYS_set_tid_address,
    libc::SYS_kill,
    libc::SYS_wait4,
];

/// Calls that the stub takes to the code inside the process first.
const TAKEN_INSIDE: &[libc::c_long] =
    if arch::ANSWERS_INSIDE { &[libc::SYS_rt_sigaction] } else { &[] };

/// Calls that make processes or replace programs, and are no orders of the sentry. `clone` with
/// other flags than those of a fork is treated like them. The limit of processes does not bind
/// root; this does.
const PROCESSES: [libc::c_long; 5] =
    [calls::SYS_fork, calls::SYS_vfork, libc::SYS_clone3, libc::SYS_execve, libc::SYS_execveat];

/// Calls of the stub that pass.
const PASSED: [libc::c_long; 3] = [libc::SYS_rt_sigreturn, libc::SYS_close, libc::SYS_close_range];

/// The numbers of calls of this processor among `list`.
fn present(list: &[libc::c_long]) -> Vec<u32> {
    list.iter().filter_map(|number| u32::try_from(*number).ok()).collect()
}

/// Whether a call is one of those that raise SIGSYS. It becomes a question instead if the kernel
/// would take its first argument for the result of an interrupted call ([`arch::RESTARTS`]).
pub(super) fn is_ordered(number: i64) -> bool {
    ORDERED.contains(&number) || TAKEN_INSIDE.contains(&number)
}

/// Whether a call of the stub passes, so that the sentry does not see it.
pub(super) fn passes(number: u64) -> bool {
    PASSED.iter().any(|passed| *passed as u64 == number)
}

fn load(offset: u32) -> sock_filter {
    statement(BPF_LD | BPF_W | BPF_ABS, offset)
}

fn ret(action: u32) -> sock_filter {
    statement(BPF_RET | BPF_K, action)
}

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn jump(test: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | test | BPF_K) as u16, jt, jf, k }
}

/// The program, for `SECCOMP_SET_MODE_FILTER`.
pub(crate) fn program() -> Vec<sock_filter> {
    // Instructions that test the number of a call from the stub.
    let (processes, mut ordered) = (present(&PROCESSES), present(&ORDERED));
    ordered.extend(present(TAKEN_INSIDE));
    let inside = (PASSED.len() + processes.len()) as u8 + 6;
    let mut program = vec![
        load(ARCHITECTURE),
        jump(BPF_JEQ, ARCH, 1, 0),
        ret(UNKNOWN_KIND),
        load(NUMBER),
        jump(BPF_JSET, X32, 0, 1),
        ret(UNKNOWN_KIND),
        // The stub's page?
        load(POINTER_HIGH),
        jump(BPF_JEQ, (stub::CODE >> 32) as u32, 0, inside + 3),
        load(POINTER_LOW),
        jump(BPF_JGE, stub::CODE as u32 + 0x1000, inside + 1, 0),
        load(NUMBER),
    ];
    for (index, number) in PASSED.into_iter().enumerate() {
        let behind = PASSED.len() - 1 - index;
        program.push(jump(BPF_JEQ, number as u32, behind as u8, u8::from(behind == 0)));
    }
    program.push(ret(SECCOMP_RET_ALLOW));
    for (index, number) in processes.iter().enumerate() {
        let behind = processes.len() - 1 - index + 4;
        program.push(jump(BPF_JEQ, *number, behind as u8, 0));
    }
    program.extend([
        jump(BPF_JEQ, libc::SYS_clone as u32, 0, 2),
        // The kernel reads no more of its flags than these 32 bits.
        load(FIRST_ARGUMENT),
        jump(BPF_JEQ, stub::FORK_FLAGS as u32, 0, 1),
        ret(SECCOMP_RET_USER_NOTIF),
        ret(SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ]);
    // A lookup that follows no link.
    let lookup = match arch::ANSWERS_INSIDE {
        true => vec![
            jump(BPF_JEQ, libc::SYS_newfstatat as u32, 0, 2),
            load(FOURTH_ARGUMENT),
            jump(BPF_JEQ, libc::AT_SYMLINK_NOFOLLOW as u32, 4, 3),
        ],
        false => Vec::new(),
    };
    // One instruction for each: the kernel compiles them for every process.
    for (index, number) in ordered.iter().enumerate() {
        let behind = ordered.len() - 1 - index + lookup.len() + 4;
        program.push(jump(BPF_JEQ, *number, behind as u8, 0));
    }
    program.extend(lookup);
    program.extend([
        jump(BPF_JEQ, libc::SYS_read as u32, 0, 2),
        load(FIRST_ARGUMENT),
        jump(BPF_JGE, STREAMS, 0, 1),
        ret(SECCOMP_RET_USER_NOTIF),
    ]);
    if !arch::RESTARTS.is_empty() {
        let restarts = arch::RESTARTS;
        program.extend([
            load(FIRST_ARGUMENT),
            jump(BPF_JGE, restarts.start as u32, 0, 2),
            jump(BPF_JGE, restarts.end as u32, 1, 0),
            ret(SECCOMP_RET_USER_NOTIF),
        ]);
    }
    program.push(ret(SECCOMP_RET_TRAP));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter as the kernel does.
    fn verdict(arch: u32, pointer: u64, number: u32, argument: u32) -> u32 {
        verdict_of(arch, pointer, number, [argument, 0])
    }

    /// The same, with the first and the fourth argument.
    fn verdict_of(arch: u32, pointer: u64, number: u32, arguments: [u32; 2]) -> u32 {
        let program = program();
        let (mut at, mut a) = (0, 0);
        loop {
            let s = program[at];
            at += 1;
            let code = u32::from(s.code);
            if code == BPF_LD | BPF_W | BPF_ABS {
                a = match s.k {
                    NUMBER => number,
                    ARCHITECTURE => arch,
                    POINTER_LOW => pointer as u32,
                    FIRST_ARGUMENT => arguments[0],
                    FOURTH_ARGUMENT => arguments[1],
                    _ => (pointer >> 32) as u32,
                };
            } else if code == BPF_RET | BPF_K {
                return s.k;
            } else {
                let holds = match code & 0xf0 {
                    BPF_JEQ => a == s.k,
                    BPF_JGE => a >= s.k,
                    _ => a & s.k != 0,
                };
                at += usize::from(if holds { s.jt } else { s.jf });
            }
        }
    }

    #[test]
    fn three_calls_pass_and_only_from_the_stub() {
        let places = [
            0,
            0x40_1000,
            stub::CODE - 1,
            stub::CODE,
            stub::CODE + 0xfff,
            stub::CODE + 0x1000,
            stub::IMAGE,
            u64::MAX,
        ];
        for pointer in places {
            for number in 0..600 {
                let inside = (stub::CODE..stub::CODE + 0x1000).contains(&pointer);
                let expected = match libc::c_long::from(number) {
                    number if inside && PASSED.contains(&number) => SECCOMP_RET_ALLOW,
                    number if inside && PROCESSES.contains(&number) => SECCOMP_RET_KILL_PROCESS,
                    // Without the flags of a fork.
                    libc::SYS_clone if inside => SECCOMP_RET_KILL_PROCESS,
                    _ if inside => SECCOMP_RET_USER_NOTIF,
                    libc::SYS_read => SECCOMP_RET_TRAP,
                    number if is_ordered(number) => SECCOMP_RET_TRAP,
                    _ => SECCOMP_RET_USER_NOTIF,
                };
                assert_eq!(
                    verdict(ARCH, pointer, number as u32, 0),
                    expected,
                    "{pointer:#x} {number}"
                );
                assert_eq!(verdict(3, pointer, number as u32, 0), UNKNOWN_KIND);
                assert_eq!(verdict(ARCH, pointer, number as u32 | X32, 0), UNKNOWN_KIND);
            }
            assert_eq!(verdict(ARCH, pointer, u32::MAX, 0), UNKNOWN_KIND);
        }
    }

    #[test]
    fn a_clone_of_the_stub_has_the_flags_of_a_fork() {
        let clone = libc::SYS_clone as u32;
        let fork = stub::FORK_FLAGS as u32;
        for flags in
            [0, fork | libc::CLONE_VM as u32, fork & !(libc::CLONE_PARENT as u32), u32::MAX]
        {
            assert_eq!(verdict(ARCH, stub::CODE, clone, flags), SECCOMP_RET_KILL_PROCESS);
        }
        assert_eq!(verdict(ARCH, stub::CODE, clone, fork), SECCOMP_RET_USER_NOTIF);
    }

    #[test]
    fn an_argument_that_the_kernel_takes_for_a_restart_reaches_the_sentry() {
        for number in present(&ORDERED).into_iter().chain(present(TAKEN_INSIDE)) {
            for argument in -600..600 {
                let expected = match arch::RESTARTS.contains(&argument) {
                    true => SECCOMP_RET_USER_NOTIF,
                    false => SECCOMP_RET_TRAP,
                };
                assert_eq!(verdict(ARCH, 0x40_1000, number, argument as u32), expected);
            }
        }
    }

    #[test]
    fn a_lookup_that_follows_no_link_goes_to_the_code_inside() {
        let lookup = libc::SYS_newfstatat as u32;
        let nofollow = libc::AT_SYMLINK_NOFOLLOW as u32;
        let trapped = if arch::ANSWERS_INSIDE { SECCOMP_RET_TRAP } else { SECCOMP_RET_USER_NOTIF };
        for (flags, expected) in [
            (nofollow, trapped),
            (0, SECCOMP_RET_USER_NOTIF),
            (nofollow | libc::AT_EMPTY_PATH as u32, SECCOMP_RET_USER_NOTIF),
        ] {
            assert_eq!(verdict_of(ARCH, 0x40_1000, lookup, [3, flags]), expected);
        }
        // The flags of another call mean something else.
        let open = libc::SYS_openat as u32;
        assert_eq!(verdict_of(ARCH, 0x40_1000, open, [3, nofollow]), SECCOMP_RET_USER_NOTIF);
        assert_eq!(verdict_of(ARCH, stub::CODE, lookup, [3, nofollow]), SECCOMP_RET_USER_NOTIF);
    }

    #[test]
    fn a_read_of_a_possible_input_descriptor_reaches_the_stub() {
        let read = libc::SYS_read as u32;
        for (descriptor, expected) in [
            (0, SECCOMP_RET_TRAP),
            (2, SECCOMP_RET_TRAP),
            (3, SECCOMP_RET_USER_NOTIF),
            (u32::MAX, SECCOMP_RET_USER_NOTIF),
        ] {
            assert_eq!(verdict(ARCH, 0x40_1000, read, descriptor), expected);
        }
    }
}
