//! Groundhog's way to give each request the same state, for comparisons: a manager outside of an
//! unchanged process stops it, finds the pages that it has written, writes their old content back,
//! and sets its registers (Alzayat, Mace, Druschel and Garg, EuroSys 2023).
//!
//! Where the authors clear soft-dirty bits, this uses the kernel's asynchronous write protection,
//! which does not need `CONFIG_MEM_SOFT_DIRTY`: one walk over the page tables finds written pages,
//! a second one protects them again. Kernel state of the process (descriptors, files, signals) is
//! not restored, as in their work; the process has one thread.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

const PAGE: u64 = 4096;
/// Bytes of the instruction that calls.
const CALL_LEN: u64 = 2;
/// Maximum time until the process waits for input.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// More than any processor's state.
const STATE_LEN: usize = 16 << 10;
/// `NT_X86_XSTATE`.
const EXTENDED: usize = 0x202;
/// Vectors that one call may take (`IOV_MAX`).
const VECTORS: usize = 1024;

// `_IOWR(0xaa, …)` of userfaultfd, `_IOWR('f', 16, …)` of the page map.
const UFFD_API: libc::c_ulong = 0xc018_aa3f;
const UFFD_REGISTER: libc::c_ulong = 0xc020_aa00;
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// Write protection that the kernel lifts by itself, of all memory, populated or not.
const FEATURES: u64 = 1 | 1 << 13 | 1 << 15;
const REGISTER_WRITES: u64 = 2;
/// `PM_SCAN_WP_MATCHING`.
const PROTECT: u64 = 1;
/// `PAGE_IS_WRITTEN`.
const WRITTEN: u64 = 1 << 1;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    anyof: u64,
    returned: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// A mapping that the process may write, with its old content.
struct SavedMapping {
    range: Range<u64>,
    bytes: Vec<u8>,
}

/// A process of one thread, and the state that it goes back to.
pub(crate) struct Groundhog {
    pid: libc::pid_t,
    /// As long as it is open, writes are noticed.
    _noticing: OwnedFd,
    pages: File,
    held: Vec<SavedMapping>,
    /// Where the break was.
    heap: Option<u64>,
    /// Everything that was mapped.
    layout: Vec<Range<u64>>,
    registers: libc::user_regs_struct,
    extended: Vec<u8>,
}

fn failed(what: &'static str) -> anyhow::Error {
    anyhow::Error::new(io::Error::last_os_error()).context(what)
}

/// A request of `ptrace` whose last argument is a number or a pointer.
fn trace(request: libc::c_uint, pid: libc::pid_t, at: usize, data: usize) -> anyhow::Result<()> {
    // SAFETY: a pointer argument points to a live structure of the kind that the request takes.
    let rc = unsafe { libc::ptrace(request, pid, at, data) };
    if rc == -1 { Err(failed("ptrace")) } else { Ok(()) }
}

/// Waits until the process has stopped.
fn stopped(pid: libc::pid_t) -> anyhow::Result<()> {
    let mut status = 0;
    // SAFETY: the status is a live number.
    let rc = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(rc == pid && libc::WIFSTOPPED(status), "the process did not stop ({status:#x})");
    Ok(())
}

fn stop(pid: libc::pid_t) -> anyhow::Result<()> {
    trace(libc::PTRACE_INTERRUPT, pid, 0, 0)?;
    stopped(pid)
}

fn registers(pid: libc::pid_t) -> anyhow::Result<libc::user_regs_struct> {
    // SAFETY: it is plain data, for which zeros are a value.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, pid, 0, (&raw mut registers).expose_provenance())?;
    Ok(registers)
}

fn set_registers(pid: libc::pid_t, registers: &libc::user_regs_struct) -> anyhow::Result<()> {
    trace(libc::PTRACE_SETREGS, pid, 0, std::ptr::from_ref(registers).expose_provenance())
}

/// Has the stopped process make a call of `number`; `at` is an instruction that calls.
fn inject(
    pid: libc::pid_t,
    at: &libc::user_regs_struct,
    number: libc::c_long,
    args: [u64; 2],
) -> anyhow::Result<u64> {
    let mut call = *at;
    call.rip -= CALL_LEN;
    (call.rax, call.rdi, call.rsi) = (number as u64, args[0], args[1]);
    // So that the kernel does not restart it as an interrupted call.
    call.orig_rax = u64::MAX;
    set_registers(pid, &call)?;
    trace(libc::PTRACE_SINGLESTEP, pid, 0, 0)?;
    stopped(pid)?;
    let result = registers(pid)?.rax;
    let error = (result as i64).wrapping_neg();
    if (1..4096).contains(&error) {
        let error = io::Error::from_raw_os_error(error as i32);
        return Err(anyhow::Error::new(error).context("a call in the process"));
    }
    Ok(result)
}

