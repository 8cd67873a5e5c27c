//! Counts of the E2B suites, and the page that lists them.
//!
//! A test without a reason in [`REASONS`] fails the command. A reason is either outside, as R or
//! the internet, or a limitation of the server. The page has both shares.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Suite;
use crate::host;

/// The line before the part of the page that is replaced.
const MARK: &str = "<!-- written by `cargo xtask e2b-suite` -->\n";

/// The reasons that are outside: services on the internet, and languages that the host lacks.
const OUTSIDE: [&str; 4] = [HTTPBIN, R, JAVA, CLIENT_VERSION];
const HTTPBIN: &str = "the template `httpbin`, whose image is on the internet";
const R: &str = "R is not run";
const JAVA: &str = "Java is not run";
const UBUNTU: &str = "the image `ubuntu:22.04`, which is not fetched, and has no Python";
const CLIENT_VERSION: &str = "the test expects another version of the client";

/// Why tests whose name contains the text do not pass. The first that fits counts.
const REASONS: [(&str, &str); 34] = [
    ("connect_normalizes_unset_tokens", CLIENT_VERSION),
    ("file_symlink", CLIENT_VERSION),
    ("test_build.py", UBUNTU),
    ("test_background_build.py", UBUNTU),
    ("template_sync/methods", UBUNTU),
    ("template_async/methods", UBUNTU),
    ("build.test.ts::", UBUNTU),
    ("backgroundBuild.test.ts::", UBUNTU),
    ("template/methods/", UBUNTU),
    ("firewall_transform", HTTPBIN),
    ("mcp_gateway", "the service `mcp`"),
    ("scoped_env_vars", "`sudo` and the user `root` in the sandbox"),
    ("set_via_xattrs", "extended attributes in the sandbox"),
    ("test_r.py", R),
    ("test_r_kernel", R),
    ("cwd_r", R),
    ("test_java.py", JAVA),
    ("java_kernel", JAVA),
    ("cwd_java", JAVA),
    ("systemd.py", "services of the E2B machine"),
    ("firewall transform", HTTPBIN),
    ("MCP gateway", "the service `mcp`"),
    ("xattrs is surfaced", "extended attributes in the sandbox"),
    ("as root", "`sudo` and the user `root` in the sandbox"),
    ("command scoped env vars", "`sudo` and the user `root` in the sandbox"),
    ("test_pty_connect.py", "the test waits 0.3 s for a new shell, which a busy host exceeds"),
    (
        "completed long running",
        "time stands still in a paused sandbox, and the test allows no delay of its resumption",
    ),
    ("cwd java", JAVA),
    ("env_vars/java.test.ts", JAVA),
    ("java kernel", JAVA),
    ("cwd r", R),
    ("env_vars/r.test.ts", R),
    ("r kernel", R),
    ("systemd.test.ts", "services of the E2B machine"),
];

/// How the tests of a suite went, by their names.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) skipped: usize,
    pub(super) failed: Vec<String>,
}

impl Counts {
    /// Reads the summary that pytest prints with `-rA`.
    pub(super) fn read(text: &str) -> Self {
        let mut all: BTreeMap<String, bool> = BTreeMap::new();
        let mut skipped = 0;
        for line in text.lines() {
            let Some((how, rest)) = line.split_once(' ') else { continue };
            let name = rest.split(" - ").next().unwrap_or_default().trim().to_owned();
            match how {
                "PASSED" | "XPASS" | "XFAIL" if name.contains("::") => {
                    all.entry(name).or_insert(true);
                }
                // A test that passes and then cannot be cleaned up counts as failed.
                "FAILED" | "ERROR" if name.contains("::") => {
                    all.insert(name, false);
                }
                "SKIPPED" => {
                    let count = rest.trim_start_matches('[').split(']').next();
                    skipped += count.and_then(|count| count.parse().ok()).unwrap_or(1);
                }
                _ => {}
            }
        }
        let failed = all.iter().filter(|(_, passed)| !**passed).map(|(name, _)| name.clone());
        let failed: Vec<String> = failed.collect();
        Self { passed: all.len() - failed.len(), skipped, failed }
    }

