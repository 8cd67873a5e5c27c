//! The check of `deploy`: alerts and the dashboard against the documents, and what strangers may
//! send to the controller of Kubernetes.
//!
//! Promises: each metric that an alert or a panel names is in `docs/reference/metrics.md`, and each
//! alert has a section in `docs/runbooks.md`. `promtool` checks the expressions where it is
//! installed or apt has it, and `systemd-analyze` the units. Each text, list and map of a
//! definition of agent-sandbox has a limit, and the controller has no right to read Secrets. `cargo
//! xtask kube` tests both at a real API.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{find, run};
use crate::host::{repository, target_folder};

const RULES: &str = "deploy/prometheus/afresh.rules.yml";
const DASHBOARD: &str = "deploy/grafana/afresh.json";
const METRICS: &str = "docs/reference/metrics.md";
const RUNBOOKS: &str = "docs/runbooks.md";

/// Definitions of agent-sandbox.
const DEFINITIONS: &str = "deploy/agent-sandbox";
/// Rights of its controller.
const RIGHTS: &str = "deploy/helm/afresh/files";

/// The command that downloads the package with `promtool`.
const DOWNLOAD: [&str; 4] = ["-q", "-o", "APT::Sandbox::User=root", "download"];
/// Its name.
const PROMETHEUS: &str = "prometheus";

/// Units of systemd.
const UNITS: &str = "deploy/systemd";
/// The folder of `target` with the units as they are checked.
const CHECKED_UNITS: &str = "systemd-units";
/// The program that the units start.
const PROGRAM: &str = "/usr/bin/afresh";

/// Suffixes of the series of a histogram in the exposition format.
const SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

pub(crate) fn check() -> Result<()> {
    let read = |path: &str| {
        std::fs::read_to_string(repository().join(path))
            .with_context(|| format!("cannot read {path}"))
    };
    let mut faults = faults(&read(RULES)?, &read(DASHBOARD)?, &read(METRICS)?, &read(RUNBOOKS)?);
    faults.extend(controller_faults()?);
    if !faults.is_empty() {
        bail!("{} faults in deploy:\n    {}", faults.len(), faults.join("\n    "));
    }
    check_units()?;
    match promtool() {
        Ok(promtool) => {
            run(Command::new(promtool).args(["check", "rules", RULES]).current_dir(repository()))
        }
        Err(error) => {
            println!("SKIPPED: the expressions of {RULES}: {error:#}");
            Ok(())
        }
    }
}

/// `promtool` of the host, or that of Debian's package, which is unpacked and not installed: it has
/// a server that would start.
fn promtool() -> Result<PathBuf> {
    if let Some(installed) = find("promtool") {
        return Ok(installed);
    }
    let folder = target_folder().join("tools").join(PROMETHEUS);
    let program = folder.join("usr/bin/promtool");
    if program.exists() {
        return Ok(program);
    }
    std::fs::create_dir_all(&folder)?;
    let download =
        || run(Command::new("apt-get").args(DOWNLOAD).arg(PROMETHEUS).current_dir(&folder));
    download().context("promtool is not installed, and apt has no package prometheus")?;
    let mut packages = std::fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_package = |path: &PathBuf| path.extension().is_some_and(|end| end == "deb");
    let package = packages.find(is_package).context("apt downloaded nothing")?;
    run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&folder))?;
    std::fs::remove_file(package)?;
    Ok(program)
}

/// Checks the units with systemd's own parser, for a machine called `vm`.
fn check_units() -> Result<()> {
    let Some(analyze) = find("systemd-analyze") else {
        println!("(systemd-analyze is not installed: the units of {UNITS} are not parsed)");
        return Ok(());
    };
    // It refuses a program that does not exist, such as that of a package that is not installed.
    let present = std::env::current_exe()?.display().to_string();
    let folder = repository().join("target").join(CHECKED_UNITS);
    std::fs::create_dir_all(&folder)?;
    let mut verify = Command::new(analyze);
    verify.args(["verify", "--man=no"]);
    for path in files(UNITS)? {
        let unit = std::fs::read_to_string(repository().join(&path))?.replace(PROGRAM, &present);
        let name = path.rsplit('/').next().unwrap_or(&path).replace('@', "@vm");
        std::fs::write(folder.join(&name), unit)?;
        verify.arg(folder.join(name));
    }
    let output = verify.output().context("systemd-analyze verify")?;
    let faults = String::from_utf8_lossy(&output.stderr);
    // An unknown key is a warning only, and the unit would do without it.
    if !output.status.success() || faults.contains(CHECKED_UNITS) {
        bail!("faults in the units of {UNITS}:\n{faults}");
    }
    Ok(())
}

