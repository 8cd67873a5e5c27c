//! The check of the Helm chart in `deploy/helm`.
//!
//! A Go program renders the chart by Helm's own engine, with the values that it demands and with
//! every value set, and decodes each object strictly as its type of Kubernetes. It is not a part of
//! `test`: its dependencies take minutes to compile.

use std::process::Command;

use anyhow::{Result, bail};

use crate::command::{find, run};
use crate::host::repository;

/// Files of values.
const VALUES: [&str; 3] = ["minimal.yaml", "agents.yaml", "all.yaml"];

pub(crate) fn main(arguments: &[String]) -> Result<()> {
    if let Some(first) = arguments.first() {
        bail!("`chart` takes no argument, and got `{first}`");
    }
    if find("go").is_none() {
        bail!("the check of the chart is a Go program: install Go");
    }
    let folder = repository().join("deploy/helm/check");
    let program = repository().join("target/tools/chart");
    run(Command::new("go").args(["build", "-o"]).arg(&program).arg(".").current_dir(&folder))?;
    for values in VALUES {
        run(Command::new(&program).arg("../afresh").arg(values).current_dir(&folder))?;
    }
    Ok(())
}
