//! The agent of a sandbox, in E2B's shape: code, commands, watchers, and their output.

pub(crate) mod byte_channel;
pub(crate) mod commands;
pub(crate) mod connect;
pub(crate) mod contexts;
pub(crate) mod envd;
pub(crate) mod execute;
pub(crate) mod output_router;
pub(crate) mod process;
pub(crate) mod streaming;
pub(crate) mod time_limits;
pub(crate) mod watch_requests;
pub(crate) mod watchers;
