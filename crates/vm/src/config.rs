//! Settings shared by all forks of a sandbox: limits, log, reset method.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::ZeroPageSource;

use crate::strategy::ResetMethod;

pub(crate) type Log = Arc<dyn Fn(u8, &str) + Send + Sync>;

/// The settings that all forks share.
#[derive(Clone, Default)]
pub(crate) struct Config {
    pub(crate) timeout: Option<Duration>,
    pub(crate) log: Option<Log>,
    pub(crate) reset: ResetMethod,
    pub(crate) limits: Limits,
    /// The source of resident zero memory, and its maximum pages.
    pub(crate) zero_source: Option<(Arc<dyn ZeroPageSource>, usize)>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("timeout", &self.timeout)
            .field("reset", &self.reset)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Maximum bytes that the host holds, or makes, for one call of a guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) output: u64,
    pub(crate) arguments: u64,
    pub(crate) random: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { output: 64 << 20, arguments: 16 << 20, random: 1 << 20 }
    }
}
