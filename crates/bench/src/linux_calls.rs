//! `linux`, its system calls: CPython makes a thousand calls of one kind, and runs `import json`
//! from its start to its end. Some calls are answered inside the guest's process, or all of them by
//! the sentry. The rival is CPython without afresh.

use std::process::Stdio;
use std::time::Duration;

use afresh_linux::Instance;
use anyhow::ensure;

use crate::linux::Python;
use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "linux";
/// Makes a thousand calls of the requested kind, and writes the time for each in nanoseconds.
const SCRIPT: &str = "import os, sys, time
open('/tmp/afresh-bench-calls', 'wb').write(bytes(1 << 20))
file = os.open('/tmp/afresh-bench-calls', os.O_RDONLY)
written = os.open('/tmp/afresh-bench-calls', os.O_WRONLY)
os.unlink('/tmp/afresh-bench-calls')
block = bytes(64)
kinds = {
    'null': lambda: os.getppid(),
    'lseek': lambda: os.lseek(file, 0, 1),
    'fstat': lambda: os.fstat(file),
    'read': lambda: os.read(file, 64),
    'write': lambda: os.write(written, block),
}
for line in sys.stdin:
    call = kinds[line.strip()]
    os.lseek(file, 0, 0); os.lseek(written, 0, 0)
    start = time.perf_counter_ns()
    for _ in range(1000): call()
    print((time.perf_counter_ns() - start) // 1000, flush=True)
";
const KINDS: [&str; 5] = ["null", "lseek", "fstat", "read", "write"];

/// An answer of the script: the time for a call.
fn time(answer: &[u8]) -> anyhow::Result<Duration> {
    let nanos = std::str::from_utf8(answer)?.trim().parse::<u64>()?;
    Ok(Duration::from_nanos(nanos))
}

fn instance(python: &Python, inside: bool) -> anyhow::Result<Instance> {
    Ok(python.guest(SCRIPT).answer_inside(inside).warm()?.instance())
}

/// The contest.
///
/// # Errors
/// The first that any contestant meets.
pub(crate) fn all(python: &Python, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    const NAMES: [(&str, bool); 2] = [("afresh", true), ("afresh/sentry-only", false)];
    for kind in KINDS {
        let case = format!("calls/{kind}");
        if !NAMES.iter().any(|(name, _)| options.wants(&case, name)) {
            continue;
        }
        let request = format!("{kind}\n");
        let mut field = Vec::new();
        for (name, inside) in NAMES {
            let (mut guest, request) = (instance(python, inside)?, request.clone());
            field.push(Contestant::timed(name, move |n| {
                (0..n).map(|_| time(&guest.call(request.as_bytes())?)).sum()
            }));
        }
        let mut native = python.server(SCRIPT)?;
        field.push(Contestant::timed("native", move |n| {
            (0..n).map(|_| time(native.answer(&request)?.as_bytes())).sum()
        }));
        contest(TABLE, &case, options, field, sink)?;
    }
    starts(python, options, sink)
}

/// `import json`, from the start of CPython to its end.
fn starts(python: &Python, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    const PROGRAM: &str = "import json";
    let run = |inside: bool| {
        let program = python.guest(PROGRAM).answer_inside(inside);
        move || {
            let end = program.clone().run(b"")?;
            ensure!(end.messages.is_empty(), "CPython wrote {:?}", end.messages);
            Ok(())
        }
    };
    let native = || {
        let mut command = python.interpreter();
        let status = command.args(["-c", PROGRAM]).stdin(Stdio::null()).status()?;
        ensure!(status.success(), "CPython ended with {status}");
        Ok(())
    };
    let field = vec![
        Contestant::new("afresh", run(true)),
        Contestant::new("afresh/sentry-only", run(false)),
        Contestant::new("native", native),
    ];
    contest(TABLE, "calls/import", options, field, sink)
}
