//! Limits of the host process: a guest runs within them, or the error names them.

use crate::common;

use afresh_linux::{End, Program};
use afresh_sys::run_isolated;
use rustix::process::{Resource, Rlimit, setrlimit};

#[test]
fn a_guest_runs_with_few_descriptors() {
    run_isolated("host_limits::a_guest_runs_with_few_descriptors", || {
        let limit = Rlimit { current: Some(40), maximum: Some(40) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let Some(run) = common::here(Program::new("/bin/true").run(b"")) else { return };
        assert_eq!(run.end, End::Exit(0));
    });
}

#[test]
fn the_error_for_small_files_names_the_limit() {
    run_isolated("host_limits::the_error_for_small_files_names_the_limit", || {
        if common::here(Program::new("/bin/true").run(b"")).is_none() {
            return;
        }
        let limit = Rlimit { current: Some(5120), maximum: Some(5120) };
        setrlimit(Resource::Fsize, limit).unwrap();
        let error = Program::new("/bin/true").run(b"").unwrap_err().to_string();
        assert!(error.contains("ulimit -f"), "{error}");
    });
}
