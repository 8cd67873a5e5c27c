//! Whether processors are idle that calls may use.
//!
//! Promises: they count as idle only if the host has idle time, and calls used less than the
//! processors that this process may use. A control group with a quota is therefore not idle on an
//! idle host, and a host that is busy with other work is not idle either.

use std::time::{Duration, Instant};

/// Time of a sample. The kernel counts idle time in hundredths of a second.
const WINDOW: Duration = Duration::from_millis(100);
/// Ticks of the kernel in a second, in `/proc/stat`.
const TICKS_PER_SECOND: u64 = 100;
/// Processors are idle for more than this part of their time.
const IDLE_FRACTION: u32 = 10;

/// The use of the processors.
pub(crate) struct IdleProcessors {
    /// Those that this process may use; 0 if they are always busy.
    processors: u32,
    since: Instant,
    /// CPU time of calls in this window.
    used: Duration,
    /// Idle time of the host when the window began.
    idle: Option<Duration>,
    /// Reads that time.
    host: Box<dyn Fn() -> Option<Duration> + Send>,
}

impl IdleProcessors {
    pub(crate) fn new(processors: usize) -> Self {
        Self::on(processors, host_idle_time)
    }

    /// Those of a host whose idle time `host` reads.
    pub(super) fn on(
        processors: usize,
        host: impl Fn() -> Option<Duration> + Send + 'static,
    ) -> Self {
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        let (since, used) = (Instant::now(), Duration::ZERO);
        Self { processors, since, used, idle: None, host: Box::new(host) }
    }

    /// Those of a host that is always busy.
    #[cfg(test)]
    pub(crate) fn busy() -> Self {
        Self::new(0)
    }

    #[cfg(test)]
    pub(crate) fn used(&self) -> Duration {
        self.used
    }

    /// Counts CPU time of a call.
    pub(crate) fn add_used(&mut self, used: Duration) {
        self.used = self.used.saturating_add(used);
    }

    /// Whether they were idle in the window that ends now; `None` before its end.
    pub(crate) fn sample(&mut self, now: Instant) -> Option<bool> {
        let window = now.saturating_duration_since(self.since);
        if window < WINDOW {
            return None;
        }
        let before = self.idle.take();
        self.idle = (self.host)();
        let used = std::mem::take(&mut self.used);
        self.since = now;
        // An old window says nothing of the present.
        if window > 10 * WINDOW {
            return None;
        }
        let idle = before.zip(self.idle).map(|(old, new)| new.saturating_sub(old));
        Some(self.is_idle(window, used, idle.unwrap_or_default()))
    }

    fn is_idle(&self, window: Duration, used: Duration, idle: Duration) -> bool {
        let available = window * self.processors;
        idle * IDLE_FRACTION > available
            && (available.saturating_sub(used)) * IDLE_FRACTION > available
    }
}

/// Idle time of all processors of the host, in which nothing waited for a disk either.
fn host_idle_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks: u64 = text.lines().next()?.split_ascii_whitespace().nth(4)?.parse().ok()?;
    Some(Duration::from_millis(ticks.saturating_mul(1000 / TICKS_PER_SECOND)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_idle_if_the_host_and_the_quota_have_time_left() {
        let two = IdleProcessors::new(2);
        let time = Duration::from_millis;
        assert!(two.is_idle(time(100), time(100), time(100)));
        assert!(!two.is_idle(time(100), time(195), time(800)), "the quota is used up");
        assert!(!two.is_idle(time(100), time(20), time(10)), "the host does other work");
        assert!(!IdleProcessors::busy().is_idle(time(100), time(0), time(0)));
    }

    #[test]
    fn the_host_counts_its_idle_time() {
        let one = host_idle_time().expect("/proc/stat has it");
        assert!(host_idle_time().unwrap() >= one);
    }
}
