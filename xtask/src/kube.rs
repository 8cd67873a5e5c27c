//! `cargo xtask kube`: builds and tests the Kubernetes controller in `kubernetes/`, outside of the
//! workspace.
//!
//! Unit tests use an API of their own. Further ones need a real kube-apiserver with etcd, which are
//! built from the Go module proxy by `kubernetes/tools`, once. That takes a quarter of an hour or
//! more of two cores, so it is no part of `test`. Without Go, or without the proxy, those tests are
//! skipped, loudly.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, find, run};
use crate::{guests, host};

/// A program of the tests, its package, and where they look for it.
const TOOLS: [(&str, &str, &str); 3] = [
    ("etcd", "go.etcd.io/etcd/server/v3", "AFRESH_TEST_ETCD"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", "AFRESH_TEST_KUBE_APISERVER"),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl", "AFRESH_TEST_KUBECTL"),
];
/// The version of Kubernetes in `kubernetes/tools/go.mod`.
const VERSION: &str = "v1.34.4";
const SERVER: &str = "AFRESH_TEST_AFRESH";
const GUEST: &str = "AFRESH_TEST_QUICKJS";

/// Where a program is built.
fn file(program: &str) -> PathBuf {
    host::target_folder().join("tools").join(format!("kubernetes-{VERSION}")).join(program)
}

/// Builds the missing programs.
fn build(folder: &Path) -> Result<()> {
    let cache = host::target_folder().join("tools/kubernetes-cache");
    for (program, package, variable) in TOOLS {
        // A caller that sets the variable brings another one.
        if std::env::var_os(variable).is_some() || file(program).is_file() {
            continue;
        }
        if find("go").is_none() {
            bail!("there is no Go to build {program} with");
        }
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(file(program)).arg(package);
        go.env("GOMODCACHE", cache.join("modules")).env("GOCACHE", cache.join("objects"));
        // Go protects its modules even from being removed.
        go.env("GOFLAGS", "-modcacherw").current_dir(folder.join("tools"));
        run(&mut go)?;
    }
    if cache.exists() {
        std::fs::remove_dir_all(&cache)
            .with_context(|| format!("cannot remove {}", cache.display()))?;
    }
    Ok(())
}

pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let folder = host::repository().join("kubernetes");
    let target = host::target_folder().join("kube");
    let within = |arguments: &[&str]| {
        let mut command = cargo();
        command.current_dir(&folder).args(arguments).env("CARGO_TARGET_DIR", &target);
        command
    };
    host::rust_component("rustfmt", "fmt")?;
    run(&mut within(&["fmt", "--check"]))?;
    host::rust_component("clippy", "clippy")?;
    run(&mut within(&["clippy", "--locked", "--all-targets", "--", "-D", "warnings"]))?;
    if let Err(error) = build(&folder) {
        println!("SKIPPED: tests with kube-apiserver {VERSION}: {error:#}");
    }
    let mut test = within(&["test", "--locked", "--", "--show-output"]);
    for (program, _, variable) in TOOLS {
        if std::env::var_os(variable).is_none() {
            test.env(variable, file(program));
        }
    }
    if std::env::var_os(SERVER).is_none() {
        let mut build = cargo();
        build.current_dir(host::repository()).args(["build", "--locked", "-p", "afresh-cli"]);
        run(&mut build)?;
        test.env(SERVER, host::target_folder().join("debug/afresh"));
    }
    if std::env::var_os(GUEST).is_none() {
        guests::main(&["--only".to_owned(), "quickjs".to_owned()])?;
        test.env(GUEST, host::target_folder().join("guests/quickjs.wasm"));
    }
    run(test.args(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_module() {
        let module = host::repository().join("kubernetes/tools/go.mod");
        let text = std::fs::read_to_string(module).expect("go.mod is readable");
        assert!(text.contains(&format!("k8s.io/kubernetes {VERSION}\n")), "{VERSION}");
    }
}
