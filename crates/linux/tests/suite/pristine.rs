//! Every call starts from the same state, after every kind of call and end.

use crate::common;

use afresh_linux::{CallError, End, Instance, Program};
use afresh_sys::planted::{self, Bug};

fn canary() -> Option<Instance> {
    common::warm("canary.c", |p| {
        p.time_limit(common::limit(2)).output_limit(1 << 20).start_limit(common::limit(20))
    })
}

fn look(warm: &mut Instance) -> String {
    String::from_utf8(warm.call_pristine(b"look\n").unwrap()).unwrap()
}

#[test]
fn a_canary_of_each_kind_is_removed_by_the_reset() {
    let Some(mut warm) = canary() else { return };
    let clean = look(&mut warm);
    assert!(
        clean.starts_with("calls 1 data 42 zero 0 local 5 heap clean map 11 stack 0"),
        "{clean}"
    );
    assert!(clean.contains(" gs 42000 es 0 "), "{clean}");
    assert!(clean.ends_with(" sent 0 0 timer -1 files 1024 named 0\n"), "{clean}");
    assert!(clean.contains("env clean cwd /tmp/clean file clean at 5 made 0"), "{clean}");
    for round in 0..20 {
        assert_eq!(warm.call_pristine(b"dirty\n").unwrap(), b"done\n");
        let dirty = String::from_utf8(warm.call(b"look\n").unwrap()).unwrap();
        assert!(dirty.ends_with(" sent 1 1 timer 0 files 100 named 1\n"), "{dirty}");
        let compared = warm.verify().unwrap();
        assert!(compared > 8 << 20, "{compared}");
        assert_eq!(look(&mut warm), clean, "round {round}");
        assert_eq!(warm.call_pristine(b"dirty\n").unwrap(), b"done\n");
        assert_eq!(warm.call_pristine(b"poke\n").unwrap(), b"done\n");
        assert_eq!(look(&mut warm), clean, "round {round}");
        assert_eq!(warm.call_pristine(b"poke\n").unwrap(), b"done\n");
        warm.verify().unwrap();
    }
    assert_eq!(warm.stats().processes, 1, "all of it was brought back within one process");
}

#[test]
fn writes_of_a_new_process_in_its_first_call_are_reset() {
    // Before its first reset nothing is watched; written pages are read from the page map.
    for request in [b"dirty\n".as_slice(), b"poke\n", b"heavy\n"] {
        let Some(mut warm) = canary() else { return };
        warm.call(request).unwrap();
        warm.verify().unwrap();
        // From then on it is.
        warm.call(request).unwrap();
        warm.verify().unwrap();
        assert_eq!(warm.stats().processes, 1, "all of it was brought back within one process");
    }
}

#[test]
fn a_call_that_ends_the_guest_leaves_nothing_behind() {
    let Some(mut warm) = canary() else { return };
    let clean = look(&mut warm);
    let mut ends = |request: &[u8], brought_back: bool, expected: &dyn Fn(&CallError) -> bool| {
        let before = warm.stats().processes;
        let error = warm.call_pristine(request).expect_err("it ends");
        assert!(expected(&error), "{error}");
        assert_eq!(look(&mut warm), clean, "after {error}");
        warm.verify().unwrap();
        assert_eq!(warm.stats().processes == before, brought_back, "{error}");
    };
    for _ in 0..3 {
        ends(b"exit\n", true, &|e| matches!(e, CallError::Ended { end: End::Exit(7), .. }));
        ends(b"abort\n", true, &|e| matches!(e, CallError::Ended { end: End::Signal(6), .. }));
        ends(b"crash\n", true, &|e| matches!(e, CallError::Ended { end: End::Signal(11), .. }));
        ends(b"wait\n", true, &|e| matches!(e, CallError::Ended { end: End::Deadlock, .. }));
        ends(b"flood\n", false, &|e| matches!(e, CallError::Ended { end: End::Output, .. }));
        ends(b"", true, &|e| matches!(e, CallError::Ended { end: End::Exit(0), .. }));
    }
    ends(b"loop\n", false, &|e| matches!(e, CallError::Late { .. }));
    ends(b"spin\n", false, &|e| matches!(e, CallError::Late { .. }));
    ends(b"sleep\n", false, &|e| matches!(e, CallError::Late { .. }));
}

#[test]
fn memory_is_read_as_the_last_call_has_left_it() {
    let Some(mut warm) = canary() else { return };
    let mut data = [0; 4];
    assert!(warm.read_memory(0x1000, &mut data).is_err(), "nothing has run yet");
    let at = String::from_utf8(warm.call_pristine(b"where\n").unwrap()).unwrap().parse().unwrap();
    let mut read = |warm: &Instance| {
        warm.read_memory(at, &mut data).unwrap();
        i32::from_ne_bytes(data)
    };
    assert_eq!(read(&warm), 123);
    warm.call_pristine(b"poke\n").unwrap();
    assert_eq!(read(&warm), 97);
    warm.call(b"crash\n").unwrap_err();
    assert_eq!(read(&warm), 1, "also of a call that ended it");
    warm.call_pristine(b"look\n").unwrap();
    assert_eq!(read(&warm), 42);
    assert!(warm.read_memory(0, &mut [0]).is_err() && warm.read_memory(at, &mut [0]).is_ok());
    warm.call_pristine(b"loop\n").unwrap_err();
    assert!(warm.read_memory(at, &mut [0]).is_err(), "its process was killed");
}

