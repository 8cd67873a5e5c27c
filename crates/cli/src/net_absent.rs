//! Options for the connections of Linux programs in a build without those: hidden, so that the
//! error is the reason and not that the option is unknown.

use std::ffi::OsString;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct NetArguments {
    #[arg(long, hide = true)]
    net: Vec<OsString>,
    #[arg(long, hide = true)]
    net_rules: Vec<OsString>,
    #[arg(long, hide = true)]
    net_log: Option<OsString>,
}

impl NetArguments {
    /// Whether no option is given.
    pub(crate) fn is_empty(&self) -> bool {
        self.net.is_empty() && self.net_rules.is_empty() && self.net_log.is_none()
    }
}
