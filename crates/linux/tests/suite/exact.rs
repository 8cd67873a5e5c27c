//! Kinds of behaviour that programs rely on, each checked by the guest itself: data that must not
//! be wrong, what must not end or starve a guest, and calls that must be there.

use crate::common;

use std::time::Duration;

use afresh_linux::Program;

const LIMIT: Duration = Duration::from_secs(100);

/// The guest's own verdict on a kind, from the warm state and once more behind it.
fn holds(kind: &str) {
    let Some(mut guest) = common::warm("exact.c", |program: Program| program.time_limit(LIMIT))
    else {
        return;
    };
    for _ in 0..2 {
        for _ in 0..2 {
            let answer = guest.call(format!("{kind}\n").as_bytes()).unwrap();
            assert_eq!(String::from_utf8_lossy(&answer), "ok\n", "{kind}");
        }
        guest.reset();
    }
}

#[test]
fn shared_mappings_and_files_agree() {
    holds("shared");
}

#[test]
fn numbers_that_are_no_calls_end_nothing() {
    holds("numbers");
}

#[test]
fn handlers_begin_with_a_new_programs_settings_and_stay_on_their_stack() {
    holds("handlers");
}

#[test]
fn calls_without_pause_leave_time_for_threads_and_signals() {
    holds("fair");
}

#[test]
fn robust_mutexes_survive_their_holders() {
    holds("robust");
}

#[test]
fn connections_report_resets_ends_and_options() {
    holds("sockets");
}

#[test]
fn mappings_keep_to_limits_and_odd_arguments_are_refused() {
    holds("memory");
}

#[test]
fn ports_are_shared_and_the_interface_is_listed() {
    holds("network");
}

#[test]
fn reserved_addresses_cost_nothing_and_limits_of_files_hold() {
    holds("limits");
}

#[test]
fn priorities_locked_memory_splices_and_conditional_opens_are_served() {
    holds("calls");
}
