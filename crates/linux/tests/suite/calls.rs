//! `docs/linux-calls.md` against the dispatch of system calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const DISPATCH: &str = include_str!("../../src/sentry/dispatch.rs");
const DOCUMENT: &str = include_str!("../../../../docs/linux-calls.md");

/// Calls of the dispatch, each with the function that serves it.
fn arms() -> BTreeMap<&'static str, &'static str> {
    let name = |text: &'static str| {
        let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        &text[..end]
    };
    let arms = DISPATCH.split("libc::SYS_").skip(1).filter_map(|arm| {
        let (call, serve) = arm.split_once("=>")?;
        let (_, function) = serve.split_once("self.").filter(|(before, _)| before.len() < 40)?;
        call.ends_with(' ').then(|| (name(call), name(function)))
    });
    arms.collect()
}

/// Rows of the document: call and status.
fn rows() -> Vec<(&'static str, &'static str)> {
    let rows = DOCUMENT.lines().filter_map(|line| {
        let mut cells = line.split('|').map(str::trim).skip(2);
        let call = cells.next()?.strip_prefix('`')?.strip_suffix('`')?;
        Some((call, cells.next()?))
    });
    rows.collect()
}

#[test]
fn every_arm_of_the_dispatch_calls_a_function_named_after_its_call() {
    let arms = arms();
    assert!(arms.len() > 200, "{}", arms.len());
    for (call, function) in arms {
        assert_eq!(function, format!("sys_{call}"));
    }
}

#[test]
fn every_call_has_the_name_of_its_row() {
    for line in DOCUMENT.lines() {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let number = cells.next().and_then(|cell| cell.parse().ok());
        if let (Some(number), Some(name)) = (number, cells.next()) {
            assert_eq!(afresh_linux::call_name(number), Some(name.trim_matches('`')), "{number}");
        }
    }
    assert_eq!(afresh_linux::call_name(400), None);
    assert_eq!(afresh_linux::call_name(-1), None);
}

#[test]
fn the_table_of_calls_matches_the_dispatch() {
    let served: BTreeSet<&str> = arms().into_keys().collect();
    let rows = rows();
    let names: BTreeSet<&str> = rows.iter().map(|row| row.0).collect();
    assert_eq!(names.len(), rows.len(), "a call has two rows");
    assert!(served.is_subset(&names), "without a row: {:?}", served.difference(&names));
    for (call, status) in &rows {
        // `setgroups` has a function that refuses it.
        let expected = served.contains(call) && *call != "setgroups";
        assert_eq!(*status != "refused", expected, "{call} is {status}");
        assert!(["served", "partly", "refused"].contains(status), "{call} is {status}");
    }
    let counts = format!("The sentry serves {} of {} calls.", served.len(), rows.len());
    assert!(DOCUMENT.contains(&counts), "the table needs the line: {counts}");
}

#[test]
fn the_table_names_the_file_that_serves_each_call() {
    let sentry = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sentry");
    let (mut folders, mut sources) = (vec![sentry.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = format!("`{}`", path.strip_prefix(&sentry).unwrap().display());
                sources.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    let arms = arms();
    for line in DOCUMENT.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, number, call, _, file, _, _] = cells[..] else { continue };
        if number.parse::<u32>().is_err() {
            continue;
        }
        let function = arms.get(call.trim_matches('`')).map(|function| format!("fn {function}("));
        let serving = function.and_then(|function| {
            sources.iter().find(|(_, source)| source.contains(&function)).map(|(name, _)| &**name)
        });
        assert_eq!(file, serving.unwrap_or_default(), "the file of {call}");
    }
}
