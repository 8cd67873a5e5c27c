//! The boot of a guest process: the calls that it makes before it has memory of the guest.
//!
//! Only these are not inspected, and the last of them installs the filter. Most are made once, by
//! the zygote ([`super::zygote`]): its children lack the rights that it has dropped. Before the
//! filter the process drops rights that it could use if a call ever passed: capabilities, new
//! processes and files by limits, names of files, the network and signals by Landlock where the
//! kernel has it.

use std::ops::Range;

use afresh_memory::ImageFile;
use afresh_sys::merges_memory;
use rustix::process::{Resource, getrlimit};

use super::commands::{Continuation, StubCommands};
use super::control::Control;
use super::frame::ThreadBases;
use super::mapped_image::FileMapping;
use super::{arch, filter, stub, vdso};
use crate::resource_numbers;

/// Mappings of the image that are made here; more are made afterwards, one by one.
pub(super) const PIECES: usize = 400;
/// Maximum steps that [`write_template`] writes.
pub(super) const MAX_TEMPLATE_STEPS: usize = 490;
const _: () = assert!(stub::FIRST + 64 * (MAX_TEMPLATE_STEPS + 3) <= stub::INSIDE_WORDS);
/// Descriptor of the first image file in the child; the others follow.
const IMAGE_FILE: u64 = 4;
/// Maximum files of an image for a new process: with its other descriptors they fit into
/// [`stub::LENT_LEN`].
pub(super) const FILES: usize = 8;
/// Descriptors of a process: initial ones, those for the sentry, and files of its image.
pub(super) const DESCRIPTORS: u64 = 64;
/// The receipt of the orders of a boot: no code of a guest has run yet.
pub(super) const BOOT_RECEIPT: u64 = 1;
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITIES: u64 = 0x2008_0522;

/// Sets whether all memory of a process is merged with equal pages (KSM).
const PR_SET_MEMORY_MERGE: u64 = 67;

/// `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
const WAIT_KILLABLE: u64 = 1 << 5;

/// Structures that the calls point to, at the end of the signal stack, which nothing uses yet.
struct Data<'a> {
    control: &'a mut Control,
    next: usize,
}

impl Data<'_> {
    /// Puts `bytes` there; where the process finds them.
    fn put(&mut self, bytes: &[u8]) -> u64 {
        let at = self.next;
        self.control.write(at, bytes);
        self.next += bytes.len().next_multiple_of(8);
        stub::CONTROL + at as u64
    }

    fn words(&mut self, words: &[u64]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(&bytes)
    }
}

/// Calls, as they are collected.
#[derive(Default)]
struct Calls(Vec<[u64; 7]>);

impl Calls {
    fn call(&mut self, number: libc::c_long, args: &[u64]) {
        let mut call = [0; 7];
        call[0] = number as u64;
        call[1..=args.len()].copy_from_slice(args);
        self.0.push(call);
    }

    fn write(self, control: &mut Control, then: Continuation, receipt: u64) {
        let list = StubCommands { calls: self.0, ..StubCommands::default() };
        control.write(0, &list.encode(then, ThreadBases::default(), stub::ORDERS_LEN, receipt));
    }
}

/// Writes the calls with which a forked process receives its message: one byte, with the
/// descriptors.
fn write_message(control: &mut Control) {
    let parts = stub::CONTROL + stub::MESSAGE_PARTS as u64;
    let header = [0, 0, parts, 1, parts + 64, stub::LENT_LEN as u64, 0];
    for (at, words) in [(stub::MESSAGE, &header[..]), (stub::MESSAGE_PARTS, &[parts + 32, 1])] {
        words
            .iter()
            .enumerate()
            .for_each(|(index, word)| control.write_word(at + 8 * index, *word));
    }
}

