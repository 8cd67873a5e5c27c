//! `afresh serve`: guests behind HTTP, each request from the warm state. With `--stdio`, one guest
//! and one request per line.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::Settings;
use crate::guest::{Command, OpenArguments};
use crate::stdio;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A Wasm module or component, a static-PIE ELF for a micro-VM, a Linux program, or a snapshot.
    ///
    /// A guest without a route answers every path. May be repeated.
    #[cfg_attr(feature = "serve", arg(required_unless_present_any = ["config", "check"]))]
    #[cfg_attr(not(feature = "serve"), arg(required = true))]
    #[arg(value_name = "[/ROUTE=]GUEST")]
    pub(crate) guests: Vec<String>,
    /// Exported function that handles bytes, for guests other than HTTP components.
    #[arg(long, value_name = "F", default_value = "handle")]
    pub(crate) call: String,
    /// Read one request per line from standard input, and write one answer per line.
    #[arg(long)]
    stdio: bool,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) http: crate::http::HttpArguments,
    // Not a part of the HTTP arguments: clap does not nest groups in a group that conflicts.
    #[cfg(feature = "fleet")]
    #[command(flatten)]
    pub(crate) fleet: crate::fleet::JoinArguments,
    /// Arguments of a Linux program.
    #[arg(last = true)]
    pub(crate) arguments: Vec<OsString>,
    #[command(flatten)]
    pub(crate) how: OpenArguments,
}

impl Arguments {
    /// The arguments of the guests.
    pub(crate) fn command(&self) -> Command<'_> {
        Command { arguments: &self.arguments, ..Command::default() }
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    if arguments.stdio {
        let [guest] = &arguments.guests[..] else {
            anyhow::bail!("--stdio serves one guest, and {} are given", arguments.guests.len());
        };
        return stdio::run(guest, arguments, settings);
    }
    #[cfg(feature = "serve")]
    return crate::http::run(arguments, settings);
    #[cfg(not(feature = "serve"))]
    anyhow::bail!(
        "this build of afresh serves no HTTP; build it with the feature `serve`, or use --stdio"
    );
}
