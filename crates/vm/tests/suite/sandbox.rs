//! A guest runs, is contained, and is pristine again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{c_guest, guest, kvm, words};
use afresh_frames::ZeroPool;
use afresh_vm::{CallError, CrashReason, GuestError, ResetMethod, Sandbox};

#[test]
fn a_guest_returns_what_it_computes() {
    if !kvm() {
        return;
    }
    let mut sandbox = Sandbox::builder().build(&guest("hash")).unwrap();
    let digest = sandbox.run(b"abc").unwrap();
    assert_eq!(digest[..4], [0xba, 0x78, 0x16, 0xbf]);
    sandbox.verify().unwrap();
}

#[test]
fn every_sample_works() {
    if !kvm() {
        return;
    }
    let mut json = Sandbox::builder().build(&guest("json")).unwrap();
    let output = json.run(br#"[{"a": 1, "b": "x"}, {"a": 2.5}]"#).unwrap();
    assert_eq!(output, br#"{"rows":2,"sums":{"a":3.5}}"#);
    json.verify().unwrap();

    let mut zlib = Sandbox::builder().build(&guest("zlib")).unwrap();
    let output = zlib.run(&[b'x'; 5000]).unwrap();
    assert!(output.len() < 100 && output[0] == 0x78);
    zlib.verify().unwrap();

    let mut spin = Sandbox::builder().build(&guest("spin")).unwrap();
    assert_eq!(spin.run(b"").unwrap(), b"did not spin");
}

#[test]
fn memory_from_a_zero_pool_is_reset_like_any_other_whether_it_is_used_or_not() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    for method in ResetMethod::ALL {
        for pages in [3, 2000] {
            let zero_pool = Arc::new(ZeroPool::new(4096).unwrap());
            while zero_pool.ready() < zero_pool.capacity() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let builder = Sandbox::builder().memory(16 << 20).reset_method(method);
            let mut sandbox = builder.zero_memory(zero_pool.clone(), 16 << 20).build(&elf).unwrap();
            for round in 0..6 {
                if round == 3 {
                    sandbox = sandbox.pristine().fork().unwrap();
                }
                sandbox.call(&words(&[1, 0, pages, 1, 7 + round])).unwrap();
                sandbox.reset().unwrap();
                sandbox.verify().unwrap();
            }
        }
    }
}

#[test]
fn nothing_of_a_call_is_left_after_a_reset() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    for method in ResetMethod::ALL {
        let mut sandbox =
            Sandbox::builder().memory(4 << 20).reset_method(method).build(&elf).unwrap();
        for round in 0..40_u64 {
            let (first, count, stride) = (round * 3 % 50, 1 + round % 90, 1 + round % 7);
            sandbox.call(&words(&[1, first, count, stride, round + 1])).unwrap();
            let sum = sandbox.call(&words(&[2, first, count, stride])).unwrap();
            assert_eq!(sum, (count * (round + 1)).to_le_bytes(), "{method:?}");
            sandbox.reset().unwrap();
            sandbox.verify().unwrap_or_else(|error| panic!("{method:?}, round {round}: {error}"));
        }
    }
}

#[test]
fn registers_do_not_leak_from_call_to_call() {
    if !kvm() {
        return;
    }
    let mut sandbox = Sandbox::builder().build(&guest("dirty")).unwrap();
    for _ in 0..3 {
        sandbox.run(&words(&[6])).unwrap();
        sandbox.verify().unwrap();
    }
}

#[test]
fn a_crash_is_explained_and_undone() {
    if !kvm() {
        return;
    }
    let elf = guest("crash");
    let mut sandbox = Sandbox::builder().build(&elf).unwrap();
    for (what, reason) in [
        (b'n', CrashReason::NullPointer),
        (b'u', CrashReason::InvalidOpcode),
        (b'd', CrashReason::Division),
        (b'p', CrashReason::Protection),
        (b'o', CrashReason::Protection),
        (b'r', CrashReason::ReadOnly),
        (b'x', CrashReason::Execute),
        (b's', CrashReason::StackOverflow),
        (b'w', CrashReason::Unmapped),
        (b'c', CrashReason::Interrupt),
        // Without a system call interface the result is an invalid opcode, or under a paravirtual
        // KVM a jump to the handler at address 0, which does not exist.
        (b'k', CrashReason::InvalidOpcode),
    ] {
        let what = char::from(what);
        match sandbox.call(&[what as u8]) {
            Err(CallError::Guest(GuestError::Crash(crash))) => {
                let null_handler = what == 'k' && crash.reason == CrashReason::NullPointer;
                assert!(crash.reason == reason || null_handler, "{what}: {crash}");
                assert!(crash.rip.is_some(), "{what}: {crash}");
                println!("{what}: {crash}");
            }
            other => panic!("{what}: {other:?}"),
        }
        assert!(matches!(sandbox.call(b" "), Err(CallError::NeedsReset)));
        sandbox.reset().unwrap();
        sandbox.verify().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(sandbox.run(b" ").unwrap(), 1_u64.to_le_bytes(), "{what}");
    }
}

