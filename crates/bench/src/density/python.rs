//! Clones of a warm CPython that have each answered once, and children of a CPython that forks for
//! each request. All stay until the end.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Growth;
use crate::linux::{CASES, Case, Python, WARMING, check};
use crate::{Options, Sink};

/// The case `numpy`, or `json` where the interpreter has no NumPy.
pub(super) fn all(count: usize, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let names = ["afresh", "fork"].map(|strategy| ("python", strategy));
    if !names.iter().any(|(case, strategy)| options.wants(case, strategy)) {
        return Ok(());
    }
    let python = match Python::find() {
        Ok(python) => python,
        Err(error) => {
            eprintln!("python left out: {error:#}");
            return Ok(());
        }
    };
    let case = CASES.iter().rev().find(|case| case.threads == "1" && python.has(case.imports));
    let case = case.context("python3 has no module json")?;
    eprintln!("python: the case {}", case.name);
    for names in names.into_iter().filter(|(case, strategy)| options.wants(case, strategy)) {
        match names.1 {
            "afresh" => clones(&python, case, count, names, sink)?,
            _ => forks(&python, case, count, names, sink)?,
        }
    }
    Ok(())
}

fn clones(
    python: &Python,
    case: &Case,
    count: usize,
    names: (&str, &str),
    sink: &mut Sink<'_>,
) -> Result<()> {
    let warm = python.program(case).warm()?;
    let mut first = warm.instance();
    check(case, &first.call(case.request.as_bytes())?)?;
    let growth = Growth::begin()?;
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        let mut instance = warm.instance();
        match instance.call(case.request.as_bytes()) {
            Ok(answer) => check(case, &answer)?,
            Err(error) => {
                eprintln!("{} {}: {} guests: {error}", names.0, names.1, held.len());
                break;
            }
        }
        held.push(instance);
    }
    growth.report(names, (count, held.len()), None, sink)
}

/// The rival: a server that forks for each request. Its children end with it.
fn forks(
    python: &Python,
    case: &Case,
    count: usize,
    names: (&str, &str),
    sink: &mut Sink<'_>,
) -> Result<()> {
    let Case { imports, body, request, .. } = case;
    let script = format!(
        "import sys, os\n{imports}\nend, started = os.pipe()\nfor line in [{request:?}] * {WARMING}:\n    {body}\n\
         for line in sys.stdin:\n    if os.fork() == 0:\n        os.close(started)\n        {body}\n        \
         sys.stdout.write(answer + '\\n'); sys.stdout.flush()\n        os.read(end, 1)\n        os._exit(0)\n"
    );
    let mut command: Command = python.command(case, &script);
    let mut server = command.stderr(Stdio::inherit()).spawn()?;
    let mut to = server.stdin.take().context("no pipe")?;
    let mut from = BufReader::new(server.stdout.take().context("no pipe")?);
    let mut ask = || -> Result<()> {
        to.write_all(request.as_bytes())?;
        let mut line = String::new();
        ensure!(from.read_line(&mut line)? > 0, "the server has ended");
        check(case, line.as_bytes())
    };
    let mut measure = || {
        ask()?;
        let growth = Growth::of(server.id())?;
        let mut reached = 0;
        while reached < count {
            if let Err(error) = ask() {
                eprintln!("{} {}: {reached} guests: {error:#}", names.0, names.1);
                break;
            }
            reached += 1;
        }
        growth.report(names, (count, reached), None, sink)
    };
    let measured = measure();
    drop(to);
    server.wait()?;
    measured
}
