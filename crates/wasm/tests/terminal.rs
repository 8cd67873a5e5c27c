//! WASI preview 1 reports a terminal only for the standard streams of this process.
//!
//! The streams belong to the process, so this test runs in a separate one.

#![cfg(target_os = "linux")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Output, Val, WarmUp, Wasi};

/// Returns the file type of a descriptor.
const GUEST: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_fdstat_get" (func $stat (param i32 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "kind") (param $fd i32) (result i32)
        (if (call $stat (local.get $fd) (i32.const 0)) (then unreachable))
        (i32.load8_u (i32.const 0))))"#;

/// File types of WASI.
const UNKNOWN: i32 = 0;
const CHARACTER_DEVICE: i32 = 2;

/// The two ends of a new terminal.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut host, mut guest) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: the call writes two numbers, and takes nothing from the null pointers.
    let opened =
        unsafe { libc::openpty(&raw mut host, &raw mut guest, none, none.cast(), none.cast()) };
    assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both are open, and nothing else has them.
    unsafe { (OwnedFd::from_raw_fd(host), OwnedFd::from_raw_fd(guest)) }
}

/// Runs `test` with `streams` as the standard streams of this process.
fn with_streams<T>(streams: [&OwnedFd; 3], test: impl FnOnce() -> T) -> T {
    let replace = |streams: [&OwnedFd; 3]| {
        for (number, stream) in (0..).zip(streams) {
            // SAFETY: both numbers are open, and nothing relies on the file behind a stream.
            assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), number) }, number);
        }
    };
    let before = [0, 1, 2].map(|number| {
        // SAFETY: the new descriptor is open and not owned elsewhere.
        unsafe { OwnedFd::from_raw_fd(libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3)) }
    });
    replace(streams);
    let result = test();
    replace(before.each_ref());
    result
}

/// The file types of the standard streams.
fn kinds(wasi: Wasi) -> Vec<i32> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { wasi, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wat::parse_str(GUEST).unwrap(), options).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    let (_host, terminal) = terminal();
    with_streams([&terminal; 3], || {
        let mut lease = warm.lease().unwrap();
        let mut kind = |fd| lease.call("kind", &[Val::I32(fd)]).map(|found| found[0].i32());
        (0..3).map(|fd| kind(fd).ok().flatten().unwrap_or(-1)).collect()
    })
}

#[test]
fn only_streams_of_this_process_are_its_terminal() {
    let inherited = Wasi { output: Output::Inherit, inherit_stdin: true, ..Wasi::default() };
    assert_eq!(kinds(inherited), [CHARACTER_DEVICE; 3]);
    for output in [Output::Discard, Output::Capture(1000)] {
        let own = Wasi { output, stdin: b"input".to_vec(), ..Wasi::default() };
        assert_eq!(kinds(own), [UNKNOWN; 3]);
    }
    let mixed = Wasi { output: Output::Inherit, ..Wasi::default() };
    assert_eq!(kinds(mixed), [UNKNOWN, CHARACTER_DEVICE, CHARACTER_DEVICE]);
}