    /// Adds those of another run of the suite.
    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.skipped += other.skipped;
        self.failed.extend(other.failed);
    }

    /// Reads the report that vitest writes as JSON.
    pub(super) fn read_report(text: &str) -> Result<Self> {
        let report: Value = serde_json::from_str(text).context("vitest wrote no report")?;
        let mut counts = Self::default();
        // A file that both uses the server and mocks it runs twice.
        let mut all: BTreeMap<String, bool> = BTreeMap::new();
        for file in report["testResults"].as_array().into_iter().flatten() {
            let path = file["name"].as_str().unwrap_or_default();
            let path = path.rsplit_once("/tests/").map_or(path, |(_, path)| path);
            let tests = file["assertionResults"].as_array().map_or(&[][..], Vec::as_slice);
            if tests.is_empty() && file["status"] == "failed" {
                all.entry(format!("{path}::all tests of the file")).or_default();
            }
            // Tests of one name have their order behind it.
            let mut seen: BTreeMap<String, usize> = BTreeMap::new();
            for test in tests {
                let name = format!("{path}::{}", test["fullName"].as_str().unwrap_or_default());
                let count = seen.entry(name.clone()).or_default();
                let name = if *count == 0 { name } else { format!("{name}[{count}") };
                *count += 1;
                match test["status"].as_str() {
                    Some("passed") => drop(all.insert(name, true)),
                    Some("failed") => drop(all.entry(name).or_default()),
                    _ => counts.skipped += 1,
                }
            }
        }
        counts.passed = all.values().filter(|passed| **passed).count();
        counts.failed =
            all.into_iter().filter(|(_, passed)| !passed).map(|(name, _)| name).collect();
        Ok(counts)
    }
}

pub(super) fn reason(test: &str) -> Option<&'static str> {
    REASONS.iter().find(|(part, _)| test.contains(part)).map(|(_, why)| *why)
}

/// Replaces the counts in the page.
pub(super) fn write(results: &[(&Suite, Counts)]) -> Result<()> {
    let page = host::repository().join("docs/e2b-suite.md");
    let old = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    let (head, _) = old.split_once(MARK).context("the page has no mark")?;
    fs::write(&page, format!("{head}{MARK}\n{}", tables(results)))
        .with_context(|| page.display().to_string())
}

fn tables(results: &[(&Suite, Counts)]) -> String {
    let mut text = String::from(
        "| suite | passed | of | without those that need something outside | skipped |\n|---|---|---|---|---|\n",
    );
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (suite, counts) in results {
        let Counts { passed, skipped, failed } = counts;
        let is_outside = |test: &&String| reason(test).is_some_and(|why| OUTSIDE.contains(&why));
        let all = passed + failed.len();
        let inside = all - failed.iter().filter(is_outside).count();
        let share = |of: usize| format!("{of} ({} %)", passed * 100 / of.max(1));
        let (of_all, of_inside) = (share(all), share(inside));
        let name = suite.name;
        let _ = writeln!(text, "| {name} | {passed} | {of_all} | {of_inside} | {skipped} |");
        for test in &counts.failed {
            reasons.entry(reason(test).unwrap_or("not known")).or_default().push(test);
        }
    }
    text.push_str("\n| reason | outside | tests |\n|---|---|---|\n");
    for (why, tests) in reasons {
        let outside = if OUTSIDE.contains(&why) { "yes" } else { "no" };
        let mut names: Vec<&str> = tests.iter().map(|test| short(test)).collect();
        names.sort_unstable();
        names.dedup();
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| {why} | {outside} | {} |", names.join(", "));
    }
    text
}

/// The name of a test without its file and its parameters.
fn short(test: &str) -> &str {
    let name = test.rsplit("::").next().unwrap_or(test);
    name.split('[').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::super::SUITES;
    use super::*;

    #[test]
    fn the_report_of_vitest_is_read() {
        let text = r#"{"testResults": [
            {"name": "/x/tests/a.test.ts", "status": "failed", "assertionResults": [
                {"status": "passed", "fullName": "one"}, {"status": "failed", "fullName": "b two"},
                {"status": "skipped", "fullName": "three"}, {"status": "passed", "fullName": "one"}]},
            {"name": "/x/tests/a.test.ts", "status": "failed", "assertionResults": [
                {"status": "failed", "fullName": "one"}]},
            {"name": "/x/tests/b.test.ts", "status": "failed", "assertionResults": []}]}"#;
        let counts = Counts::read_report(text).unwrap();
        assert_eq!((counts.passed, counts.skipped), (2, 1));
        assert_eq!(counts.failed, ["a.test.ts::b two", "b.test.ts::all tests of the file"]);
    }

    #[test]
    fn the_summary_of_pytest_is_read() {
        let text = "....F\nPASSED tests/a.py::one\nPASSED tests/a.py::two[x - y]\nFAILED tests/test_r.py::three - boom\n\
                    ERROR tests/a.py::two[x - y]\nSKIPPED [3] tests/b.py:7: no reason\n1 failed in 3 s\n";
        let counts = Counts::read(text);
        assert_eq!((counts.passed, counts.skipped), (1, 3));
        assert_eq!(counts.failed, ["tests/a.py::two[x", "tests/test_r.py::three"]);
        assert_eq!(
            (reason("tests/test_r.py::three"), reason("other")),
            (Some("R is not run"), None)
        );
        assert_eq!(short("tests/a.py::two[x"), "two");
        let page = tables(&[(&SUITES[0], counts)]);
        assert!(page.contains("| sandboxes | 1 | 3 (33 %) | 2 (50 %) | 3 |"), "{page}");
        assert!(page.contains("| R is not run | yes | `three` |"), "{page}");
    }
}
