//! A VMM that follows the published handshake.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_pager::PageSource;
use afresh_pager::vmm::{ServeCounts, VmmError, VmmOptions, serve};
use afresh_sys::{Advice, Interest, PAGE_SIZE, PageRange, Protection, Reservation, SysError, Uffd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Pages of the source.
pub(crate) const PAGES: usize = 300;

/// The bytes of pages that a VMM has written to before its handshake.
pub(crate) const EARLY_BYTE: u8 = 0xee;

/// A VMM's memory: two mappings of the source with a hole between them.
pub(crate) struct Vmm {
    pub(crate) memory: Reservation,
    pub(crate) uffd: Uffd,
    /// The thread of its guest, if it runs.
    pub(crate) writer: Option<std::sync::Arc<super::process::Writer>>,
}

pub(crate) const FIRST: PageRange = PageRange::new(0, 100);
pub(crate) const SECOND: PageRange = PageRange::new(150, 200);

pub(crate) fn vmm() -> Option<Vmm> {
    vmm_with(Uffd::open_for_pager())
}

pub(crate) fn vmm_with(uffd: Result<Uffd, SysError>) -> Option<Vmm> {
    vmm_having(uffd, &[])
}

/// A VMM that has filled some pages of its memory with `EARLY_BYTE` before it registered them.
pub(crate) fn vmm_having(uffd: Result<Uffd, SysError>, early: &[usize]) -> Option<Vmm> {
    let uffd = match uffd {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIPPED: {error}");
            return None;
        }
    };
    let memory = Reservation::new(SECOND.end()).unwrap();
    for range in [FIRST, SECOND] {
        memory.map_anonymous(range, Protection::ReadWrite).unwrap();
        memory.advise(range, Advice::NoHugePage).unwrap();
        for page in early.iter().filter(|page| (range.start..range.end()).contains(*page)) {
            // SAFETY: the page is mapped, and no other thread has it yet.
            unsafe { memory.page_ptr(*page).write_bytes(EARLY_BYTE, PAGE_SIZE) };
        }
        let start = memory.page_ptr(range.start);
        uffd.register(start, range.byte_len(), Interest::MISSING).unwrap();
    }
    Some(Vmm { memory, uffd, writer: None })
}

impl Vmm {
    pub(crate) fn message(&self) -> String {
        let address = |range: PageRange| self.memory.page_ptr(range.start) as usize;
        format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096,"page_size_kib":4096}},
               {{"base_host_virt_addr":{},"size":{},"offset":{},"page_size":4096}}]"#,
            address(FIRST),
            FIRST.byte_len(),
            address(SECOND),
            SECOND.byte_len(),
            FIRST.byte_len(),
        )
    }

    /// Leaves no page missing, so that the service can end without closing any.
    pub(crate) fn touch_all(&self) {
        for page in [FIRST, SECOND].into_iter().flat_map(|range| range.start..range.end()) {
            self.peek(page);
        }
    }

    pub(crate) fn peek(&self, page: usize) -> u8 {
        // SAFETY: the tests touch only the two mappings.
        unsafe { self.memory.page_ptr(page).add(77).read_volatile() }
    }
}

pub(crate) fn send(stream: &UnixStream, text: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(text)], &mut control, SendFlags::empty()).unwrap();
}

/// Serves in a thread while `guest` runs.
pub(crate) fn with_server<R>(
    source: &dyn PageSource,
    change: impl Fn(&mut VmmOptions<'_>) + Send,
    guest: impl FnOnce(&UnixStream) -> R,
) -> (R, Result<ServeCounts, VmmError>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let server = scope.spawn(move || {
            let mut options = VmmOptions::new(stop);
            options.handshake = Duration::from_secs(120);
            options.end_on_failure = false;
            change(&mut options);
            let served = serve(&theirs, source, &options);
            // A client may wait for the end of its service.
            drop(theirs);
            served
        });
        let result = guest(&ours);
        stop.store(true, Ordering::Release);
        (result, server.join().unwrap())
    })
}