#[test]
fn every_other_misdeed_has_its_own_error() {
    if !kvm() {
        return;
    }
    let mut sandbox = Sandbox::builder().build(&guest("crash")).unwrap();
    let mut error = |what: u8| match sandbox.run(&[what]) {
        Err(CallError::Guest(error)) => error,
        other => panic!("{}: {other:?}", char::from(what)),
    };
    assert!(matches!(error(b'm'), GuestError::Panic(text) if text.ends_with("as asked: 1")));
    assert_eq!(error(b'h'), GuestError::UnknownHypercall(12345));
    assert!(matches!(error(b'b'), GuestError::BadPointer { call: 2, .. }));
    assert_eq!(error(b'R'), GuestError::MisplacedHypercall(1));
    assert_eq!(error(b'f'), GuestError::Failed { status: 7, output: b"because".to_vec() });
    sandbox.verify().unwrap();
}

#[test]
fn a_runaway_guest_is_stopped_and_undone() {
    if !kvm() {
        return;
    }
    let timeout = Duration::from_millis(300);
    let mut sandbox = Sandbox::builder().timeout(timeout).build(&guest("spin")).unwrap();
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let error = sandbox.run(b"spin").unwrap_err();
        assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
        assert!(start.elapsed() >= timeout && start.elapsed() < Duration::from_secs(60));
        sandbox.verify().unwrap();
        assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
    }
}

/// Blocks, or unblocks, every signal on this thread.
fn block_signals(how: i32) {
    // SAFETY: changes the mask of this thread only, by an initialised set.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        assert_eq!(libc::pthread_sigmask(how, &all, std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_time_limit_holds_on_a_thread_that_blocks_signals() {
    if !kvm() {
        return;
    }
    let timeout = Duration::from_millis(300);
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut sandbox = Sandbox::builder().timeout(timeout).build(&guest("spin")).unwrap();
        let stops = |sandbox: &mut Sandbox| {
            let start = std::time::Instant::now();
            let error = sandbox.run(b"spin").unwrap_err();
            assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
            // A signal that is still pending would end it at once.
            assert!(start.elapsed() >= timeout);
            assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
        };
        // The mask is changed after the vCPU has run on this thread.
        stops(&mut sandbox);
        block_signals(libc::SIG_BLOCK);
        // Pending and blocked, it must not keep the guest from running.
        // SAFETY: directs a signal at this thread, which blocks it.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
        for _ in 0..3 {
            stops(&mut sandbox);
        }
        let mut other = Sandbox::builder().timeout(timeout).build(&guest("spin")).unwrap();
        stops(&mut other);
        done.send(()).unwrap();
    });
    let ended = ended.recv_timeout(Duration::from_secs(60));
    assert!(ended.is_ok(), "a call outlives its time limit where the thread blocks the signal");
}

/// The thread that runs it may block the signal, which would stay pending.
#[test]
fn a_host_function_that_panics_leaves_no_time_limit_to_later_calls_of_its_thread() {
    if !kvm() {
        return;
    }
    for blocks in [false, true] {
        let thread = std::thread::spawn(move || {
            if blocks {
                block_signals(libc::SIG_BLOCK);
            }
            let limit = Duration::from_millis(50);
            let panics = Sandbox::builder()
                .timeout(limit)
                .host_function("stamp", |_: u64| -> u64 { panic!("as planned") });
            let mut panics = panics.build(&guest("dirty")).unwrap();
            let builder = Sandbox::builder().timeout(Duration::from_secs(20));
            let mut other = builder.build(&guest("dirty")).unwrap();
            let expected = other.run(&words(&[0, 5])).unwrap();
            for _ in 0..2 {
                let call = std::panic::AssertUnwindSafe(|| panics.call(&words(&[8, 1])));
                assert!(std::panic::catch_unwind(call).is_err());
                // Past the limit of the call that panicked.
                std::thread::sleep(3 * limit);
                assert_eq!(other.run(&words(&[0, 5])).unwrap(), expected);
                panics.reset().unwrap();
            }
        });
        thread.join().unwrap();
    }
}