/// Writes the zygote's steps before its first fork. `list` holds its mappings, as the kernel lists
/// them. Returns the address of the guests' vDSO, in it and all its children; `None` without one.
pub(super) fn write_zygote(control: &mut Control, list: &str) -> Option<u64> {
    write_message(control);
    let mut data = Data { control, next: stub::BOOT_DATA };
    let mut calls = Calls::default();
    let mut call = |number, args: &[u64]| calls.call(number, args);
    call(libc::SYS_close_range, &[3, u64::from(u32::MAX)]);
    call(libc::SYS_prctl, &[libc::PR_SET_NO_NEW_PRIVS as u64, 1]);
    call(libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64]);
    if merges_memory() {
        // A page that the kernel merges loses its write protection.
        call(libc::SYS_prctl, &[PR_SET_MEMORY_MERGE, 0]);
    }
    for order in arch::zygote_calls() {
        call(order[0] as libc::c_long, &order[1..]);
    }
    call(libc::SYS_munmap, &[0, stub::CODE]);
    let behind = stub::CONTROL + stub::CONTROL_LEN as u64;
    call(libc::SYS_munmap, &[behind, stub::ABOVE - behind]);
    // Until the first return to the guest: an earlier interrupt would find this code instead of
    // guest code.
    let all = data.words(&[u64::MAX]);
    call(libc::SYS_rt_sigprocmask, &[libc::SIG_SETMASK as u64, all, 0, 8]);
    let stack = data.words(&[stub::SIGNAL_STACK, 0, stub::SIGNAL_STACK_LEN as u64]);
    call(libc::SYS_sigaltstack, &[stack]);
    // SA_SIGINFO, SA_RESTORER, SA_ONSTACK, SA_RESTART; all other signals wait.
    let handler = data.words(&[stub::CODE, 0x1c00_0004, stub::CODE, u64::MAX]);
    for signal in [libc::SIGSYS, stub::INTERRUPT].into_iter().chain(stub::FAULTS) {
        call(libc::SYS_rt_sigaction, &[signal as u64, handler, 0, 8]);
    }

    let none = data.words(&[0, 0]);
    for limit in [resource_numbers::RLIMIT_CORE, resource_numbers::RLIMIT_FSIZE] {
        call(libc::SYS_prlimit64, &[0, u64::from(limit), none]);
    }
    // The limit of this process may be lower, and cannot be raised.
    let most =
        getrlimit(Resource::Nofile).maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
    let few = data.words(&[most, most]);
    call(libc::SYS_prlimit64, &[0, u64::from(resource_numbers::RLIMIT_NOFILE), few]);
    if let Some(ruleset) = everything_forbidden() {
        let size = 8 * ruleset.len() as u64;
        let ruleset = data.words(&ruleset);
        // It is the first descriptor that is free.
        call(libc::SYS_landlock_create_ruleset, &[ruleset, size, 0]);
        call(libc::SYS_landlock_restrict_self, &[3, 0]);
        call(libc::SYS_close, &[3]);
    }
    let version = data.words(&[CAPABILITIES]);
    let no_capabilities = data.words(&[0, 0, 0]);
    call(libc::SYS_capset, &[version, no_capabilities]);

    let (moves, clock) = settle(list);
    calls.0.extend(moves);
    calls.write(control, Continuation::Fork, BOOT_RECEIPT);
    clock.and(vdso::of_guests()).map(|_| stub::VDSO)
}

/// The calls that copy the pages of `ranges`, which are mapped writable.
fn copies(ranges: &[Range<u64>]) -> impl Iterator<Item = [u64; 7]> {
    let advice = libc::MADV_POPULATE_WRITE as u64;
    ranges.iter().map(move |range| {
        [libc::SYS_madvise as u64, range.start, range.end - range.start, advice, 0, 0, 0]
    })
}

