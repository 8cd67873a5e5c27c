//! Extism's kernel, the module that its plug-ins run over: out of the sources of the crate
//! `extism`, in one version and of one digest. It becomes `target/guests/extism-kernel.wasm`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::output;
use crate::host;
use crate::rivals::crate_sources;

const VERSION: &str = "1.41.0";
const DIGEST: &str = "d1389b31abecf23eec65b4430d86f99f736aeb05c40948dbbe2f88cb17815803";

/// Has the kernel where tests look for it. Cargo fetches and checks the crate, and builds nothing.
pub(crate) fn kernel() -> Result<()> {
    let file = host::target_folder().join("guests/extism-kernel.wasm");
    if file.is_file() && digest(&file)? == DIGEST {
        return Ok(());
    }
    let sources = crate_sources(("extism", VERSION))?;
    let found = sources.join("src/extism-runtime.wasm");
    if digest(&found)? != DIGEST {
        bail!(
            "{} is another kernel than the one that is expected: sha256 {DIGEST}",
            found.display()
        );
    }
    let fresh = file.with_extension("wasm.new");
    fs::create_dir_all(fresh.parent().context("the target folder has a parent")?)?;
    fs::copy(&found, &fresh).with_context(|| format!("cannot copy {}", found.display()))?;
    fs::rename(&fresh, &file).with_context(|| format!("cannot write {}", file.display()))
}

fn digest(file: &PathBuf) -> Result<String> {
    let said = output(Command::new("sha256sum").arg("--binary").arg(file))?;
    let digest = said.split_whitespace().next().context("sha256sum says nothing")?;
    Ok(digest.trim_start_matches('\\').to_owned())
}
