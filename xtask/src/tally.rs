//! Counts of a test run, read from the lines that `cargo test` prints.

use crate::test::{Steps, TESTS};

/// Lines kept of the output of failed tests.
const MAX_OUTPUT_LINES: usize = 400;

/// Lines kept of the message of one panic.
const MAX_PANIC_LINES: usize = 40;

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    ignored: u64,
    /// The different `SKIPPED:` lines.
    pub(crate) skips: Vec<String>,
    /// The number of all `SKIPPED:` lines.
    skipped: u64,
    /// Names of failed tests.
    pub(crate) failures: Vec<String>,
    /// Reports of test programs that a signal ended.
    pub(crate) signalled: Vec<String>,
    /// Names of tests that failed and passed when they were run again.
    pub(crate) flaky: Vec<String>,
    /// The output of failed tests.
    pub(crate) output: Vec<String>,
    /// The messages of panics in it, without backtraces.
    pub(crate) panics: Vec<String>,
    in_panic: bool,
    /// Lines of the present message.
    panic_lines: usize,
    section: Section,
}

/// A test program repeats the output of its tests at its end: first of passed ones, then of failed
/// ones.
#[derive(Debug, Default, PartialEq, Eq)]
enum Section {
    #[default]
    Other,
    Successes,
    Failures,
}

