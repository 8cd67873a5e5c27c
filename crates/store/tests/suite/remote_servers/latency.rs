//! The first answer from far away.

use std::time::Duration;

use afresh_store::{Encoding, MemoryPages, OpenError};
use afresh_sys::PageRange;

use super::proxy::{Fault, Proxy};
use super::servers::{KINDS, Server, retry};
use crate::support::{options, page_of, store};

/// A guest of 64 MiB: a quarter of its pages hold something, and runs touch a seventh of those,
/// here and there.
#[test]
fn a_warm_guest_of_64_mib_is_near_though_every_request_takes_5_ms() {
    const PAGES: usize = 16_384;
    for kind in KINDS {
        let Some(server) = Server::start(kind) else { continue };
        let proxy = Proxy::before(server.address);
        let dir = tempfile::tempdir().unwrap();
        let here = store(&dir.path().join("here"));
        let mut memory = vec![0; PAGES * 4096];
        for page in (0..PAGES).filter(|page| page / 64 % 4 == 0) {
            memory[page * 4096..][..4096].copy_from_slice(&page_of(page as u32));
        }
        let mut save = options();
        save.state = vec![7; 20_000];
        save.options.working_set =
            (0..PAGES / 256).map(|n| PageRange::new(n * 256 + n % 50, 9)).collect();
        here.save("a", &MemoryPages(memory.clone()), &save).unwrap();
        let direct = server.remote(server.address, retry());
        direct.push(&here, &here.load("a").unwrap(), "a", Encoding::Zstd, &mut |_| {}).unwrap();
        proxy.be(Fault::Latency(Duration::from_millis(5)), 0);
        let mut near = 0;
        for _ in 0..2 {
            let before = proxy.passed();
            let remote = server.remote(proxy.address, retry());
            remote.prepare();
            let snapshot = remote.load("a").unwrap();
            let mut seen = 0;
            snapshot
                .read_working_set::<OpenError>(|range, bytes| {
                    assert!(bytes == &memory[range.start * 4096..][..range.byte_len()]);
                    seen += range.len;
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen, PAGES / 256 * 9);
            let mut page = vec![0; 4096];
            snapshot.read(260, &mut page).unwrap();
            assert!(page == memory[260 * 4096..][..4096]);
            near = proxy.passed() - before;
        }
        let before = proxy.passed();
        let there = store(&dir.path().join("there"));
        let remote = server.remote(proxy.address, retry());
        remote.pull(&there, "a", "a", Encoding::Zstd, &mut |_| {}).unwrap();
        let whole = proxy.passed() - before;
        println!("{kind:?}: {near} bytes for the working set and a page, {whole} for all of it");
        assert!(0 < near && near < whole / 4, "{near} of {whole}");
    }
}
