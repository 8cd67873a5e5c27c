//! State that a call leaves in the processor, or unfinished in KVM, does not reach the next call.

use std::time::Duration;

use crate::common::{guest, kvm};
use afresh_sys::planted::{self, Bug};
use afresh_vm::{CallError, GuestError, ResetMethod, Sandbox, VerifyError};

/// Leftovers that the sample guest `taint` can make: each byte is explained there.
const ALL: &[u8] = b"iIbwjJlzZBWoODftTUrscSgG0xmyYakXvVqpPMRh31udnKE8C7";
/// The same, never ending.
const ENDLESS: u8 = b'L';

fn sandbox(method: ResetMethod) -> Option<Sandbox> {
    let builder = Sandbox::builder().memory(1 << 20).reset_method(method);
    // Long enough for every call that ends by itself, even on a busy host.
    match builder.timeout(Duration::from_secs(2)).build(&guest("taint")) {
        Ok(sandbox) => Some(sandbox),
        Err(error) => {
            assert!(method != ResetMethod::default(), "{error}");
            println!("SKIPPED: {method:?} is unavailable here: {error}");
            None
        }
    }
}

/// The field of XSAVE that records the components in use. The content of each is stored and
/// compared all the same; one that holds nothing may be noted either way, by whether a host
/// switched tasks just then.
const IN_USE: std::ops::Range<usize> = 256 + 512..256 + 520;

/// Compares the words that the guest finds at the start of a call, and names the first difference.
fn compare(found: &[u8], expected: &[u8], after: &str) {
    assert_eq!(found.len(), expected.len(), "after {after}");
    let place = (0..found.len()).find(|at| !IN_USE.contains(at) && found[*at] != expected[*at]);
    if let Some(at) = place {
        let word = at / 8 * 8;
        panic!(
            "after {after}: byte {at} differs: {:02x?} instead of {:02x?}",
            &found[word..word + 8],
            &expected[word..word + 8]
        );
    }
}

#[test]
fn nothing_that_a_call_leaves_in_the_processor_is_found_by_the_next() {
    if !kvm() {
        return;
    }
    let mut sandbox = sandbox(ResetMethod::default()).unwrap();
    let expected = sandbox.run(b" ").unwrap();
    assert_eq!(expected[184..192], 0x1234_5678_9abc_def0_u64.to_le_bytes(), "the sample works");
    for &what in ALL.iter().chain(&[ENDLESS]) {
        let name = char::from(what).to_string();
        for _ in 0..2 {
            let outcome = sandbox.run(&[what]);
            compare(&sandbox.run(b" ").unwrap(), &expected, &name);
            println!("{name}: {:?}", outcome.map(|output| output.len()));
        }
        let _ = sandbox.call(&[what]);
        sandbox.reset().unwrap();
        for _ in 0..2 {
            sandbox.verify().unwrap_or_else(|error| panic!("after {name}: {error}"));
        }
        compare(&sandbox.run(b" ").unwrap(), &expected, &name);
    }
}

#[test]
fn nor_by_any_call_after_any_two() {
    if !kvm() {
        return;
    }
    let mut sandbox = sandbox(ResetMethod::default()).unwrap();
    let expected = sandbox.run(b" ").unwrap();
    for &first in ALL {
        for &second in ALL {
            let _ = sandbox.run(&[first]);
            let _ = sandbox.run(&[second]);
            let name = format!("{} and {}", char::from(first), char::from(second));
            compare(&sandbox.run(b" ").unwrap(), &expected, &name);
        }
    }
    sandbox.verify().unwrap();
}

#[test]
fn a_port_read_into_memory_is_reset_under_every_method() {
    if !kvm() {
        return;
    }
    for method in ResetMethod::ALL {
        let Some(mut sandbox) = sandbox(method) else { continue };
        let expected = sandbox.run(b" ").unwrap();
        for what in *b"jJlzZoO" {
            let name = format!("{} under {method:?}", char::from(what));
            for _ in 0..3 {
                let error = sandbox.call(&[what]).err();
                assert!(matches!(error, None | Some(CallError::Guest(_))), "{name}: {error:?}");
                sandbox.reset().unwrap();
                sandbox.verify().unwrap_or_else(|error| panic!("{name}: {error}"));
                compare(&sandbox.run(b" ").unwrap(), &expected, &name);
            }
        }
    }
}

#[test]
fn a_snapshot_is_restored_over_an_unfinished_port_read() {
    if !kvm() {
        return;
    }
    let mut sandbox = sandbox(ResetMethod::default()).unwrap();
    let base = sandbox.pristine();
    let expected = sandbox.run(b" ").unwrap();
    for what in *b"ijJtU" {
        let error = sandbox.call(&[what]).unwrap_err();
        assert!(matches!(error, CallError::Guest(_)), "{error}");
        sandbox.restore(&base).unwrap();
        let name = char::from(what).to_string();
        compare(&sandbox.call(b" ").unwrap(), &expected, &name);
        sandbox.reset().unwrap();
        sandbox.verify().unwrap();
    }
}

#[test]
fn an_access_to_a_port_is_named() {
    if !kvm() {
        return;
    }
    let mut sandbox = sandbox(ResetMethod::default()).unwrap();
    for (what, word) in
        [(b'i', "read 4 bytes from port 0xa8"), (b'W', "wrote 1 bytes to port 0xa9")]
    {
        match sandbox.run(&[what]) {
            Err(CallError::Guest(GuestError::Unexpected(text))) => {
                assert!(text.contains(word), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_sandbox_that_does_not_pass_its_verification_wants_a_reset() {
    if !kvm() {
        return;
    }
    let mut sandbox = sandbox(ResetMethod::default()).unwrap();
    let heap = sandbox.heap().start;
    sandbox.write_memory(heap, b"not in the image").unwrap();
    assert!(matches!(sandbox.verify(), Err(VerifyError::Differs(_))));
    assert!(matches!(sandbox.call(b" "), Err(CallError::NeedsReset)));
    assert!(matches!(sandbox.verify(), Err(VerifyError::Call(CallError::NeedsReset))));
    sandbox.reset().unwrap();
    for _ in 0..3 {
        sandbox.verify().unwrap();
    }
    sandbox.run(b" ").unwrap();
}

#[test]
fn planted_bugs_are_caught() {
    if !kvm() {
        return;
    }
    planted::must_be_caught(
        &[Bug::Register, Bug::Exit],
        &["leftovers::nothing_that_a_call_leaves_in_the_processor_is_found_by_the_next"],
    );
}
