//! Collections in a region.
#![cfg(not(miri))]

use std::alloc::Layout;

use afresh_arena::{ArenaOptions, Region};
use afresh_frames::{Pool, PoolOptions};
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec;

fn region(pages: usize) -> Region {
    let pool = Pool::new(PoolOptions::inline(pages.max(512))).unwrap();
    Region::new(pool, ArenaOptions::committed(pages)).unwrap()
}

#[test]
fn a_vector_grows_in_place_and_its_memory_comes_back_zero() {
    let mut region = region(512);
    for round in 0..3u64 {
        let mut vector = Vec::new_in(&region);
        for n in 0..100_000u64 {
            vector.push(n ^ round);
        }
        assert!(vector.iter().copied().eq((0..100_000).map(|n| n ^ round)));
        // In place: all capacities together would not have fitted.
        assert!(region.used() <= 2 * 100_000 * 8);
        let zeros = (&region).allocate_zeroed(Layout::array::<u64>(1000).unwrap()).unwrap();
        // SAFETY: the block is 8000 bytes of this test's own.
        assert!(unsafe { zeros.as_ref() }.iter().all(|byte| *byte == 0));
        drop(vector);
        region.reset().unwrap();
    }
}

#[test]
fn two_vectors_that_grow_in_turns_stay_apart() {
    let region = region(2048);
    let (mut even, mut odd) = (Vec::new_in(&region), Vec::new_in(&region));
    for n in 0..20_000u32 {
        even.push(2 * n);
        odd.push(2 * n + 1);
    }
    assert!(even.iter().copied().eq((0..20_000).map(|n| 2 * n)));
    assert!(odd.iter().copied().eq((0..20_000).map(|n| 2 * n + 1)));
}

#[test]
fn a_full_region_is_an_error_and_no_panic() {
    let region = region(1);
    let mut vector: Vec<u8, _> = Vec::new_in(&region);
    assert!(vector.try_reserve_exact(5000).is_err());
    assert!(vector.try_reserve_exact(4096).is_ok());
}