#[test]
fn pages_of_one_heavy_call_leave_the_write_set() {
    let Some(mut warm) = canary() else { return };
    let clean = look(&mut warm);
    let light = warm.stats().copied;
    assert_eq!(warm.call_pristine(b"heavy\n").unwrap(), b"heavy\n");
    assert_eq!(warm.call_pristine(b"dirty\n").unwrap(), b"done\n");
    assert_eq!(look(&mut warm), clean);
    assert!(warm.stats().copied > light);
    for _ in 0..1100 {
        warm.call_pristine(b"look\n").unwrap();
    }
    assert!(warm.stats().copied <= light + (64 << 10), "{} after {light}", warm.stats().copied);
    assert_eq!(look(&mut warm), clean);
    warm.verify().unwrap();
    // Pages that left the write set are noticed when they are written again.
    assert_eq!(warm.call_pristine(b"dirty\n").unwrap(), b"done\n");
    warm.verify().unwrap();
}

#[test]
fn a_process_that_was_killed_from_outside_is_replaced() {
    let Some(mut warm) = canary() else { return };
    let clean = look(&mut warm);
    let id = warm.process_id().unwrap();
    let killed = std::process::Command::new("kill").args(["-9", &id.to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(look(&mut warm), clean);
    assert_ne!(warm.process_id(), Some(id));
    // A process also ends with the thread that made it: it must not outlive its sentry.
    let mut warm = std::thread::spawn(move || {
        warm.call_pristine(b"loop\n").unwrap_err();
        look(&mut warm);
        warm
    })
    .join()
    .unwrap();
    assert_eq!(look(&mut warm), clean);
}

#[test]
fn a_panic_while_a_call_is_served_ends_that_guest_alone() {
    let (Some(mut warm), Some(mut other)) = (canary(), canary()) else { return };
    let clean = look(&mut warm);
    let id = warm.process_id().unwrap();
    let error = warm.call_streaming(b"dirty\n", |_, _| panic!("in the receiver")).unwrap_err();
    assert!(error.to_string().contains("in the receiver"), "{error}");
    assert_eq!(look(&mut other), clean);
    assert_eq!(look(&mut warm), clean);
    assert_ne!(warm.process_id(), Some(id));
}

#[test]
fn guests_in_several_threads_do_not_meet() {
    let Some(path) = common::compiled("canary.c", &["-static"]) else { return };
    let program = Program::new(path);
    if common::here(program.warm()).is_none() {
        return;
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut warm = program.warm().unwrap().instance();
                let clean = look(&mut warm);
                for _ in 0..50 {
                    assert_eq!(warm.call_pristine(b"dirty\n").unwrap(), b"done\n");
                    assert_eq!(look(&mut warm), clean);
                }
                warm.verify().unwrap();
            });
        }
    });
}

#[test]
fn long_requests_and_answers_go_through() {
    let Some(path) = common::compiled("hello.c", &["-static"]) else { return };
    let program = Program::new(path).env("COLOUR", "blue").time_limit(common::limit(10));
    let Some(mut warm) = common::here(program.warm()).map(|warm| warm.instance()) else { return };
    for length in [1, 999, 1000, 1001, 40_000, 1 << 20] {
        let request: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
        assert_eq!(warm.call_pristine(&request).unwrap(), request);
    }
    warm.verify().unwrap();
}

#[test]
fn warm_up_requests_are_part_of_the_warm_state() {
    let Some(mut warm) = common::warm("canary.c", |p| p.request("look\n").request("look\n")) else {
        return;
    };
    assert!(look(&mut warm).starts_with("calls 3 "));
    assert!(look(&mut warm).starts_with("calls 3 "));
}

#[test]
fn planted_bugs_are_caught() {
    if canary().is_none() {
        return;
    }
    planted::must_be_caught(
        &[Bug::CopyBack, Bug::Learn, Bug::Register, Bug::HostState, Bug::Mapping],
        &["pristine::a_canary_of_each_kind_is_removed_by_the_reset"],
    );
    planted::must_be_caught(
        &[Bug::Learn],
        &["pristine::writes_of_a_new_process_in_its_first_call_are_reset"],
    );
    planted::must_be_caught(
        &[Bug::Rearm],
        &["pristine::pages_of_one_heavy_call_leave_the_write_set"],
    );
}

#[test]
fn a_program_that_never_waits_is_refused() {
    let Some(path) = common::compiled("hello.c", &["-static"]) else { return };
    // It waits first; after the end of the input it ends.
    let program = Program::new(&path).request("");
    let Some(error) = common::here(match program.warm() {
        Err(error @ afresh_linux::WarmError::Ended { .. }) => Ok(error),
        Err(error) => Err(error),
        Ok(_) => panic!("it cannot be warm"),
    }) else {
        return;
    };
    assert!(error.to_string().contains("exited with status 0"), "{error}");
}
