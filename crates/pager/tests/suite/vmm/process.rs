//! A VMM in another process, which obeys the commands of a test.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::{Advice, PAGE_SIZE, PageRange, Uffd};

use super::client::{FIRST, PAGES, SECOND, Vmm, send, vmm_having};

const NAME: &str = "vmm::process::plays_the_vmm_when_it_is_started_as_one";
const SOCKET: &str = "AFRESH_TEST_VMM_SOCKET";
const HOW: &str = "AFRESH_TEST_VMM_HOW";
/// Addresses of the two mappings, for a program that the VMM executes.
const ADDRESSES: &str = "AFRESH_TEST_VMM_ADDRESSES";
/// Pages of the source that a VMM which is started so has before its handshake.
pub(crate) const EARLY_PAGES: [usize; 3] = [7, 8, 180];
/// The prefix of answers among the output of the test program.
const MARK: &str = "VMM: ";

/// A VMM that runs, killed when it is dropped.
pub(crate) struct VmmProcess {
    pub(crate) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl VmmProcess {
    /// Starts a VMM that has connected to `socket`; `None` where the host has no userfaultfd.
    pub(crate) fn start(socket: &Path) -> Option<Self> {
        Self::start_with(socket, "alone")
    }

    /// As [`VmmProcess::start`], with the memory in a child of the process that connects.
    pub(crate) fn start_behind(socket: &Path) -> Option<Self> {
        Self::start_with(socket, "behind")
    }

    /// As [`VmmProcess::start`], with [`EARLY_PAGES`] written to before they are registered.
    pub(crate) fn start_early(socket: &Path) -> Option<Self> {
        Self::start_with(socket, "early")
    }

    fn start_with(socket: &Path, how: &str) -> Option<Self> {
        let mut child = afresh_sys::test_command(NAME)
            .env(SOCKET, socket)
            .env(HOW, how)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut this = Self { child, input, output: BufReader::new(output) };
        let answer = this.answer();
        if answer.as_deref() == Some("no userfaultfd") {
            println!("SKIPPED: no userfaultfd");
            return None;
        }
        assert_eq!(answer.as_deref(), Some("connected"));
        Some(this)
    }

    /// The answer to the last command; `None` when the VMM ended instead.
    pub(crate) fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some((_, answer)) = line.split_once(MARK) {
                return Some(answer.trim_end().to_owned());
            }
        }
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn command(&mut self, command: &str) {
        self.input.write_all(format!("{command}\n").as_bytes()).unwrap();
    }

    /// The answer to a command; `None` when the VMM ended instead.
    pub(crate) fn ask(&mut self, command: &str) -> Option<String> {
        self.command(command);
        self.answer()
    }

    /// The byte of a page of the source.
    pub(crate) fn peek(&mut self, page: usize) -> u8 {
        self.ask(&format!("peek {page}")).unwrap().parse().unwrap()
    }

