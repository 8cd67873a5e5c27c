//! Keys: `afresh keygen` makes them, `--trust` and `--key` say which are demanded of snapshots, `--sign` and
//! `--seal` which are used to make them.

use std::path::PathBuf;
use std::process::ExitCode;

use afresh_pager::SaveWith;
use afresh_store::seal::{Access, PublicKey, SealKey, SigningKey};
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::output::{Format, say};
use crate::place::demand;

/// What every snapshot that is opened must have.
#[derive(Debug, Args)]
pub(crate) struct AccessArguments {
    /// Open only snapshots signed by a key in this file of public keys; may be given several times.
    #[arg(long, global = true, value_name = "FILE")]
    trust: Vec<PathBuf>,
    /// Open only snapshots sealed with the key in this file.
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
}

impl AccessArguments {
    /// Makes the demands, for the whole process.
    pub(crate) fn demand(&self) -> anyhow::Result<()> {
        let mut access = Access::new();
        if !self.trust.is_empty() {
            let mut trusted = Vec::new();
            for path in &self.trust {
                trusted.extend(PublicKey::from_file(path)?);
            }
            access = access.trusting(trusted);
        }
        if let Some(path) = &self.key {
            access = access.with_key(SealKey::from_file(path)?);
        }
        demand(access);
        Ok(())
    }
}

/// How a new snapshot is protected.
#[derive(Debug, Args)]
pub(crate) struct ProtectArguments {
    /// Sign the snapshot with the key in this file.
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
    /// Seal the snapshot with the key in this file: nobody without it can read or change it.
    #[arg(long, value_name = "FILE")]
    seal: Option<PathBuf>,
}

impl ProtectArguments {
    /// Reads the keys.
    pub(crate) fn apply(&self, with: &mut SaveWith) -> anyhow::Result<()> {
        with.sign = self.sign.as_deref().map(SigningKey::from_file).transpose()?;
        with.seal = self.seal.as_deref().map(SealKey::from_file).transpose()?;
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Signs snapshots; its public half is printed.
    Signing,
    /// Seals snapshots and opens sealed ones.
    Sealing,
}

#[derive(Debug, Args)]
pub(crate) struct KeygenArguments {
    /// What for.
    #[arg(value_enum)]
    kind: Kind,
    /// The file to make, readable by its owner only.
    file: PathBuf,
}

pub(crate) fn keygen(arguments: &KeygenArguments, format: Format) -> anyhow::Result<ExitCode> {
    let public = match arguments.kind {
        Kind::Signing => {
            let key = SigningKey::generate()?;
            key.create_file(&arguments.file)?;
            Some(key.public().to_string())
        }
        Kind::Sealing => {
            SealKey::generate()?.create_file(&arguments.file)?;
            None
        }
    };
    match (format, public) {
        (Format::Json, public) => {
            say!("{}", json!({"file": arguments.file.display().to_string(), "public": public}))?
        }
        (Format::Text, Some(public)) => say!("{public}")?,
        (Format::Text, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}