#[test]
fn a_stop_handle_ends_a_call() {
    if !kvm() {
        return;
    }
    let mut sandbox = Sandbox::builder().build(&guest("spin")).unwrap();
    let handle = sandbox.stop_handle();
    handle.stop();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        handle.stop();
    });
    let error = sandbox.run(b"spin").unwrap_err();
    assert!(matches!(error, CallError::Guest(GuestError::Stopped { .. })), "{error}");
    stopper.join().unwrap();
    sandbox.verify().unwrap();
    assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
}

#[test]
fn a_c_guest_speaks_the_same_interface() {
    if !kvm() {
        return;
    }
    let Some(elf) = c_guest("words") else { return };
    let log = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&log);
    let builder = Sandbox::builder()
        .host_function("seen", |words: u64| words * 10)
        .log(move |level, text| sink.lock().unwrap().push((level, text.to_owned())));
    let mut sandbox = builder.build(&elf).unwrap();
    for _ in 0..3 {
        assert_eq!(sandbox.run(b"every run  starts\nafresh ").unwrap(), b"44");
        sandbox.verify().unwrap();
    }
    sandbox.call(b"one").unwrap();
    let error = sandbox.run(b"two").unwrap_err().to_string();
    assert_eq!(error, "guest panicked: a call left something behind");
    assert_eq!(*log.lock().unwrap(), [(3, "words is ready".to_owned())]);
}

#[test]
fn every_size_from_the_smallest_to_the_largest_works() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    for memory in [256 << 10, 1 << 20, 3 << 20, 1 << 30, 4 << 30] {
        let builder = Sandbox::builder().memory(memory).stack(16 << 10).input(8 << 10);
        let mut sandbox = builder.build(&elf).unwrap();
        let last = sandbox.heap().len / 4096 - 17;
        for value in 1..4 {
            sandbox.call(&words(&[1, 0, 2, last, value])).unwrap();
            let sum = sandbox.call(&words(&[2, 0, 2, last])).unwrap();
            assert_eq!(sum, (2 * value).to_le_bytes(), "{memory}");
            sandbox.reset().unwrap();
            let sum = sandbox.run(&words(&[2, 0, 2, last])).unwrap();
            assert_eq!(sum, [0; 8], "{memory}");
        }
    }
    for memory in [0, 128 << 10, (1 << 20) + 1, (4 << 30) + 4096] {
        assert!(Sandbox::builder().memory(memory).build(&elf).is_err(), "{memory}");
    }
}

#[test]
fn a_host_function_that_panics_leaves_a_sandbox_that_wants_a_reset() {
    if !kvm() {
        return;
    }
    let builder =
        Sandbox::builder().host_function("stamp", |_: u64| -> u64 { panic!("as planned") });
    let mut sandbox = builder.build(&guest("dirty")).unwrap();
    let call = std::panic::AssertUnwindSafe(|| sandbox.call(&words(&[8, 1])));
    assert!(std::panic::catch_unwind(call).is_err());
    assert!(matches!(sandbox.call(&words(&[0])), Err(CallError::NeedsReset)));
    sandbox.reset().unwrap();
    sandbox.verify().unwrap();
    assert_eq!(sandbox.run(&words(&[0, 5])).unwrap(), words(&[5]));
}

#[test]
fn a_sandbox_may_move_to_another_thread() {
    if !kvm() {
        return;
    }
    let builder = Sandbox::builder().timeout(Duration::from_millis(300));
    let mut sandbox = builder.build(&guest("spin")).unwrap();
    assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
    let worker = std::thread::spawn(move || {
        assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
        let error = sandbox.run(b"spin").unwrap_err();
        assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
        sandbox.verify().unwrap();
    });
    worker.join().unwrap();
}
