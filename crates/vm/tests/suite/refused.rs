//! System calls that fail, KVM's among them: a sandbox is right afterwards, or refuses.

use crate::common::{guest, kvm, words};
use afresh_sys::errno::EIO;
use afresh_sys::{Call, inject};
use afresh_vm::{CallError, ResetMethod, Sandbox};

/// Calls that write to separate pages, with the operations around them.
fn use_it(elf: &[u8], method: ResetMethod) -> Option<Sandbox> {
    let mut sandbox = Sandbox::builder().memory(1 << 20).reset_method(method).build(elf).ok()?;
    let _ = sandbox.call(&words(&[1, 3, 9, 1, 7]));
    let _ = sandbox.write_memory(sandbox.heap().start, &[9; 5000]);
    let _ = sandbox.reset();
    let snapshot = sandbox.snapshot();
    let _ = sandbox.call(&words(&[1, 40, 9, 1, 7]));
    let _ = sandbox.reset();
    if let Ok(snapshot) = snapshot {
        let _ = sandbox.restore(&snapshot);
    }
    // Ended in the middle, so that the processor is reset as well.
    let _ = sandbox.run(b"no words");
    let _ = sandbox.reset();
    Some(sandbox)
}

#[test]
fn a_sandbox_is_correct_or_refused_after_any_failed_system_call() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    // Facts that are probed once per process are probed here.
    drop(use_it(&elf, ResetMethod::default()));
    for method in ResetMethod::ALL {
        if use_it(&elf, method).is_none() {
            println!("SKIPPED: {method} is unavailable here");
            continue;
        }
        let mut left = 0;
        for after in 0.. {
            let plan = inject::Plan { call: None, after, times: 1, errno: EIO };
            let (sandbox, fired) = inject::with(plan, || use_it(&elf, method));
            if let Some(mut sandbox) = sandbox
                && sandbox.reset().is_ok()
            {
                left += 1;
                let output = sandbox.call(&words(&[2, 0, 100, 1])).unwrap();
                assert_eq!(output, 0_u64.to_le_bytes(), "{method}, call {after} failed");
                sandbox.reset().unwrap();
                sandbox.verify().unwrap_or_else(|error| {
                    panic!("{method}, call {after} failed, then: {error}");
                });
            }
            if fired == 0 {
                assert!(after > 20 && left > 0, "{method}: too few calls for a test: {after}");
                break;
            }
        }
    }
}

#[test]
fn a_sandbox_whose_checkpoint_failed_answers_as_before_or_refuses() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    let (write, read) = (words(&[1, 3, 9, 1, 7]), words(&[2, 0, 100, 1]));
    for method in ResetMethod::ALL {
        for call in [Call::Map, Call::Protect] {
            for after in 0.. {
                let builder = Sandbox::builder().memory(1 << 20).reset_method(method);
                let Ok(mut sandbox) = builder.build(&elf) else { break };
                sandbox.call(&write).unwrap();
                let expected = sandbox.call(&read).unwrap();
                let plan = inject::Plan { call: Some(call), after, times: 1, errno: EIO };
                let (_, fired) = inject::with(plan, || sandbox.checkpoint().map(drop));
                match sandbox.call(&read) {
                    Ok(output) => assert_eq!(output, expected, "{method}, {call:?} {after}"),
                    Err(error) => {
                        assert!(matches!(error, CallError::Quarantined), "{method}: {error}");
                    }
                }
                if fired == 0 {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_call_of_kvms_that_fails_is_named() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    for name in ["KVM_CREATE_VM", "KVM_CREATE_VCPU", "KVM_SET_USER_MEMORY_REGION", "KVM_RUN"] {
        let plan = inject::Plan { call: Some(Call::Kvm(name)), after: 0, times: 1, errno: EIO };
        let (built, fired) = inject::with(plan, || Sandbox::builder().memory(1 << 20).build(&elf));
        let Err(error) = built else { panic!("{name} failed, and nobody noticed") };
        assert_eq!(fired, 1);
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        assert!(text.contains(name), "{name}: {text}");
    }
}
