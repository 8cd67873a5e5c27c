//! The meter counts what a closure allocates, and bounds it.

use afresh_budget::meter::{Meter, peak, within};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

#[test]
fn the_peak_counts_bytes_that_were_freed_again() {
    let (kept, most) = peak(|| {
        drop(std::hint::black_box(vec![1_u8; 1 << 20]));
        vec![1_u8; 1 << 10]
    });
    assert_eq!(kept.len(), 1 << 10);
    assert!((1 << 20..(1 << 20) + 4096).contains(&most), "{most}");
}

#[test]
fn a_fallible_allocation_beyond_the_limit_fails() {
    let (refused, most) = within(1 << 20, || {
        let mut bytes = Vec::<u8>::new();
        bytes.try_reserve_exact(2 << 20).is_err() && bytes.try_reserve_exact(1 << 19).is_ok()
    });
    assert!(refused && most >= 1 << 19, "{most}");
}
