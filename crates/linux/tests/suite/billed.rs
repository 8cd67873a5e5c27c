//! CPU time for bills: that of the processes of a guest, whichever of them ran, and no waits.

use std::time::{Duration, Instant};

use afresh_linux::{CallError, MemoryPeak, Program, guest_cpu_time, take_guest_cpu_time};
use afresh_snapshot::Guest;

use crate::common;

/// Runs each line of its input.
const SHELL: &str = "while read -r line; do eval \"$line\"; echo done; done";

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

#[test]
fn a_busy_call_ends_at_its_cpu_time_limit_and_a_sleeper_does_not() {
    let program = Program::new("/bin/sh").grant("/").arg("-c").arg(SHELL);
    let warm = match program.time_limit(Duration::from_secs(60)).warm() {
        Ok(warm) => warm,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let mut instance = warm.instance();
    let limit = Duration::from_millis(300);
    instance.set_cpu_time_limit(Some(limit));
    assert_eq!(instance.call_pristine(b"sleep 1\n").unwrap(), b"done\n");
    let forks = b"while :; do (i=0; while [ $i -lt 99 ]; do i=$((i+1)); done); done\n";
    for busy in [&b"while :; do :; done\n"[..], b"(while :; do :; done)\n", forks] {
        let before = guest_cpu_time();
        let error = instance.call_pristine(busy).unwrap_err();
        assert!(matches!(error, CallError::CpuTime { limit: l, .. } if l == limit), "{error}");
        assert!(error.to_string().contains("300ms"), "{error}");
        assert!(guest_cpu_time() > before);
    }
    instance.set_cpu_time_limit(None);
    assert_eq!(instance.call_pristine(b"true\n").unwrap(), b"done\n");
}

#[test]
fn the_peak_of_mapped_memory_outlasts_the_processes_that_mapped_it() {
    let program = Program::new("/bin/sh").grant("/").arg("-c").arg(SHELL);
    let warm = match program.warm() {
        Ok(warm) => warm,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let mut instance = warm.instance();
    let peak = |instance: &mut afresh_linux::Instance, line: &[u8]| {
        instance.reset();
        let mapped = instance.mapped_memory();
        let measured = MemoryPeak::start(mapped);
        instance.call(line).unwrap();
        (mapped, measured.stop())
    };
    let (mapped, alone) = peak(&mut instance, b"true\n");
    assert!(mapped > 0 && alone >= mapped, "{mapped} {alone}");
    let (_, forked) = peak(&mut instance, b"(sleep 0.1)\n");
    assert!(forked > alone, "{forked} {alone}");
}

#[test]
fn memory_is_written_until_a_checkpoint_has_it() {
    let program = Program::new("/bin/sh").grant("/").arg("-c").arg(SHELL);
    let warm = match program.warm() {
        Ok(warm) => warm,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    const FILL: &[u8] = b"filled=$(head -c 20000000 /dev/zero | tr '\\0' x)\n";
    const FILLED: u64 = 20_000_000;
    let mut instance = warm.instance();
    assert_eq!(instance.written_memory(), 0);
    instance.call(b"true\n").unwrap();
    let small = instance.written_memory();
    assert!(small > 0 && small < FILLED / 2, "{small}");
    instance.call(FILL).unwrap();
    assert!(instance.written_memory() >= FILLED, "{}", instance.written_memory());
    // Child processes count while they live.
    Guest::checkpoint(&mut instance).unwrap();
    assert_eq!(instance.written_memory(), 0);
    let child = [b"(", FILL.trim_ascii(), b"; while :; do sleep 1; done) &\n"].concat();
    instance.call(&child).unwrap();
    let begun = Instant::now();
    while instance.written_memory() < FILLED && begun.elapsed() < Duration::from_secs(120) {
        instance.call(b"sleep 0.1\n").unwrap();
    }
    assert!(instance.written_memory() >= FILLED, "{}", instance.written_memory());
    // The memory of a child that ended since does not count against that of others.
    Guest::checkpoint(&mut instance).unwrap();
    instance.call(b"kill $!; wait $!\n").unwrap();
    let before = instance.written_memory();
    instance.call(&[b"more", FILL].concat()).unwrap();
    let written = instance.written_memory().saturating_sub(before);
    assert!(written >= FILLED, "{written}");
    instance.reset();
    assert_eq!(instance.written_memory(), 0);
}
