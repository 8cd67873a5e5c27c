//! Keys and limits of snapshots: `afresh keygen` creates keys, `--trust` and `--key` require them
//! of snapshots, `--sign` and `--seal` apply them to new ones, and `--limit` bounds their sizes.

use std::path::PathBuf;
use std::process::ExitCode;

use afresh::store::{BadLimit, Limits};
use afresh::{Access, PublicKey, SaveOptions, SealKey, SigningKey};
use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::Settings;
use crate::help::EVERY_COMMAND;
use crate::output::{Format, say};

/// Requirements on every snapshot that is opened.
#[derive(Debug, Args)]
pub(crate) struct AccessArguments {
    /// Open only snapshots that are signed with a key in this file: public keys, one per line, as
    /// `keygen` prints them.
    ///
    /// May be repeated.
    #[arg(long, global = true, value_name = "FILE", help_heading = EVERY_COMMAND)]
    trust: Vec<PathBuf>,
    /// Open only snapshots that are sealed with the key in this file.
    #[arg(long, global = true, value_name = "FILE", help_heading = EVERY_COMMAND)]
    key: Option<PathBuf>,
    /// Refuse snapshots with sizes above a limit: memory, content, expansion, index, program or
    /// turns.
    ///
    /// SIZE is in bytes, or has KiB, MiB, GiB or TiB behind it. May be repeated.
    #[arg(long, global = true, value_name = "NAME=SIZE", help_heading = EVERY_COMMAND)]
    #[arg(value_parser = limit)]
    limit: Vec<String>,
}

impl AccessArguments {
    /// Reads the keys.
    pub(crate) fn access(&self) -> anyhow::Result<Access> {
        let mut access = Access::new();
        if !self.trust.is_empty() {
            let mut trusted = Vec::new();
            for path in &self.trust {
                let keys = PublicKey::from_file(path);
                trusted.extend(keys.with_context(|| format!("--trust {}", path.display()))?);
            }
            access = access.trusting(trusted);
        }
        if let Some(path) = &self.key {
            let key = SealKey::from_file(path);
            access = access.with_key(key.with_context(|| format!("--key {}", path.display()))?);
        }
        Ok(access.with_limits(self.limits()?))
    }

    /// The limits on snapshots.
    pub(crate) fn limits(&self) -> Result<Limits, BadLimit> {
        let mut limits = Limits::default();
        self.limit.iter().try_for_each(|text| limits.set(text))?;
        Ok(limits)
    }
}

/// A valid limit: a wrong one is wrong usage.
fn limit(text: &str) -> Result<String, BadLimit> {
    Limits::default().set(text)?;
    Ok(text.to_owned())
}

/// Protection of a new snapshot.
#[derive(Debug, Args)]
pub(crate) struct ProtectArguments {
    /// Sign the snapshot with the key in this file.
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
    /// Seal the snapshot with the key in this file.
    ///
    /// Reading or changing it then requires the key.
    #[arg(long, value_name = "FILE")]
    seal: Option<PathBuf>,
}

impl ProtectArguments {
    /// Reads the keys.
    pub(crate) fn apply(&self, mut options: SaveOptions) -> anyhow::Result<SaveOptions> {
        if let Some(path) = &self.sign {
            let key = SigningKey::from_file(path);
            options = options.sign(key.with_context(|| format!("--sign {}", path.display()))?);
        }
        if let Some(path) = &self.seal {
            let key = SealKey::from_file(path);
            options = options.seal(key.with_context(|| format!("--seal {}", path.display()))?);
        }
        Ok(options)
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Signs snapshots. The public key is printed.
    Signing,
    /// Seals snapshots and opens sealed ones.
    Sealing,
}

#[derive(Debug, Args)]
pub(crate) struct KeygenArguments {
    /// Purpose of the key.
    #[arg(value_enum)]
    kind: Kind,
    /// File to create, readable by its owner only.
    file: PathBuf,
}

pub(crate) fn keygen(arguments: &KeygenArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
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
    match (settings.output, public) {
        (Format::Json, public) => {
            say!("{}", json!({"file": arguments.file.display().to_string(), "public": public}))?
        }
        (Format::Text, Some(public)) => say!("{public}")?,
        (Format::Text, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}
