//! Files, moved mappings, borrowed ranges and futexes against the real kernel.
#![cfg(not(miri))]

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, Protection, Reservation, file, futex};

fn temporary(bytes: &[u8]) -> std::fs::File {
    let name = format!("afresh-sys-{}-{}", std::process::id(), bytes.len());
    let path = std::env::temp_dir().join(name);
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn numbered(pages: usize) -> Vec<u8> {
    (0..pages).flat_map(|n| vec![n as u8 + 1; PAGE_SIZE]).collect()
}

fn peek(memory: &Reservation, page: usize) -> u8 {
    // SAFETY: the tests map these pages readable before they peek.
    unsafe { memory.page_ptr(page).read_volatile() }
}

fn poke(memory: &Reservation, page: usize, byte: u8) {
    // SAFETY: the tests map these pages writable before they poke.
    unsafe { memory.page_ptr(page).write_volatile(byte) }
}

#[test]
fn a_private_view_of_a_file_keeps_writes_to_itself() {
    let file = temporary(&numbered(5));
    let memory = Reservation::new(4).unwrap();
    let all = PageRange::new(0, 4);
    memory.map_file(all, Protection::ReadWrite, file.as_fd(), 1).unwrap();
    poke(&memory, 0, 99);
    let mut again = [0; PAGE_SIZE];
    // SAFETY: the array is writable and ours.
    unsafe { file::read_into(file.as_fd(), again.as_mut_ptr(), PAGE_SIZE, PAGE_SIZE) }.unwrap();
    assert_eq!((peek(&memory, 0), again[0], peek(&memory, 3)), (99, 2, 5));
}

#[test]
fn reading_past_the_end_is_an_error_and_not_zeros() {
    let file = temporary(&numbered(2)[..5000]);
    let mut out = vec![0; 2 * PAGE_SIZE];
    // SAFETY: the vector is writable and ours.
    let error = unsafe { file::read_into(file.as_fd(), out.as_mut_ptr(), out.len(), 0) };
    assert!(error.is_err());
}

#[test]
fn a_file_that_is_being_written_to_disk_can_be_written_further() {
    let path = std::env::temp_dir().join(format!("afresh-sys-writing-{}", std::process::id()));
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&numbered(2)).unwrap();
    file::begin_writing(file.as_fd()).unwrap();
    file.write_all(&numbered(1)).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(bytes == [numbered(2), numbered(1)].concat());
    let (reader, _writer) = std::io::pipe().unwrap();
    assert!(file::begin_writing(reader.as_fd()).is_err());
}

#[test]
fn a_moved_mapping_takes_the_place_of_the_old_one_and_leaves_its_own_empty() {
    let file = temporary(&numbered(3));
    let memory = Reservation::new(3).unwrap();
    memory.map_file(PageRange::new(0, 3), Protection::ReadWrite, file.as_fd(), 0).unwrap();
    let staging = Reservation::new(2).unwrap();
    staging.map_anonymous(PageRange::new(0, 2), Protection::ReadWrite).unwrap();
    poke(&staging, 1, 77);
    memory.take_mapping(PageRange::new(1, 1), &staging, PageRange::new(1, 1)).unwrap();
    assert_eq!([0, 1, 2].map(|page| peek(&memory, page)), [1, 77, 3]);
    assert_eq!(peek(&staging, 1), 0);
    let wrong = memory.take_mapping(PageRange::new(2, 2), &staging, PageRange::new(0, 2));
    assert!(wrong.is_err());
}

#[test]
fn scattered_pieces_are_filled_in_order() {
    let file = temporary(&numbered(4));
    let memory = Reservation::new(9).unwrap();
    memory.map_anonymous(PageRange::new(0, 9), Protection::ReadWrite).unwrap();
    let piece = |page, pages| file::Piece { to: memory.page_ptr(page), len: pages * PAGE_SIZE };
    // SAFETY: the pieces are in memory mapped writable just now.
    let read =
        unsafe { file::read_scattered(file.as_fd(), &[piece(7, 1), piece(2, 2)], PAGE_SIZE) };
    assert_eq!(read.unwrap(), 3 * PAGE_SIZE);
    assert_eq!([7, 2, 3, 4].map(|page| peek(&memory, page)), [2, 3, 4, 0]);
}

#[test]
fn a_range_of_others_is_not_released() {
    let owner = Reservation::new(2).unwrap();
    owner.map_anonymous(PageRange::new(0, 2), Protection::ReadWrite).unwrap();
    // SAFETY: the owner outlives the borrower, and does not change the mappings in between.
    let borrowed = unsafe { Reservation::of_others(owner.base(), 2) };
    let file = Memfd::new(c"others").unwrap();
    file.write_at(&numbered(1), 0).unwrap();
    borrowed.map_private(PageRange::new(1, 1), Protection::ReadWrite, &file, 0).unwrap();
    drop(borrowed);
    assert_eq!(peek(&owner, 1), 1);
}

#[test]
fn a_waiter_is_woken_and_a_forgotten_one_comes_back_by_itself() {
    let word = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let start = Instant::now();
            while word.load(Ordering::Acquire) == 0 {
                futex::wait(&word, 0, Duration::from_secs(600));
            }
            start.elapsed()
        });
        std::thread::sleep(Duration::from_millis(30));
        word.store(1, Ordering::Release);
        futex::wake_all(&word);
        assert!(waiter.join().unwrap() < Duration::from_secs(300));
    });
    let start = Instant::now();
    futex::wait(&word, 1, Duration::from_millis(20));
    assert!(start.elapsed() < Duration::from_secs(60));
}
