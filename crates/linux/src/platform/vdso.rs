//! The vDSO of guests: the kernel's, with clocks that stand still while a guest is frozen.
//!
//! A guest gets a copy of the vDSO. Every function of the copy begins with a jump to the original
//! at [`stub::CLOCK`], or to code behind the copy. That code adds clock offsets, which the sentry
//! writes to a page that the guest can only read. It makes no system call itself.
//!
//! Promises: a time that is read across a reset is read again, so no clock goes backwards within a
//! call. A vDSO of another form than expected gives the guest none, and it asks the sentry for the
//! time.

use std::ops::Range;

use afresh_sys::InheritedCell;
use rustix::time::{ClockId, clock_gettime};

use super::arch::vdso::{self as code, JUMP_LEN};
use super::stub;

/// Longest vDSO that is copied.
pub(super) const MAX_VDSO_SIZE: usize = 48 << 10;
const PAGE: usize = 4096;
pub(super) const NANOS: i64 = 1_000_000_000;

// Words of the page that the guest reads: when the offsets were written, then seconds and
// nanoseconds of both clocks.
pub(super) const EPOCH: usize = 0;
pub(super) const MONOTONIC: usize = 8;
pub(super) const BOOT: usize = 24;

/// Differences between guest clocks and host clocks, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClockOffsets {
    pub(crate) monotonic: i64,
    pub(crate) boot: i64,
}

impl ClockOffsets {
    /// The words of the page. The first differs after each change, so that a read across a change
    /// is noticed.
    pub(super) fn encode(self) -> [u64; 5] {
        let now = clock_gettime(ClockId::Realtime);
        let epoch = now.tv_sec.wrapping_mul(NANOS).wrapping_add(now.tv_nsec) as u64;
        let parts =
            |offset: i64| [offset.div_euclid(NANOS) as u64, offset.rem_euclid(NANOS) as u64];
        let ([seconds, nanos], [boot_seconds, boot_nanos]) =
            (parts(self.monotonic), parts(self.boot));
        [epoch, seconds, nanos, boot_seconds, boot_nanos]
    }
}

/// The kernel's mappings of its vDSO and the data of that: start, length, and whether it is the
/// code.
pub(super) fn mappings(list: &str) -> Vec<(u64, u64, bool)> {
    let mut found = Vec::new();
    for line in list.lines() {
        let name = line.rsplit(' ').next().unwrap_or_default();
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let address = |text| u64::from_str_radix(text, 16).ok();
        if (name == "[vdso]" || name.starts_with("[vvar"))
            && let Some((start, end)) = range.and_then(|(s, e)| address(s).zip(address(e)))
        {
            found.push((start, end - start, name == "[vdso]"));
        }
    }
    found
}

/// This process's vDSO, which is every process's, and its distance from the first of its mappings.
pub(super) fn of_kernel(list: &str) -> Option<(Vec<u8>, u64)> {
    let mappings = mappings(list);
    let first = mappings.iter().map(|(start, ..)| *start).min()?;
    let (start, len, _) = mappings.into_iter().find(|(.., code)| *code)?;
    let len = usize::try_from(len).ok().filter(|len| *len <= MAX_VDSO_SIZE)?;
    let mut bytes = vec![0; len];
    let memory = std::fs::File::open("/proc/self/mem").ok()?;
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut bytes, start).ok()?;
    Some((bytes, start - first))
}

/// The vDSO of guests, to be mapped at [`stub::VDSO`]; `None` without one.
pub(super) fn of_guests() -> Option<&'static [u8]> {
    static VDSO: InheritedCell<Option<Vec<u8>>> = InheritedCell::new();
    let made = VDSO.get_or_make(|| {
        let list = std::fs::read_to_string("/proc/self/maps").ok()?;
        let (kernel, distance) = of_kernel(&list)?;
        patched(&kernel, stub::CLOCK.start + distance)
    });
    made.as_deref()
}

/// A vDSO file, read with care: it comes from the kernel, and kernels differ.
struct Elf<'a>(&'a [u8]);

impl<'a> Elf<'a> {
    fn bytes(&self, at: usize, len: usize) -> Option<&'a [u8]> {
        self.0.get(at..at.checked_add(len)?)
    }

    fn number(&self, at: usize, len: usize) -> Option<usize> {
        let mut word = [0; 8];
        word[..len].copy_from_slice(self.bytes(at, len)?);
        usize::try_from(u64::from_le_bytes(word)).ok()
    }

    /// Headers of a table: where they are, how long each is, and how many.
    fn table(&self, [at, size, count]: [usize; 3]) -> Option<impl Iterator<Item = usize> + use<>> {
        let (at, size, count) =
            (self.number(at, 8)?, self.number(size, 2)?, self.number(count, 2)?);
        let last = size.checked_mul(count)?.checked_add(at)?;
        (size > 0 && last <= self.0.len()).then(|| (0..count).map(move |index| at + index * size))
    }

    /// Names of its functions with the ranges of their code.
    fn functions(&self) -> Option<Vec<(&'a [u8], Range<usize>)>> {
        const DYNSYM: usize = 11;
        const FUNCTION: usize = 2;
        if self.bytes(0, 6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let sections: Vec<usize> = self.table([40, 58, 60])?.collect();
        let symbols = sections.iter().find(|at| self.number(**at + 4, 4) == Some(DYNSYM))?;
        let (at, len) = (self.number(symbols + 24, 8)?, self.number(symbols + 32, 8)?);
        let names = *sections.get(self.number(symbols + 40, 4)?)?;
        let names = self.bytes(self.number(names + 24, 8)?, self.number(names + 32, 8)?)?;
        let mut found = Vec::new();
        for symbol in self.bytes(at, len)?.chunks_exact(24).map(Elf) {
            if symbol.number(4, 1)? & 0xf == FUNCTION {
                let name = names.get(symbol.number(0, 4)?..)?;
                let end = name.iter().position(|byte| *byte == 0)?;
                let (start, len) = (symbol.number(8, 8)?, symbol.number(16, 8)?);
                found.push((&name[..end], start..start.checked_add(len)?));
            }
        }
        Some(found)
    }
}