/// Moves bytes between this process and another.
fn transfer(
    pid: libc::pid_t,
    here: &[libc::iovec],
    there: &[libc::iovec],
    writes: bool,
) -> anyhow::Result<()> {
    let wanted: usize = here.iter().map(|part| part.iov_len).sum();
    let (h, t) = (here.as_ptr(), there.as_ptr());
    let (hn, tn) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
    // SAFETY: the vectors of this process are live buffers of the callers, borrowed for reading or
    // writing; the kernel checks the others.
    let moved = unsafe {
        match writes {
            true => libc::process_vm_writev(pid, h, hn, t, tn, 0),
            false => libc::process_vm_readv(pid, h, hn, t, tn, 0),
        }
    };
    match usize::try_from(moved) {
        Err(_) => Err(failed("moving bytes between processes")),
        Ok(moved) if moved < wanted => bail!("moved {moved} of {wanted} bytes"),
        Ok(_) => Ok(()),
    }
}

fn vector(address: usize, len: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: len }
}

fn read(pid: libc::pid_t, range: &Range<u64>) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0u8; (range.end - range.start) as usize];
    let here = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    transfer(pid, &[here], &[vector(range.start as usize, bytes.len())], false)?;
    Ok(bytes)
}

/// A mapping: where, whether it can be written, and whether it ends at the break.
struct Line {
    range: Range<u64>,
    written: bool,
    heap: bool,
}

fn maps(pid: libc::pid_t) -> anyhow::Result<Vec<Line>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let line = |line: &str| {
        let mut fields = line.split(' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let modes = fields.next()?;
        let (range, heap) = (number(start)?..number(end)?, line.ends_with("[heap]"));
        Some(Line { range, written: modes.starts_with("rw"), heap })
    };
    Ok(text.lines().filter_map(line).filter(|line| line.range.start < 1 << 47).collect())
}

impl Groundhog {
    /// Takes the state of process `pid`, once it waits for input, as the one to go back to.
    ///
    /// # Errors
    /// When the process may not be traced, or the kernel has no asynchronous write protection
    /// (Linux 6.7).
    pub(crate) fn new(pid: u32) -> anyhow::Result<Self> {
        let pid = libc::pid_t::try_from(pid)?;
        trace(libc::PTRACE_SEIZE, pid, 0, 0)?;
        let deadline = Instant::now() + START_TIMEOUT;
        let registers = loop {
            stop(pid)?;
            let registers = registers(pid)?;
            if registers.orig_rax == libc::SYS_read as u64 {
                break registers;
            }
            ensure!(Instant::now() < deadline, "the process does not wait for input");
            trace(libc::PTRACE_CONT, pid, 0, 0)?;
            std::thread::sleep(Duration::from_millis(1));
        };
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"))?.count();
        ensure!(threads == 1, "the process has {threads} threads");
        let noticing = notice(pid, &registers)?;
        let lines = maps(pid)?;
        let mut held = Vec::new();
        for line in lines.iter().filter(|line| line.written) {
            register(&noticing, &line.range)?;
            held.push(SavedMapping { range: line.range.clone(), bytes: read(pid, &line.range)? });
        }
        let mut extended = vec![0u8; STATE_LEN];
        let mut state = libc::iovec { iov_base: extended.as_mut_ptr().cast(), iov_len: STATE_LEN };
        trace(libc::PTRACE_GETREGSET, pid, EXTENDED, (&raw mut state).expose_provenance())?;
        extended.truncate(state.iov_len);
        let this = Self {
            pid,
            _noticing: noticing,
            pages: File::open(format!("/proc/{pid}/pagemap"))?,
            held,
            heap: lines.iter().find(|line| line.heap).map(|line| line.range.end),
            layout: lines.into_iter().map(|line| line.range).collect(),
            registers,
            extended,
        };
        this.protect()?;
        this.go_on()?;
        Ok(this)
    }

    /// Resets the process, and lets it wait for input again.
    ///
    /// # Errors
    /// When the process has ended, or has unmapped part of its memory.
    pub(crate) fn restore(&mut self) -> anyhow::Result<()> {
        stop(self.pid)?;
        self.bring_back()?;
        self.go_on()
    }

    /// Resets the process and compares its writable memory with the original.
    ///
    /// # Errors
    /// The first mapping that differs.
    pub(crate) fn verify(&mut self) -> anyhow::Result<()> {
        stop(self.pid)?;
        self.bring_back()?;
        for held in &self.held {
            let same = read(self.pid, &held.range)? == held.bytes;
            ensure!(same, "groundhog: memory from {:#x} on differs", held.range.start);
        }
        self.go_on()
    }