impl Tally {
    /// Counts one line.
    pub(crate) fn count(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            // "ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s"
            let (_, counts) = counts.split_once(". ").unwrap_or(("", counts));
            for part in counts.split(';') {
                let Some((number, what)) = part.trim().split_once(' ') else { continue };
                let Ok(number) = number.parse::<u64>() else { continue };
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    _ => {}
                }
            }
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        } else if line.trim_start().starts_with("SKIPPED:") {
            self.skipped += 1;
            if !self.skips.iter().any(|known| known == line.trim()) {
                self.skips.push(line.trim().to_owned());
            }
        }
    }

    /// Counts one line, and returns whether to show it.
    pub(crate) fn read(&mut self, line: &str) -> bool {
        self.count(line);
        match line {
            "successes:" => self.section = Section::Successes,
            "failures:" => self.section = Section::Failures,
            _ if line.starts_with("test result: ") => self.section = Section::Other,
            _ => {}
        }
        if self.section == Section::Failures && self.output.len() < MAX_OUTPUT_LINES {
            self.output.push(line.to_owned());
            self.read_panic(line);
        }
        self.section != Section::Successes || line.trim_start().starts_with("SKIPPED:")
    }

    fn read_panic(&mut self, line: &str) {
        if line.starts_with("thread '") && line.contains(" panicked at ") {
            self.in_panic = true;
            self.panic_lines = 0;
        } else if ["stack backtrace:", "failures:"].contains(&line)
            || line.starts_with("note: ")
            || line.starts_with("---- ")
        {
            self.in_panic = false;
        }
        if self.in_panic && !line.is_empty() && self.panic_lines < MAX_PANIC_LINES {
            self.panic_lines += 1;
            self.panics.push(line.to_owned());
        }
    }

    /// Adds a second run that passed: of the failed tests, or of all if a signal ended a
    /// test program. Returns whether it had every failed test. These are flaky then, and no longer
    /// failed.
    pub(crate) fn add_second_run(&mut self, second: &Self) -> bool {
        let failed = self.failures.len() as u64;
        let is_complete = failed == self.failed
            && (failed > 0 || !self.signalled.is_empty())
            && second.failed == 0
            && second.failures.is_empty()
            && second.passed >= failed.max(1);
        if is_complete {
            self.failed = 0;
            self.passed += failed;
            self.flaky.append(&mut self.failures);
            if !self.signalled.is_empty() {
                self.passed = second.passed;
                self.flaky.append(&mut self.signalled);
            }
        }
        is_complete
    }

    /// Adds failed steps that no result line counts: other steps, and test programs that a signal
    /// ended.
    pub(crate) fn count_steps(&mut self, steps: &Steps) {
        let counted = self.failed > 0;
        let uncounted = |(name, _, error): &&(&str, f64, Option<String>)| {
            error.is_some() && !(*name == TESTS && counted)
        };
        self.failed += steps.done.iter().filter(uncounted).count() as u64;
    }

    /// Prints and counts a `SKIPPED:` line of this program.
    pub(crate) fn skip(&mut self, line: &str) {
        println!("{line}");
        self.count(line);
    }

    /// The last line of a run.
    pub(crate) fn line(&self) -> String {
        let skipped = self.ignored + self.skipped;
        format!("{} passed, {} failed, {skipped} skipped", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_summed_and_skips_counted_and_failures_named() {
        let mut tally = Tally::default();
        for line in [
            "running 2 tests",
            "test slot::tests::a_reset_brings_back ... ok",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test it_holds ... FAILED",
            "---- it_needs_kvm stdout ----",
            "SKIPPED: /dev/kvm is missing",
            "SKIPPED: /dev/kvm is missing",
            "SKIPPED: uffd: forbidden",
            "this line only mentions SKIPPED: x",
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.00s",
        ] {
            tally.count(line);
        }
        assert_eq!(tally.line(), "15 passed, 1 failed, 4 skipped");
        assert_eq!(tally.skips, ["SKIPPED: /dev/kvm is missing", "SKIPPED: uffd: forbidden"]);
        assert_eq!(tally.failures, ["it_holds"]);
    }

    #[test]
    fn output_of_passing_tests_is_hidden_and_of_failing_ones_kept() {
        let mut tally = Tally::default();
        let lines = [
            "running 3 tests",
            "test one ... ok",
            "test two ... FAILED",
            "successes:",
            "---- one stdout ----",
            "SKIPPED: /dev/kvm is missing",
            "seed 1",
            "failures:",
            "---- two stdout ----",
            "it is 3",
            "thread 'two' (7) panicked at tests/two.rs:3:5:",
            "",
            "called `Result::unwrap()` on an `Err` value: Closed",
            "stack backtrace:",
            "   0: rust_begin_unwind",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0s",
        ];
        let shown: Vec<&str> = lines.into_iter().filter(|line| tally.read(line)).collect();
        let mut expected = lines.to_vec();
        expected.retain(|line| !["successes:", "---- one stdout ----", "seed 1"].contains(line));
        assert_eq!(shown, expected);
        assert_eq!(tally.output, lines[7..15]);
        assert_eq!(tally.panics, [lines[10], lines[12]]);
        assert_eq!(tally.line(), "1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_failed_test_that_passes_alone_is_flaky_and_any_other_stays_failed() {
        let failed = |names: &[&str], count| Tally {
            passed: 7,
            failed: count,
            failures: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Tally::default()
        };
        let second = |passed, failed| Tally { passed, failed, ..Tally::default() };
        let mut tally = failed(&["a", "b"], 2);
        assert!(tally.add_second_run(&second(2, 0)));
        assert_eq!(
            (tally.line().as_str(), tally.flaky.len()),
            ("9 passed, 0 failed, 0 skipped", 2)
        );
        assert!(!failed(&["a", "b"], 2).add_second_run(&second(1, 1)), "one failed again");
        assert!(!failed(&["a", "b"], 2).add_second_run(&second(1, 0)), "one was not run");
        assert!(!failed(&[], 0).add_second_run(&second(9, 0)), "nothing failed");
        assert!(!failed(&["a"], 2).add_second_run(&second(2, 0)), "a failure without a name");
    }

    #[test]
    fn a_test_program_that_a_signal_ended_is_flaky_if_all_tests_pass_later() {
        let mut tally = Tally { signalled: vec!["suite: SIGKILL".to_owned()], ..Tally::default() };
        tally.read("test result: ok. 2 passed; 0 failed");
        let second = |passed, failed| Tally { passed, failed, ..Tally::default() };
        assert!(!tally.add_second_run(&second(2, 1)));
        assert!(tally.add_second_run(&second(3, 0)));
        assert_eq!(tally.line(), "3 passed, 0 failed, 0 skipped");
        assert_eq!(tally.flaky, ["suite: SIGKILL"]);
    }
}
