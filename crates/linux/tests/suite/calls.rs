//! `docs/linux-calls.md`, with the numbers of x86-64, against the dispatch of system calls, and the
//! documentation of their functions.

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
    let arms = DISPATCH.split("::SYS_").skip(1).filter_map(|arm| {
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

#[cfg(target_arch = "x86_64")]
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
        assert_eq!(*status != "refused", served.contains(call), "{call} is {status}");
        assert!(["served", "partly", "refused"].contains(status), "{call} is {status}");
    }
    let counts = format!("The sentry serves {} of {} calls.", served.len(), rows.len());
    assert!(DOCUMENT.contains(&counts), "the table needs the line: {counts}");
}

/// Sources of the sentry, each with its path in `src/sentry`.
fn sources() -> Vec<(String, String)> {
    let sentry = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sentry");
    let (mut folders, mut sources) = (vec![sentry.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(&sentry).unwrap().display().to_string();
                sources.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    sources
}

#[test]
fn the_table_names_the_file_that_serves_each_call() {
    let (arms, sources) = (arms(), sources());
    for line in DOCUMENT.lines() {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, number, call, _, file, _, _] = cells[..] else { continue };
        if number.parse::<u32>().is_err() {
            continue;
        }
        let function = arms.get(call.trim_matches('`')).map(|function| format!("fn {function}("));
        let serving = function.and_then(|function| {
            sources.iter().find(|(_, source)| source.contains(&function)).map(|(name, _)| name)
        });
        let serving = serving.map(|name| format!("`{name}`")).unwrap_or_default();
        assert_eq!(file, serving, "the file of {call}");
    }
}

/// Functions of system calls in a source: the call, and the first line of its documentation.
fn documented_calls(source: &str) -> Vec<(&str, &str)> {
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let calls = lines.iter().enumerate().filter_map(|(at, line)| {
        let (_, call) = line.split_once("fn sys_").filter(|_| !line.starts_with("//"))?;
        let (call, _) = call.split_once('(')?;
        let above = lines[..at].iter().rev().skip_while(|line| line.starts_with('#'));
        let first = above.take_while(|line| line.starts_with("///")).last();
        Some((call, first.and_then(|line| line.strip_prefix("/// ")).unwrap_or_default()))
    });
    calls.collect()
}

#[test]
fn the_documentation_of_a_call_begins_with_its_manual_page_and_its_differences() {
    // A note of the table is a difference.
    let noted: BTreeSet<_> = DOCUMENT
        .lines()
        .filter_map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let [_, _, call, _, _, note, _] = cells[..] else { return None };
            (!note.is_empty()).then(|| call.trim_matches('`'))
        })
        .collect();
    let (mut count, mut wrong) = (0, Vec::new());
    for (file, source) in sources() {
        for (call, document) in documented_calls(&source) {
            let page = format!("`{call}(2)`");
            let rest = document.strip_prefix(&page).unwrap_or_default();
            let is_same = rest == ", as on Linux.";
            if !is_same && !rest.starts_with(": ") || is_same && noted.contains(call) {
                wrong.push(format!("{file}: sys_{call}: {document:?}"));
            }
            count += 1;
        }
    }
    assert_eq!(count, arms().len(), "functions of system calls");
    assert!(
        wrong.is_empty(),
        "begin with \"`read(2)`: \" and the differences from Linux, or write \"`read(2)`, as on \
         Linux.\" where the table has no note:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn a_call_without_its_manual_page_is_found() {
    for (source, first) in [
        ("fn sys_a(", ""),
        ("/// `a(2)`: b.\n/// c.\n#[inline]\npub fn sys_a(", "`a(2)`: b."),
        ("/// `a(2)`: b.\n\nfn sys_a(", ""),
        ("/// About it.\n/// `a(2)`: b.\nfn sys_a(", "About it."),
    ] {
        assert_eq!(documented_calls(source), [("a", first)], "{source}");
    }
    assert_eq!(documented_calls("// fn sys_a("), []);
}