    fn bring_back(&mut self) -> anyhow::Result<()> {
        self.lay_out()?;
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for held in &self.held {
            for part in self.scan(&held.range, 0)? {
                let len = (part.end - part.start) as usize;
                let from = (part.start - held.range.start) as usize;
                let bytes = &held.bytes[from..from + len];
                here.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: len });
                there.push(vector(part.start as usize, len));
            }
        }
        for (here, there) in here.chunks(VECTORS).zip(there.chunks(VECTORS)) {
            transfer(self.pid, here, there, true)?;
        }
        if !here.is_empty() {
            self.protect()?;
        }
        let bytes = &mut self.extended;
        let mut state = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        trace(libc::PTRACE_SETREGSET, self.pid, EXTENDED, (&raw mut state).expose_provenance())?;
        set_registers(self.pid, &self.registers)
    }

    /// Unmaps everything mapped since.
    fn lay_out(&self) -> anyhow::Result<()> {
        let now = maps(self.pid)?;
        if now.iter().map(|line| &line.range).eq(&self.layout) {
            return Ok(());
        }
        for line in now {
            let mut at = line.range.start;
            let known = self.layout.iter().filter(|known| known.end > line.range.start);
            for known in known.take_while(|known| known.start < line.range.end) {
                self.unmap(at..known.start, line.heap)?;
                at = known.end;
            }
            self.unmap(at..line.range.end, line.heap)?;
        }
        let mapped = maps(self.pid)?;
        let there = |range: &Range<u64>| {
            mapped.iter().any(|line| line.range.start <= range.start && range.end <= line.range.end)
        };
        ensure!(self.layout.iter().all(there), "groundhog: the process has unmapped what it had");
        Ok(())
    }

    fn unmap(&self, range: Range<u64>, heap: bool) -> anyhow::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        match self.heap.filter(|_| heap) {
            Some(end) => inject(self.pid, &self.registers, libc::SYS_brk, [end, 0])?,
            None => {
                let args = [range.start, range.end - range.start];
                inject(self.pid, &self.registers, libc::SYS_munmap, args)?
            }
        };
        Ok(())
    }

    fn protect(&self) -> anyhow::Result<()> {
        self.held.iter().try_for_each(|held| self.scan(&held.range, PROTECT).map(drop))
    }

    /// The parts of `range` that were written since they were protected.
    fn scan(&self, range: &Range<u64>, flags: u64) -> anyhow::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut regions = [Region::default(); 256];
        let mut from = range.start;
        while from < range.end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags,
                start: from,
                end: range.end,
                regions: regions.as_mut_ptr().expose_provenance() as u64,
                regions_len: regions.len() as u64,
                mask: WRITTEN,
                returned: WRITTEN,
                ..Scan::default()
            };
            // SAFETY: the argument and the regions in it live through the call, with correct sizes.
            let n = unsafe { libc::ioctl(self.pages.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
            let n = usize::try_from(n).map_err(|_| failed("PAGEMAP_SCAN"))?;
            found.extend(regions[..n].iter().map(|region| region.start..region.end));
            if n < regions.len() {
                break;
            }
            from = regions[n - 1].end;
        }
        Ok(found)
    }

    fn go_on(&self) -> anyhow::Result<()> {
        trace(libc::PTRACE_CONT, self.pid, 0, 0)
    }
}

/// Has the stopped process open a userfaultfd on itself, and fetches it.
fn notice(pid: libc::pid_t, at: &libc::user_regs_struct) -> anyhow::Result<OwnedFd> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | 1;
    let number = inject(pid, at, libc::SYS_userfaultfd, [flags, 0])?;
    set_registers(pid, at)?;
    // SAFETY: the calls take numbers only; they return a new descriptor.
    let fetched = unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        ensure!(process >= 0, failed("pidfd_open"));
        let process = OwnedFd::from_raw_fd(process as i32);
        let fetched = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0);
        ensure!(fetched >= 0, failed("pidfd_getfd"));
        OwnedFd::from_raw_fd(fetched as i32)
    };
    let mut api = [0xaa, FEATURES, 0u64];
    // SAFETY: the request takes three words, which live through the call.
    let rc = unsafe { libc::ioctl(fetched.as_raw_fd(), UFFD_API, api.as_mut_ptr()) };
    if rc < 0 { Err(failed("asynchronous write protection")) } else { Ok(fetched) }
}

fn register(noticing: &OwnedFd, range: &Range<u64>) -> anyhow::Result<()> {
    debug_assert!(range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE));
    let mut words = [range.start, range.end - range.start, REGISTER_WRITES, 0u64];
    // SAFETY: the request takes four words, which live through the call.
    let rc = unsafe { libc::ioctl(noticing.as_raw_fd(), UFFD_REGISTER, words.as_mut_ptr()) };
    if rc < 0 { Err(failed("watching a mapping")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_rolls_back_to_its_earlier_count() {
        let count = "n=0; while read line; do n=$((n+1)); echo $n; done";
        let mut shell = Command::new("sh")
            .args(["-c", count])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut to = shell.stdin.take().unwrap();
        let mut from = BufReader::new(shell.stdout.take().unwrap());
        let mut ask = || {
            to.write_all(b"next\n").unwrap();
            let mut line = String::new();
            from.read_line(&mut line).unwrap();
            line
        };
        assert_eq!(ask(), "1\n");
        match Groundhog::new(shell.id()) {
            Ok(mut groundhog) => {
                assert_eq!([ask(), ask()], ["2\n", "3\n"]);
                for _ in 0..20 {
                    groundhog.restore().unwrap();
                    assert_eq!([ask(), ask()], ["2\n", "3\n"]);
                }
                groundhog.verify().unwrap();
                assert_eq!(ask(), "2\n");
            }
            Err(error) => println!("SKIPPED: {error:#}"),
        }
        shell.kill().unwrap();
        shell.wait().unwrap();
    }
}
