//! A kernel with other pages than 4 KiB is refused by name. Most kernels have such pages, and the
//! test then shows that they are not refused; `cargo xtask aarch64 --pages 16k` boots one with
//! larger pages.
#![cfg(not(miri))]

use afresh_sys::{Call, Feature, Features, Memfd, PAGE_SIZE, Reservation};

#[test]
fn a_kernel_with_larger_pages_is_refused_with_the_size_and_the_way_out() {
    // SAFETY: reads a value that the kernel passed to the program.
    let bytes = (unsafe { libc::getauxval(libc::AT_PAGESZ) }) as usize;
    if bytes == PAGE_SIZE {
        assert!(Reservation::new(1).is_ok() && Memfd::new(c"test").is_ok());
        return;
    }
    let errors = [Reservation::new(1).unwrap_err(), Memfd::new(c"test").unwrap_err()];
    for error in errors {
        assert_eq!(error.call, Call::PageSize);
        let text = error.to_string();
        assert!(text.contains(&bytes.to_string()) && text.contains("boot a kernel"), "{text}");
    }
    // Without files in memory nothing works, and the report of features has the reason.
    let why = Features::host().why_missing(Feature::Memfd).unwrap();
    assert!(why.contains(&bytes.to_string()), "{why}");
}
