//! `eryx`: code for a Python sandbox, and a sandbox with ten pieces of code. The rival is eryx
//! (`pyeryx` from PyPI), CPython in Wasm by wasmtime with its state in the module. Ours is the
//! host's CPython as a Linux guest.
//!
//! The layers differ. Our rows call `afresh_linux::Instance` with a script that evaluates each
//! line. eryx is called by its Python API, whose cost is in its rows.
//!
//! The program of the rival times itself, so the way to it is not measured.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::linux::Python;
use crate::rival_process::RivalProcess;
use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "eryx";
const RIVAL: &str = include_str!("eryx.py");
/// Where `cargo xtask rivals` installs a Python that has eryx, below its folder, and a factory of
/// sandboxes.
const PLACE: &str = "eryx/python";
const FACTORY: &str = "eryx/factory.bin";

/// Runs each line, a string of JSON, and answers its output.
const SCRIPT: &str = "import contextlib, io, json, sys
space = {}
for line in sys.stdin:
    output = io.StringIO()
    with contextlib.redirect_stdout(output): exec(json.loads(line), space)
    print(json.dumps(output.getvalue()), flush=True)
";
/// Maximum time from the rival's start to its first answer. It loads a library of 91 MiB.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A piece of code, and its answer.
const CODE: (&str, &str) = ("\"x = sum(range(10))\\nprint(x)\"\n", "\"45\\n\"\n");
const FIRST: &str = "\"x = 1\"\n";
const NEXT: &str = "\"x += 1\"\n";
const LAST: (&str, &str) = ("\"print(x)\"\n", "\"9\\n\"\n");

/// All cases. `omitted` receives the reason if the rival does not run.
///
/// # Errors
/// When python3 is missing, the host runs no guests, or an answer is wrong.
pub fn all(
    rivals: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
    omitted: &mut dyn FnMut(&anyhow::Error),
) -> anyhow::Result<()> {
    let program = rivals.join(PLACE);
    let rival = match program.is_file() {
        true => {
            let mut command = Command::new(program);
            command.args(["-c", RIVAL]).arg(rivals.join(FACTORY));
            RivalProcess::start(command, "sandbox 1", START_TIMEOUT)
        }
        false => Err(anyhow::anyhow!("no {}; `cargo xtask rivals --only eryx`", program.display())),
    };
    let rival = rival.inspect_err(|error| omitted(error)).ok();
    let rival = std::cell::RefCell::new(rival);
    let theirs = |strategy: &'static str, case: &'static str| {
        let process = &rival;
        rival.borrow().is_some().then(|| {
            Contestant::timed(strategy, move |n| {
                let mut process = process.borrow_mut();
                process.as_mut().context("no rival")?.time(&format!("{case} {n}"))
            })
            .optional()
        })
    };

    let warm = Python::find()?.guest(SCRIPT).request(CODE.0).warm()?;
    let mut ours = warm.instance();
    let check = |answer: &[u8], expected: &str| {
        let answer = String::from_utf8_lossy(answer);
        ensure!(answer == expected, "the answer is {answer:?}, not {expected:?}");
        Ok(())
    };
    let mut field =
        vec![Contestant::new("afresh", || check(&ours.call_pristine(CODE.0.as_bytes())?, CODE.1))];
    field.extend(theirs("eryx/sandbox", "sandbox"));
    field.extend(theirs("eryx/pool", "pooled"));
    contest(TABLE, "python/code", options, field, sink)?;
    ours.verify()?;

    let ten = || {
        let mut instance = warm.instance();
        instance.call(FIRST.as_bytes())?;
        for _ in 0..8 {
            instance.call(NEXT.as_bytes())?;
        }
        check(&instance.call(LAST.0.as_bytes())?, LAST.1)
    };
    let mut field = vec![Contestant::new("afresh", ten)];
    field.extend(theirs("eryx/session", "session"));
    contest(TABLE, "python/ten", options, field, sink)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_eryx_its_rows_are_left_out_with_the_reason() {
        if let Err(error) = Python::find() {
            eprintln!("SKIPPED: {error:#}");
            return;
        }
        let rivals = tempfile::tempdir().unwrap();
        let (mut rows, mut reasons) = (Vec::new(), Vec::new());
        let options =
            Options { rounds: 1, batch: Duration::from_micros(1), filter: None, quick: true };
        let mut sink = |row: &crate::Row| rows.push((row.case.clone(), row.strategy.clone()));
        let mut omitted = |error: &anyhow::Error| reasons.push(error.to_string());
        all(rivals.path(), &options, &mut sink, &mut omitted).unwrap();
        let expected = ["python/code", "python/ten"].map(|case| (case.into(), "afresh".into()));
        assert_eq!(rows, expected);
        assert!(reasons.len() == 1 && reasons[0].contains("cargo xtask rivals"), "{reasons:?}");
    }
}
