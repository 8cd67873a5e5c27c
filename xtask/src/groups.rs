//! Groups of tests, those that guard most first.
//!
//! Each is built before the next, so a build that a limit cuts off leaves the first groups to run.
//! Cargo selects the features of dependencies by packages, so a build of a few packages would
//! compile most dependencies once more. A group selects targets of the whole workspace instead.

use std::time::Instant;

use anyhow::Result;

use crate::units::{self, Units};

/// Tests that are built and run together.
#[derive(Debug)]
struct Group {
    name: &'static str,
    /// The targets, as cargo selects them; without any, all targets and documentation tests.
    targets: &'static [&'static str],
}

const GROUPS: [Group; 3] = [
    Group {
        name: "the suites of memory, pagers, stores, guests and the server",
        targets: &["--test", "suite"],
    },
    // Without `--lib`, which also selects libraries that opt out of tests.
    Group { name: "other tests of interfaces", targets: &["--test", "*"] },
    Group { name: "unit and documentation tests", targets: &[] },
];

/// The groups that were built.
#[derive(Debug, Default)]
pub(crate) struct BuiltGroups {
    number: usize,
    /// Whether the deadline ended the build.
    pub(crate) is_cut: bool,
    /// All targets, if all groups were built.
    pub(crate) units: Option<Units>,
}

impl BuiltGroups {
    /// Builds all groups, or those that the time before the deadline is enough for.
    ///
    /// `arguments`: what follows `cargo`.
    pub(crate) fn build(&mut self, arguments: &[&str], deadline: Option<Instant>) -> Result<()> {
        for group in &GROUPS {
            let arguments = [arguments, group.targets].concat();
            let Some(units) = units::build(&arguments, deadline)? else {
                self.is_cut = true;
                break;
            };
            self.number += 1;
            self.units = group.targets.is_empty().then_some(units);
        }
        Ok(())
    }

    /// Arguments of cargo that select the built targets; `None` without a built group.
    pub(crate) fn targets(&self) -> Option<Vec<&'static str>> {
        let built = &GROUPS[..self.number];
        let last = built.last()?;
        if last.targets.is_empty() {
            return Some(Vec::new());
        }
        Some(built.iter().flat_map(|group| group.targets).copied().collect())
    }

    /// The names of the groups that the deadline left out.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &'static str> {
        GROUPS[self.number..].iter().filter(|_| self.is_cut).map(|group| group.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_the_built_groups_are_selected_and_the_others_are_named() {
        let built = |number| BuiltGroups { number, is_cut: true, units: None };
        assert_eq!(built(0).targets(), None);
        assert_eq!(built(1).targets(), Some(vec!["--test", "suite"]));
        assert_eq!(built(2).targets(), Some(vec!["--test", "suite", "--test", "*"]));
        assert_eq!(built(3).targets(), Some(Vec::new()));
        let missing: Vec<_> = built(1).missing().collect();
        assert_eq!(missing, ["other tests of interfaces", "unit and documentation tests"]);
        // Tests that do not compile are a failure, and not left out.
        assert_eq!(BuiltGroups::default().missing().count(), 0);
    }
}
