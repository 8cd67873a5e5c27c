//! CPU time for bills: that of the processes of a guest, whichever of them ran, and no waits.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::time::{Duration, Instant};

use afresh_linux::{CallError, Program, take_guest_cpu_time};

use crate::common;

/// CPU time, and the length of a run of these commands.
fn bill(commands: &str) -> Option<(Duration, Duration)> {
    let program = Program::new("/bin/sh").grant("/").arg("-c").arg(commands);
    let _ = take_guest_cpu_time();
    let begun = Instant::now();
    match program.run(b"") {
        Ok(run) => {
            assert_eq!(run.output, b"done\n");
            Some((take_guest_cpu_time(), begun.elapsed()))
        }
        Err(why) => {
            println!("SKIPPED: {why}");
            None
        }
    }
}

#[test]
fn work_of_any_process_is_billed_once_and_waits_are_not() {
    const COUNT: &str = "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done;";
    let Some((none, _)) = bill("echo done") else { return };
    let (one, _) = bill(&format!("{COUNT} echo done")).unwrap();
    // In three children, one after another.
    let (three, length) =
        bill(&format!("({COUNT}) ; ({COUNT}) & wait; ({COUNT}) ; echo done")).unwrap();
    assert!(none < one && one < three, "{none:?} {one:?} {three:?}");
    assert!(three <= length, "{three:?} in {length:?}");
    let (waits, length) = bill("sleep 0.5; echo done").unwrap();
    assert!(waits < length - Duration::from_millis(300), "{waits:?} in {length:?}");
    assert_eq!(take_guest_cpu_time(), Duration::ZERO);
}

#[test]
fn work_of_a_process_that_is_killed_is_billed() {
    let Some(mut instance) = common::warm("hostile.c", |program| program) else { return };
    let _ = take_guest_cpu_time();
    let call = |instance: &mut afresh_linux::Instance| instance.call_pristine(b"21 0");
    assert!(matches!(call(&mut instance), Err(CallError::Platform { .. })));
    let spent = take_guest_cpu_time();
    // It has counted to a hundred million.
    assert!(spent > Duration::from_millis(10), "{spent:?}");
}
