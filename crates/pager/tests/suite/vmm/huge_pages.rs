//! A VMM with shared memory in huge pages of hugetlbfs, which discards parts of them.

use std::os::fd::AsFd;

use afresh_pager::{PageSource, SourceError};
use afresh_sys::{HUGE_PAGES, HUGE_SIZE, Interest, PAGE_SIZE, Uffd};

use super::client::{send, with_server};

/// Huge pages of the VMM.
const HUGE: usize = 3;

/// Every byte is 7.
struct SevenSource;

impl PageSource for SevenSource {
    fn pages(&self) -> usize {
        HUGE * HUGE_PAGES
    }

    unsafe fn read(&self, _: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { to.write_bytes(7, pages * PAGE_SIZE) };
        Ok(())
    }
}

/// A shared mapping of huge pages; `None` where the host has reserved none.
fn map_huge_pages() -> Option<*mut u8> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    // SAFETY: a new mapping.
    let mapped =
        unsafe { libc::mmap(std::ptr::null_mut(), HUGE * HUGE_SIZE, rights, flags, -1, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped.cast())
}

#[test]
fn a_discarded_part_of_a_huge_page_reads_as_zero_and_the_rest_as_before() {
    let Some(memory) = map_huge_pages() else {
        return println!("SKIPPED: the host has reserved no huge pages");
    };
    let Ok(uffd) = Uffd::open_for_pager() else {
        return println!("SKIPPED: no userfaultfd");
    };
    uffd.register(memory, HUGE * HUGE_SIZE, Interest::MISSING).unwrap();
    // SAFETY: a page of the mapping.
    let peek = |page: usize| unsafe { memory.add(page * PAGE_SIZE).read_volatile() };
    let discard = |first: usize, pages: usize| {
        let len = pages * PAGE_SIZE;
        // SAFETY: pages of the mapping.
        let done =
            unsafe { libc::madvise(memory.add(first * PAGE_SIZE).cast(), len, libc::MADV_REMOVE) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    let ((), served) = with_server(
        &SevenSource,
        |options| options.stream = false,
        |socket| {
            let message = format!(
                r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":{HUGE_SIZE}}}]"#,
                memory as usize,
                HUGE * HUGE_SIZE,
            );
            send(socket, message.as_bytes(), &[uffd.as_fd()]);
            assert_eq!(peek(0), 7);
            // A part of the first, which is in place, and of the second, which is missing.
            discard(HUGE_PAGES - 2, 5);
            // The touch of a discarded page, and of another one.
            for page in [HUGE_PAGES, HUGE_PAGES + 9] {
                assert_eq!(peek(page), if page == HUGE_PAGES { 0 } else { 7 }, "page {page}");
            }
            discard(2 * HUGE_PAGES + 3, 1);
            assert_eq!(peek(2 * HUGE_PAGES + 9), 7);
            for page in 0..HUGE * HUGE_PAGES {
                let zero =
                    (HUGE_PAGES - 2..HUGE_PAGES + 3).contains(&page) || page == 2 * HUGE_PAGES + 3;
                assert_eq!(peek(page), if zero { 0 } else { 7 }, "page {page}");
            }
        },
    );
    assert_eq!(served.unwrap().pages, HUGE * HUGE_PAGES);
    // SAFETY: the mapping is not used any more.
    unsafe { libc::munmap(memory.cast(), HUGE * HUGE_SIZE) };
}