/// Faults of the definitions of agent-sandbox, and of the rights of its controller.
fn controller_faults() -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for path in files(DEFINITIONS)? {
        let unbounded = unbounded(&std::fs::read_to_string(repository().join(&path))?);
        faults.extend(unbounded.into_iter().map(|line| format!("{path}:{line} has no limit")));
    }
    for path in files(RIGHTS)? {
        let rights = std::fs::read_to_string(repository().join(&path))?;
        faults.extend(excessive(&rights).into_iter().map(|why| format!("{path}: {why}")));
    }
    Ok(faults)
}

/// The paths of the files in a folder, in order.
fn files(folder: &str) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    let entries = std::fs::read_dir(repository().join(folder))
        .with_context(|| format!("cannot read {folder}"))?;
    for entry in entries {
        paths.push(format!("{folder}/{}", entry?.file_name().to_string_lossy()));
    }
    paths.sort();
    Ok(paths)
}

/// Lines of a schema with a type that takes any amount: a text, a list, or a map with any keys.
fn unbounded(definition: &str) -> Vec<usize> {
    let lines: Vec<&str> = definition.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    // The keys of the object with a line: its block up to the next line further out.
    let block = |at: usize| {
        let depth = indent(lines[at]);
        let inside = |line: &&&str| indent(line) >= depth;
        let before = lines[..at].iter().rev().take_while(inside);
        let all = before.chain(lines[at..].iter().take_while(inside));
        let own = all.filter(|line| indent(line) == depth);
        own.map(|line| line.trim()).collect::<Vec<_>>().join(", ")
    };
    let limits = |text: &str| {
        let has = |word: &str| text.contains(word);
        let is_text = has("type: string") && !has("jsonPath");
        let is_map = has("additionalProperties:") || has("x-kubernetes-preserve-unknown-fields");
        (!is_text || has("maxLength:") || has("enum:") || has("format: date-time"))
            && (!has("type: array") || has("maxItems:"))
            && (!is_map || has("maxProperties:"))
    };
    let is_bounded = |at: &usize| {
        let line = lines[*at].trim();
        // Objects on one line, and then those over several.
        match line.split_once('{') {
            Some((name, object)) if !name.starts_with("additionalProperties") => limits(object),
            Some((_, object)) => limits(object) && limits(&block(*at)),
            None if line.starts_with("type: ") || line.starts_with("x-kubernetes-preserve") => {
                limits(&block(*at))
            }
            None => true,
        }
    };
    let faults = (0..lines.len()).filter(|at| !is_bounded(at));
    faults.map(|at| at + 1).collect()
}

/// Rights that the controller must not have.
fn excessive(rights: &str) -> Vec<String> {
    let rules = rights.split("- apiGroups:").skip(1);
    let field = |rule: &str, name: &str| {
        let line = rule.lines().find_map(|line| line.trim().strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let mut faults = Vec::new();
    for rule in rules {
        let (resources, verbs) = (field(rule, "resources:"), field(rule, "verbs:"));
        if resources.contains("secrets") && verbs != "[create]" {
            faults.push(format!("Secrets are for `create` alone, and not for {verbs}"));
        }
        if rule.contains('*') {
            faults.push(format!("a rule for {resources} has a wildcard"));
        }
        let is_named = rule.contains("resourceNames:") || verbs == "[create]";
        if (resources.contains("leases") || resources.contains("namespaces")) && !is_named {
            faults.push(format!("a rule for {resources} names none of them"));
        }
    }
    faults
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

    #[test]
    fn definitions_and_rights_of_the_controller_have_no_fault() {
        let faults = controller_faults().expect("the files are readable");
        assert!(faults.is_empty(), "{faults:?}");
    }

    #[test]
    fn a_text_list_or_map_without_a_limit_is_a_fault() {
        let bounded = "\
a:
  type: string
  maxLength: 5
b: { type: array, maxItems: 2 }
c:
  type: object
  maxProperties: 3
  additionalProperties: { type: string, maxLength: 4 }
d:
  type: array
  maxItems: 3
  items: { type: string, enum: [A] }
e: { type: string, jsonPath: .a }
f:
  type: object
  maxProperties: 3
  x-kubernetes-preserve-unknown-fields: true
";
        assert_eq!(unbounded(bounded), [0; 0]);
        let limits =
            ["maxLength: 5", "maxItems: 2", "maxProperties: 3", "maxLength: 4", "maxItems: 3"];
        for limit in limits {
            let without = bounded.replace(limit, "x: y");
            assert!(!unbounded(&without).is_empty(), "{limit}");
        }
    }

    #[test]
    fn a_right_to_read_secrets_is_a_fault() {
        let rule = |resources: &str, verbs: &str| {
            format!("- apiGroups: [\"\"]\n  resources: {resources}\n  verbs: {verbs}\n")
        };
        assert!(excessive(&rule("[secrets]", "[create]")).is_empty());
        for (resources, verbs) in [
            ("[secrets]", "[create, patch]"),
            ("[secrets]", "[get]"),
            ("[pods]", "['*']"),
            ("[leases]", "[update]"),
        ] {
            assert_eq!(excessive(&rule(resources, verbs)).len(), 1, "{resources} {verbs}");
        }
    }
}
