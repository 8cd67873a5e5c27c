//! Processes that end a sharing or a trace.

use afresh_linux::{Program, Warm};

use crate::common::states::{ask, in_every_state};
use crate::common::{compiled, here, limit};

fn warm() -> Option<(Program, Warm)> {
    let program = Program::new(compiled("apart.c", &["-static"])?);
    let program = program.start_limit(limit(100)).time_limit(limit(100));
    let warm = here(program.clone().warm())?;
    Some((program, warm))
}

#[test]
fn a_tracee_that_continues_while_it_is_stopped_is_in_every_state() {
    let Some((program, warm)) = warm() else { return };
    in_every_state(&program, &warm, "seized", ["look", "held", "none"]);
}

#[test]
fn a_queue_that_goes_with_its_last_descriptor_takes_its_notice_along_in_every_state() {
    let Some((program, warm)) = warm() else { return };
    in_every_state(&program, &warm, "queue", ["look", "held", "none"]);
}

#[test]
fn copies_of_shared_descriptors_count_against_the_limit_of_all_processes() {
    let Some((_, warm)) = warm() else { return };
    assert_eq!(ask(&mut warm.instance(), "copies"), "done");
}

#[test]
fn an_owner_of_memory_that_sleeps_is_saved_after_its_borrower_has_left() {
    let Some((program, warm)) = warm() else { return };
    for way in ["borrower runs", "borrower ends", "borrower vfork runs", "borrower vfork ends"] {
        in_every_state(&program, &warm, way, ["look", "held", "none"]);
    }
}
