//! Processes that trace others (`ptrace`), and the tools that do.

use std::path::Path;

use afresh_linux::{End, Program};

use crate::common::{compiled, here, limit};

/// Runs a part of the tracer to its end.
fn traces(part: &str) {
    let Some(path) = compiled("tracer.c", &["-static"]) else { return };
    let program = Program::new(path).arg(part).start_limit(limit(100));
    let Some(run) = here(program.run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output).into_owned();
    assert_eq!((run.end, output.as_str()), (End::Exit(0), "ok\n"), "{}", run.messages);
}

#[test]
fn a_tracer_sees_the_number_and_the_result_of_each_call_and_changes_them() {
    traces("calls");
}

#[test]
fn a_tracer_sees_signals_first_and_drops_or_changes_them() {
    traces("signals");
}

#[test]
fn a_breakpoint_in_text_is_hit_and_single_steps_follow() {
    traces("steps");
}

#[test]
fn a_process_is_attached_to_interrupted_and_let_go() {
    traces("attaches");
}

#[test]
fn children_and_programs_of_a_tracee_are_events() {
    traces("families");
}

#[test]
fn a_tracer_reads_and_writes_memory_through_a_file() {
    traces("memory");
}

#[test]
fn the_sanitizer_of_gcc_finds_a_leak() {
    let Some(path) = compiled("leak.c", &["-fsanitize=address"]) else { return };
    let program = Program::new(path).memory_limit(1 << 30).start_limit(limit(100));
    let Some(run) = here(program.run(b"")) else { return };
    let (output, part) = (&run.messages, "100 byte(s) leaked in 1 allocation(s)");
    assert!(run.end == End::Exit(1) && output.contains(part), "{:?} {output}", run.end);
}

/// The output of a tool of the host as a guest, which may read `grant`; `None` without it.
fn tool(path: &str, args: &[&str], grant: Option<&Path>) -> Option<(End, String)> {
    if !Path::new(path).exists() {
        println!("SKIPPED: no {path}");
        return None;
    }
    let program = args.iter().fold(Program::new(path), |program, arg| program.arg(*arg));
    let program = program.env("PATH", "/usr/bin:/bin").start_limit(limit(100));
    let program = grant.into_iter().fold(program, |program, folder| program.grant(folder));
    let run = here(program.run(b""))?;
    Some((run.end, String::from_utf8_lossy(&run.output).into_owned() + &run.messages))
}

#[test]
fn strace_follows_a_shell_and_its_child() {
    let script = "/bin/true; exit 3";
    let args = ["-f", "-o", "/dev/stdout", "/bin/sh", "-c", script];
    let Some((end, text)) = tool("/usr/bin/strace", &args, None) else { return };
    assert_eq!(end, End::Exit(3), "{text}");
    for part in ["execve(\"/bin/true\"", "+++ exited with 0 +++", "SIGCHLD", "exit_group(3)"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn gdb_shows_the_stack_of_a_program_that_fails() {
    let Some(path) = compiled("tracer.c", &["-static", "-g", "-DNONE"]) else { return };
    let (folder, path) = (path.parent(), path.to_str().unwrap());
    let args =
        ["-nx", "-batch", "-ex", "break main", "-ex", "run", "-ex", "bt", "-ex", "stepi", path];
    let Some((end, text)) = tool("/usr/bin/gdb", &args, folder) else { return };
    assert!(end == End::Exit(0) && text.contains("#0  main"), "{end:?} {text}");
}
