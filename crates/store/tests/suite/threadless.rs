//! Saves and checks in a process that can start no thread, as at `pids.max` or `RLIMIT_NPROC`.

use std::io;

use crate::support::{PAGE, options, page_of, store};
use afresh_store::{MemoryPages, Pages};
use afresh_sys::PageRange;

const TEST: &str = "threadless::a_process_that_can_start_no_thread_saves_and_checks";
const CHILD: &str = "AFRESH_TEST_THREADLESS";
/// A stack of this size is beyond the address space, so the kernel refuses its thread.
const STACK: usize = 1 << 60;

/// A memory of several layers, which has few different pages.
struct Repeated {
    pages: usize,
    different: Vec<Vec<u8>>,
}

impl Pages for Repeated {
    fn pages(&self) -> usize {
        self.pages
    }

    fn occupied(&self) -> Vec<PageRange> {
        vec![PageRange::new(0, self.pages)]
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        for (number, page) in out.chunks_exact_mut(PAGE).enumerate() {
            page.copy_from_slice(&self.different[(first + number) % self.different.len()]);
        }
        Ok(())
    }
}

#[test]
fn a_process_that_can_start_no_thread_saves_and_checks() {
    if std::env::var_os(CHILD).is_none() {
        let status = afresh_sys::test_command(TEST)
            .env(CHILD, "1")
            .env("RUST_MIN_STACK", STACK.to_string())
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    assert!(std::thread::Builder::new().spawn(|| {}).is_err(), "a thread was started");
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let different: Vec<_> = (0..5000).map(page_of).collect();
    let small = MemoryPages(different.concat());
    let large = Repeated { pages: 50_000, different };
    for (name, memory, layers) in [("small", &small as &dyn Pages, 1), ("large", &large, 3)] {
        store.save(name, memory, &options()).unwrap();
        let saved = store.load(name).unwrap();
        assert_eq!(saved.layers().len(), layers);
        saved.verify().unwrap();
    }
}
