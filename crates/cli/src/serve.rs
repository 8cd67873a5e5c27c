//! `afresh serve`: guests behind HTTP, each request from the warm state. With `--stdio`, one guest and a request a line.

use std::process::ExitCode;

use clap::Args;

use crate::Settings;
use crate::guest::{Command, OpenArguments};
use crate::stdio;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Wasm modules and components, static-PIE ELFs for micro-VMs, Linux programs, or snapshots: each `[/ROUTE=]PLACE[@NAME]`. Without
    /// a route a guest answers for every path.
    #[cfg_attr(feature = "serve", arg(required_unless_present = "config"))]
    #[cfg_attr(not(feature = "serve"), arg(required = true))]
    #[arg(value_name = "[/ROUTE=]GUEST")]
    pub(crate) guests: Vec<String>,
    #[command(flatten)]
    pub(crate) how: OpenArguments,
    /// The exported function that handles bytes, of guests other than HTTP components.
    #[arg(long, value_name = "F", default_value = "handle")]
    pub(crate) call: String,
    /// Answer one request a line from standard input instead, with one line each.
    #[arg(long)]
    stdio: bool,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    pub(crate) http: crate::http::HttpArguments,
    // Beside the arguments of HTTP, not within: a group of arguments that conflict has no groups in it.
    #[cfg(feature = "fleet")]
    #[command(flatten)]
    pub(crate) fleet: crate::fleet::JoinArguments,
    /// Arguments of a Linux program.
    #[arg(last = true)]
    pub(crate) arguments: Vec<String>,
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
            anyhow::bail!("--stdio serves one guest, and {} are named", arguments.guests.len());
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