/// Writes the steps of a new process. `pieces` are of the files that it is sent, or of none;
/// nothing if it shows no image. Pages of `copied` are the process's own from the beginning.
pub(super) fn write_child(
    control: &mut Control,
    pieces: Option<(&[FileMapping], &[&ImageFile])>,
    copied: &[Range<u64>],
) {
    let mut data = Data { control, next: stub::BOOT_DATA };
    let mut calls = Calls::default();
    let mut call = |number, args: &[u64]| calls.call(number, args);
    call(libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64]);
    let clock = clock_page();
    call(clock[0] as libc::c_long, &clock[1..]);
    let orders = pieces.into_iter().flat_map(|(pieces, files)| orders(pieces, files));
    orders.chain(copies(copied)).for_each(|order| call(order[0] as libc::c_long, &order[1..]));
    // The image's files may also contain other images.
    call(libc::SYS_close_range, &[0, u64::from(u32::MAX)]);
    if pieces.is_some() {
        // Faults of user code only: no privilege is needed.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1;
        call(libc::SYS_userfaultfd, &[flags as u64]);
    }
    // The sentry sleeps until then. The first call writes a signal's number to the word.
    let booted = stub::CONTROL + stub::BOOTED as u64;
    call(libc::SYS_prctl, &[libc::PR_GET_PDEATHSIG as u64, booted]);
    call(libc::SYS_futex, &[booted, libc::FUTEX_WAKE as u64, 1]);
    let program = filter::program();
    let steps: Vec<u8> = program
        .iter()
        .flat_map(|step| {
            let [c0, c1] = step.code.to_le_bytes();
            let [k0, k1, k2, k3] = step.k.to_le_bytes();
            [c0, c1, step.jt, step.jf, k0, k1, k2, k3]
        })
        .collect();
    let steps = data.put(&steps);
    let filter = data.words(&[program.len() as u64, steps]);
    let mode = u64::from(libc::SECCOMP_SET_MODE_FILTER);
    // A call that the sentry has received is answered despite any signals, so none is served twice.
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | WAIT_KILLABLE;
    call(libc::SYS_seccomp, &[mode, flags, filter]);
    calls.write(control, Continuation::Ask, BOOT_RECEIPT);
}

/// The call that maps the page of clock offsets behind the control area, the window, and the page
/// of actions.
fn clock_page() -> [u64; 7] {
    let fixed = (libc::MAP_SHARED | libc::MAP_FIXED) as u64;
    let (page, len) = (stub::CLOCK_PAGE, stub::READ_ONLY_LEN as u64);
    let (read, from) = (libc::PROT_READ as u64, stub::CONTROL_LEN as u64);
    [libc::SYS_mmap as u64, page, len, read, fixed, stub::CONTROL_FILE, from]
}

/// The call that maps the control area of a child.
pub(super) fn control_area() -> [u64; 7] {
    let (shared, access) = (libc::MAP_SHARED | libc::MAP_FIXED, libc::PROT_READ | libc::PROT_WRITE);
    let (area, len) = (stub::CONTROL, stub::CONTROL_LEN as u64);
    [libc::SYS_mmap as u64, area, len, access as u64, shared as u64, stub::CONTROL_FILE, 0]
}

/// Writes the steps of a child that has its parent's memory, filter and limits. They follow
/// [`control_area`]. Returns them.
pub(super) fn write_fork(control: &mut Control, receipt: u64) -> Vec<[u64; 7]> {
    let mut calls = Calls::default();
    calls.call(libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64]);
    calls.0.push(clock_page());
    // It has closed its parent's descriptors. This closes that of the control area.
    calls.call(libc::SYS_close_range, &[0, u64::from(u32::MAX)]);
    let steps = calls.0.clone();
    calls.write(control, Continuation::Ask, receipt);
    steps
}

/// The calls that make `pieces`, which are of those files that are sent first, or of none.
fn orders(pieces: &[FileMapping], files: &[&ImageFile]) -> impl Iterator<Item = [u64; 7]> {
    let descriptor = |file: &ImageFile| files.iter().position(|sent| sent.shares_file(file));
    pieces.iter().map(move |piece| {
        let sent = piece.file.as_ref().and_then(descriptor);
        piece.order(sent.map_or(u64::MAX, |place| IMAGE_FILE + place as u64))
    })
}

