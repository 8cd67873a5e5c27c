//! The table `linux`: its cases in one run.

use std::path::Path;

use crate::linux::{CASES, NODE, Python, beginnings, calls, node, stay};
use crate::row::{Options, Sink};
use crate::{linux_calls, linux_files, linux_starts};

/// All cases whose modules and programs the host has. `dir` is for snapshots. `omitted` receives
/// the cases and rivals that are left out.
///
/// # Errors
/// When python3 is missing, the host runs no guests, or an answer is wrong.
pub fn all(
    dir: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
    omitted: &mut dyn FnMut(&str),
) -> anyhow::Result<()> {
    let python = Python::find()?;
    let before = rustix::thread::sched_getaffinity(None)?;
    stay()?;
    let result = CASES.iter().try_for_each(|case| {
        if !python.has(case.imports) {
            omitted(case.name);
            return Ok(());
        }
        let warm = python.program(case).warm()?;
        calls(&python, case, &warm, options, sink)?;
        beginnings(&python, case, &warm, dir, options, sink)
    });
    let result = result.and_then(|()| linux_files::all(&python, options, sink));
    let result = result.and_then(|()| linux_calls::all(&python, options, sink));
    let result = result.and_then(|()| linux_starts::all(&python, options, sink, omitted));
    let result = result.and_then(|()| match Path::new(NODE).exists() {
        true => node(dir, options, sink),
        false => {
            omitted("node");
            Ok(())
        }
    });
    rustix::thread::sched_setaffinity(None, &before)?;
    result
}
