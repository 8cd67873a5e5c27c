//! The check of `deploy`: alerts and the dashboard against the documents.
//!
//! Promises: each metric that an alert or a panel names is in `docs/reference/metrics.md`, and each
//! alert has a section in `docs/runbooks.md`. `promtool` checks the expressions where it is
//! installed.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{find, run};
use crate::host::repository;

const RULES: &str = "deploy/prometheus/afresh.rules.yml";
const DASHBOARD: &str = "deploy/grafana/afresh.json";
const METRICS: &str = "docs/reference/metrics.md";
const RUNBOOKS: &str = "docs/runbooks.md";

/// Suffixes of the series of a histogram in the exposition format.
const SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

pub(crate) fn check() -> Result<()> {
    let read = |path: &str| {
        std::fs::read_to_string(repository().join(path))
            .with_context(|| format!("cannot read {path}"))
    };
    let faults = faults(&read(RULES)?, &read(DASHBOARD)?, &read(METRICS)?, &read(RUNBOOKS)?);
    if !faults.is_empty() {
        bail!("{} faults in deploy:\n    {}", faults.len(), faults.join("\n    "));
    }
    match find("promtool") {
        Some(promtool) => {
            run(Command::new(promtool).args(["check", "rules", RULES]).current_dir(repository()))
        }
        None => {
            println!("(promtool is not installed: the expressions of {RULES} are not parsed)");
            Ok(())
        }
    }
}

fn faults(rules: &str, dashboard: &str, metrics: &str, runbooks: &str) -> Vec<String> {
    let known = names(metrics);
    let mut faults = Vec::new();
    for (file, text) in [(RULES, rules), (DASHBOARD, dashboard)] {
        for name in names(text) {
            let base = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
            if !known.contains(name) && !base.is_some_and(|base| known.contains(base)) {
                faults.push(format!("{file} names {name}, which {METRICS} does not"));
            }
        }
    }
    let alerts: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let sections: BTreeSet<&str> =
        runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    for alert in alerts.difference(&sections) {
        faults.push(format!("{RUNBOOKS} has no section {alert}"));
    }
    for section in sections.difference(&alerts) {
        faults.push(format!("{RUNBOOKS} has a section {section}, and {RULES} no such alert"));
    }
    faults
}

/// The metrics that a text names.
fn names(text: &str) -> BTreeSet<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !word(c)).filter(|name| name.starts_with("afresh_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_metric_and_a_missing_runbook_are_faults() {
        let metrics = "`afresh_a_total`, `afresh_b_seconds`";
        let rules = "- alert: One\n  expr: rate(afresh_a_total[5m]) > afresh_b_seconds_sum\n";
        assert!(faults(rules, "", metrics, "## One\n").is_empty());
        let found = faults(rules, "{\"expr\": \"afresh_c\"}", metrics, "## Two\n");
        assert_eq!(found.len(), 3, "{found:?}");
        for wanted in ["afresh_c", "no section One", "section Two"] {
            assert!(found.iter().any(|fault| fault.contains(wanted)), "{found:?}");
        }
    }
}