    /// All of its memory, in the order of the source.
    pub(crate) fn dump(&mut self, path: &Path) -> Vec<u8> {
        self.ask(&format!("dump {}", path.display())).unwrap();
        std::fs::read(path).unwrap()
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < Duration::from_secs(120), "the VMM does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        // It has ended already, or is waited for here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The page of the memory where a page of the source is.
fn place_of(page: usize) -> usize {
    if page < FIRST.len { page } else { page - FIRST.len + SECOND.start }
}

/// The byte that fills a page for the command `check`. It is never zero.
pub(crate) fn numbered(page: usize) -> u8 {
    (page % 250) as u8 + 1
}

fn obey(vmm: &mut Vmm, command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    match words[0] {
        "peek" => vmm.peek(place_of(number(1))).to_string(),
        "poke" => {
            // SAFETY: the page is inside one of the two mappings.
            unsafe { vmm.memory.page_ptr(place_of(number(1))).write_bytes(number(2) as u8, 99) };
            String::new()
        }
        "discard" => {
            let range = PageRange::new(place_of(number(1)), number(2));
            vmm.memory.advise(range, Advice::Discard).unwrap();
            String::new()
        }
        "unmap" => {
            let range = PageRange::new(place_of(number(1)), number(2));
            let start = vmm.memory.page_ptr(range.start);
            // SAFETY: the test does not touch these pages again.
            assert_eq!(unsafe { libc::munmap(start.cast(), range.byte_len()) }, 0);
            String::new()
        }
        "move" => {
            let start = vmm.memory.page_ptr(SECOND.start);
            let len = SECOND.byte_len();
            let elsewhere = afresh_sys::Reservation::new(SECOND.len).unwrap();
            // SAFETY: both ranges are reserved by this process, which touches neither meanwhile.
            let moved = unsafe {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                libc::mremap(start.cast(), len, len, flags, elsewhere.page_ptr(0))
            };
            assert_eq!(moved, elsewhere.page_ptr(0).cast());
            // SAFETY: a page of the moved mapping.
            let byte = unsafe { elsewhere.page_ptr(number(1)).add(77).read_volatile() };
            std::mem::forget(elsewhere);
            byte.to_string()
        }
        "run" => {
            vmm.writer = Some(Writer::start(vmm, number(1)));
            String::new()
        }
        "pause" => vmm.writer.as_ref().unwrap().pause(),
        "resume" => {
            vmm.writer.as_ref().unwrap().paused.store(false, Ordering::Release);
            String::new()
        }
        "dump" => {
            let pages = (0..PAGES).map(|page| vmm.memory.page_ptr(place_of(page)));
            let bytes: Vec<u8> = pages
                .flat_map(|page| {
                    // SAFETY: the page is inside one of the two mappings.
                    unsafe { std::slice::from_raw_parts(page, PAGE_SIZE) }.to_vec()
                })
                .collect();
            std::fs::write(words[1], bytes).unwrap();
            String::new()
        }
        // Executes a program that has secrets at the same addresses.
        "exec" => {
            let addresses = [FIRST, SECOND].map(|range| vmm.memory.page_ptr(range.start) as usize);
            let error = afresh_sys::test_command(NAME)
                .env(HOW, "executed")
                .env(ADDRESSES, format!("{} {}", addresses[0], addresses[1]))
                .exec();
            panic!("{error}");
        }
        "close" => {
            let fd = vmm.uffd.as_fd().as_raw_fd();
            // SAFETY: the descriptor is not used again; this process ends without dropping it.
            assert_eq!(unsafe { libc::close(fd) }, 0);
            String::new()
        }
        // Compares each page with its number, as `numbered` does.
        "check" => {
            let wrong = (0..PAGES).find(|page| vmm.peek(place_of(*page)) != numbered(*page));
            wrong.map_or("whole".to_owned(), |page| format!("page {page} is wrong"))
        }
        other => panic!("unknown command {other}"),
    }
}

/// A thread of the guest that writes its round into every page, again and again.
pub(crate) struct Writer {
    paused: AtomicBool,
    /// Whether it has noticed the pause.
    rests: AtomicBool,
    round: AtomicU64,
    page: AtomicUsize,
}

impl Writer {
    /// Writes to the first `pages` pages of the source.
    fn start(vmm: &Vmm, pages: usize) -> Arc<Self> {
        let this = Arc::new(Self {
            paused: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            round: AtomicU64::new(1),
            page: AtomicUsize::new(0),
        });
        let (writer, base) = (this.clone(), vmm.memory.page_ptr(0) as usize);
        std::thread::spawn(move || {
            for round in 1.. {
                writer.round.store(round, Ordering::Relaxed);
                for page in 0..pages {
                    writer.page.store(page, Ordering::Relaxed);
                    while writer.paused.load(Ordering::Acquire) {
                        writer.rests.store(true, Ordering::Release);
                        std::thread::yield_now();
                    }
                    writer.rests.store(false, Ordering::Release);
                    let at = (base + place_of(page) * PAGE_SIZE) as *mut u64;
                    // SAFETY: the page is inside one of the two mappings.
                    unsafe { at.write_volatile(round) };
                }
            }
        });
        this
    }

    /// Pauses the guest. Returns its round, and the first page that it has not written to in this
    /// round.
    fn pause(&self) -> String {
        self.rests.store(false, Ordering::Release);
        self.paused.store(true, Ordering::Release);
        while !self.rests.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        format!("{} {}", self.round.load(Ordering::Relaxed), self.page.load(Ordering::Relaxed))
    }
}

/// Maps memory with secrets where the VMM had its memory, until the process is killed.
fn hold_secrets() {
    let addresses = std::env::var(ADDRESSES).unwrap();
    let addresses = addresses.split(' ').map(|address| address.parse::<usize>().unwrap());
    for (address, range) in addresses.zip([FIRST, SECOND]) {
        let len = range.byte_len();
        // SAFETY: the kernel refuses addresses in use.
        let mapped = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(address as *mut libc::c_void, len, rights, flags, -1, 0)
        };
        assert_eq!(mapped as usize, address, "{}", std::io::Error::last_os_error());
        // SAFETY: the mapping is this function's own.
        unsafe { mapped.cast::<u8>().write_bytes(b'!', len) };
    }
    println!("\n{MARK}executed");
    std::thread::sleep(Duration::from_secs(600));
}

/// Runs in the process of the VMM. In others it does nothing.
#[test]
fn plays_the_vmm_when_it_is_started_as_one() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let how = std::env::var(HOW).unwrap_or_default();
    if how == "executed" {
        return hold_secrets();
    }
    let stream = UnixStream::connect(socket).unwrap();
    if how == "behind" {
        // SAFETY: this process only waits for the child.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child > 0 {
            // SAFETY: waits for the child just made, and ends.
            unsafe {
                libc::waitpid(child, std::ptr::null_mut(), 0);
                libc::_exit(0);
            }
        }
    }
    let early = EARLY_PAGES.map(place_of);
    let early = if how == "early" { &early[..] } else { &[] };
    let Some(mut vmm) = vmm_having(Uffd::open_for_pager_with_moves(), early) else {
        println!("{MARK}no userfaultfd");
        // SAFETY: ends this process, which may be a fork.
        unsafe { libc::_exit(0) };
    };
    send(&stream, vmm.message().as_bytes(), &[vmm.uffd.as_fd()]);
    println!("\n{MARK}connected");
    for line in std::io::stdin().lines() {
        println!("{MARK}{}", obey(&mut vmm, &line.unwrap()));
    }
    // SAFETY: as above.
    unsafe { libc::_exit(0) };
}