/// The calls of a template that make `pieces`, which are parts of `files`, or anonymous.
pub(super) fn template_calls(pieces: &[FileMapping], files: &[&ImageFile]) -> Vec<[u64; 7]> {
    orders(pieces, files).collect()
}

/// Writes the steps of a process that becomes a template, or forks the next stage of one. It
/// receives `files` files of an image, makes `steps`, at most [`MAX_TEMPLATE_STEPS`], and listens
/// on the socket that follows the files.
pub(super) fn write_template(control: &mut Control, steps: &[[u64; 7]], files: usize) {
    write_message(control);
    let mut calls = Calls::default();
    calls.call(libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64]);
    calls.0.extend(steps);
    calls.call(libc::SYS_dup3, &[IMAGE_FILE + files as u64, stub::SOCKET as u64, 0]);
    // The image's files may also contain other images.
    calls.call(libc::SYS_close_range, &[3, u64::from(u32::MAX)]);
    calls.write(control, Continuation::Fork, BOOT_RECEIPT);
}

/// Moves the kernel's vDSO to a place that is the same in every process, and unmaps the other
/// kernel mappings. Returns the address of the vDSO; `None` without one.
fn settle(list: &str) -> (Vec<[u64; 7]>, Option<u64>) {
    let mut clock = vdso::mappings(list);
    let first = clock.iter().map(|(start, ..)| *start).min().unwrap_or_default();
    let end = clock.iter().map(|(start, len, _)| start + len).max().unwrap_or_default();
    if end - first > stub::CLOCK.end - stub::CLOCK.start {
        clock.clear();
    }
    // Its parts find each other by distance, which stays.
    let place = |start: u64| stub::CLOCK.start + (start - first);
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut calls: Vec<[u64; 7]> = clock
        .iter()
        .map(|&(start, len, _)| [libc::SYS_mremap as u64, start, len, len, flags, place(start), 0])
        .collect();
    calls.push([libc::SYS_munmap as u64, stub::ABOVE, stub::TOP - stub::ABOVE, 0, 0, 0, 0]);
    let code = clock.iter().find(|(.., code)| *code);
    (calls, code.map(|&(start, ..)| place(start)))
}

/// Whether guests' processes get a Landlock ruleset.
pub(super) fn has_landlock() -> bool {
    everything_forbidden().is_some()
}

/// A Landlock ruleset without a rule, for everything that this kernel can forbid; `None` without
/// Landlock.
fn everything_forbidden() -> Option<Vec<u64>> {
    const VERSION: libc::c_long = 1;
    // SAFETY: with this flag the call reads no memory and returns the version.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION)
    };
    let names: u64 = match version {
        ..1 => return None,
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => (1 << 16) - 1,
    };
    // Then binding and connecting, then signals and abstract sockets of others.
    Some(match version {
        ..4 => vec![names],
        4 | 5 => vec![names, 3],
        _ => vec![names, 3, 3],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_moved_as_a_whole_and_the_rest_goes() {
        let list = "700000000000-700000001000 r-xp 00001000 00:01 1 /memfd:afresh-stub (deleted)\n\
            7fff1000-7fff5000 r--p 00000000 00:00 0                          [vvar]\n\
            7fff5000-7fff7000 r--p 00000000 00:00 0                          [vvar_vclock]\n\
            7fff7000-7fff9000 r-xp 00000000 00:00 0                          [vdso]\n\
            7fffffffe000-7ffffffff000 rw-p 00000000 00:00 0                  [stack]\n\
            ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0          [vsyscall]\n";
        let (calls, code) = settle(list);
        assert_eq!(code, Some(stub::CLOCK.start + 0x6000));
        assert_eq!(calls.len(), 4);
        for (call, (from, to)) in
            calls.iter().zip([(0x7fff_1000, 0), (0x7fff_5000, 0x4000), (0x7fff_7000, 0x6000)])
        {
            assert_eq!((call[1], call[5]), (from, stub::CLOCK.start + to));
        }
        assert_eq!(settle("").1, None);
        assert_eq!(settle("").0.len(), 1);
    }
}
