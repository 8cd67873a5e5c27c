//! The reasons why tests do not pass: a table of reasons from a list that people write, and from
//! the messages of tests that no reason names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Result, bail};

/// The reason of each test, by its name.
#[derive(Debug, Default)]
pub(super) struct Reasons<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Reasons<'a> {
    /// Reads a list: a line for each reason, and below it indented lines with names of tests. Lines
    /// that begin with `#` are comments.
    pub(super) fn parse(text: &'a str) -> Result<Self> {
        let (mut now, mut reasons) = (None, BTreeMap::new());
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            if !line.starts_with(' ') {
                now = Some(line.trim());
                continue;
            }
            let Some(reason) = now else { bail!("the tests of {line:?} have no reason") };
            for name in line.split_whitespace() {
                if let Some(other) = reasons.insert(name, reason) {
                    bail!("{name} has two reasons: {other:?} and {reason:?}");
                }
            }
        }
        Ok(Self(reasons))
    }

    /// A table of the reasons for `failed`, names of tests with their messages, the most frequent
    /// first. A test without a reason has its message.
    pub(super) fn table<'b>(&self, failed: impl Iterator<Item = (&'b str, &'b str)>) -> String
    where
        'a: 'b,
    {
        let mut by_reason: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (name, message) in failed {
            let reason = self.0.get(name).map(|reason| (*reason).to_owned());
            let reason = reason.unwrap_or_else(|| format!("Message: `{}`", plain(message)));
            by_reason.entry(reason).or_default().push(name);
        }
        let mut rows: Vec<_> = by_reason.into_iter().collect();
        rows.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
        let mut text = "| reason | cases | names |\n|---|---|---|\n".to_owned();
        for (reason, names) in rows {
            let _ = writeln!(text, "| {reason} | {} | {} |", names.len(), names.join(", "));
        }
        text
    }

    /// The names in the list that `is_failed` does not know: their rows are out of date.
    pub(super) fn outdated(&self, is_failed: impl Fn(&str) -> bool) -> Vec<&'a str> {
        self.0.keys().filter(|name| !is_failed(name)).copied().collect()
    }
}

/// A message that can be code in a cell of a table.
fn plain(message: &str) -> String {
    message.replace(['`', '|'], "'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_without_a_reason_has_its_message() {
        let list = "# comment\nNo ptrace.\n  ptrace01 ptrace02\n\nOne processor.\n  affinity01\n";
        let reasons = Reasons::parse(list).expect("a list");
        let failed =
            [("affinity01", "x"), ("ptrace01", "a"), ("ptrace02", "b"), ("new01", "a `b`")];
        assert_eq!(
            reasons.table(failed.into_iter()),
            "| reason | cases | names |\n|---|---|---|\n| No ptrace. | 2 | ptrace01, ptrace02 |\n\
             | Message: `a 'b'` | 1 | new01 |\n| One processor. | 1 | affinity01 |\n"
        );
        assert_eq!(reasons.outdated(|name| name.starts_with("ptrace")), ["affinity01"]);
    }

    #[test]
    fn a_list_without_order_is_refused() {
        assert!(Reasons::parse("  ptrace01\n").is_err());
        assert!(Reasons::parse("One.\n  a b\nTwo.\n  b\n").is_err());
    }
}