/// The vDSO `kernel`, which is at `place`, with jumps at the start of its functions, and the code
/// behind it. `None` if a function has no room for that, or the clock is not among them.
fn patched(kernel: &[u8], place: u64) -> Option<Vec<u8>> {
    let functions = Elf(kernel).functions()?;
    let mut made = kernel.to_vec();
    made.resize(kernel.len().next_multiple_of(PAGE), 0);
    let own = stub::VDSO + made.len() as u64;
    let mut own_code = code_of_copy().to_vec();
    let mut clock = None;
    for (name, range) in &functions {
        let name = name.strip_prefix(code::NAME_PREFIX).unwrap_or(name);
        if code::KEPT_FUNCTIONS.contains(&name) {
            continue;
        }
        // Functions begin at multiples of 16, so those that end before that have room behind them.
        let room = range.start.is_multiple_of(16) || range.len() >= JUMP_LEN;
        if !room
            || !functions
                .iter()
                .all(|(_, other)| other.start == range.start || !overlap(range, other))
        {
            return None;
        }
        let to = match name {
            b"clock_gettime" => {
                clock = Some(place + range.start as u64);
                own
            }
            b"getcpu" => own + cpu_offset() as u64,
            _ => place + range.start as u64,
        };
        let jump = made.get_mut(range.start..range.start + JUMP_LEN)?;
        jump[..JUMP_LEN - 8].copy_from_slice(&code::JUMP);
        jump[JUMP_LEN - 8..].copy_from_slice(&to.to_le_bytes());
    }
    let kernel = kernel_offset();
    own_code[kernel..kernel + 8].copy_from_slice(&clock?.to_le_bytes());
    made.extend(own_code);
    (made.len() as u64 <= stub::VDSO_LEN).then_some(made)
}

/// Whether a jump in `one` would be in `other`.
fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    (one.start..one.start + JUMP_LEN).contains(&other.start)
}

// Labels in the code of the processor, in `arch`.
unsafe extern "C" {
    static afresh_linux_vdso: u8;
    static afresh_linux_vdso_cpu: u8;
    static afresh_linux_vdso_kernel: u8;
    static afresh_linux_vdso_end: u8;
}

fn offset_of(label: *const u8) -> usize {
    label.addr() - (&raw const afresh_linux_vdso).addr()
}

/// The code behind the copy.
fn code_of_copy() -> &'static [u8] {
    let length = offset_of(&raw const afresh_linux_vdso_end);
    // SAFETY: both labels are in the same section of the assembly in `arch`, the second after the
    // first, so the bytes between them are initialised and belong to the program's read-only data.
    unsafe { std::slice::from_raw_parts(&raw const afresh_linux_vdso, length) }
}

/// Where the code for `getcpu` is.
fn cpu_offset() -> usize {
    offset_of(&raw const afresh_linux_vdso_cpu)
}

/// Where the address of the original `clock_gettime` is.
fn kernel_offset() -> usize {
    offset_of(&raw const afresh_linux_vdso_kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_seconds_and_nanoseconds() {
        let offsets = ClockOffsets { monotonic: -1, boot: 3 * NANOS + 5 };
        assert_eq!(offsets.encode()[1..], [u64::MAX, 999_999_999, 3, 5]);
    }

    #[test]
    fn the_vdso_of_this_kernel_is_copied_with_jumps_to_it() {
        let list = std::fs::read_to_string("/proc/self/maps").unwrap();
        let Some((kernel, _)) = of_kernel(&list) else {
            return println!("SKIPPED: this kernel gives programs no vDSO");
        };
        let made = patched(&kernel, 0x1000).unwrap();
        let functions = Elf(&kernel).functions().unwrap();
        assert!(functions.iter().any(|(name, _)| name.ends_with(b"clock_gettime")));
        for (name, range) in functions {
            if code::KEPT_FUNCTIONS.iter().any(|kept| name.ends_with(kept)) {
                assert_eq!(made[range.clone()], kernel[range]);
                continue;
            }
            let jump = &made[range.start..range.start + JUMP_LEN];
            let to = u64::from_le_bytes(*jump.last_chunk().unwrap());
            let own = name.ends_with(b"clock_gettime") || name.ends_with(b"getcpu");
            assert_eq!(to == 0x1000 + range.start as u64, !own, "{}", name.escape_ascii());
        }
        for cut in [0, 5, 63, 64, 700, kernel.len() / 2] {
            assert_eq!(patched(&kernel[..cut], 0), None, "{cut}");
        }
    }
}
