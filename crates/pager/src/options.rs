//! How a restore is to be done.

use std::time::Duration;

use crate::{Answer, FillStrategy};

/// How a restore is to be done.
#[derive(Clone, Debug)]
pub struct Options {
    /// How memory is filled; `None` lets the source decide.
    pub strategy: Option<FillStrategy>,
    /// The thread that answers faults, for the strategies that have any.
    pub answer: Answer,
    /// Pages filled on a fault: a power of two, 1 to 512. `None` leaves it to the strategy.
    pub window: Option<usize>,
    /// Whether pages are streamed ahead of being touched; otherwise they come on demand only.
    pub background: bool,
    /// Threads that stream.
    pub streams: usize,
    /// How long they wait before they begin with an image, so that the guest first gets what it
    /// touches: where both share a processor its first answer comes sooner. A thread that waits for
    /// the whole image ends it. After a working set from a near source it is at least 10 ms.
    pub delay: Duration,
    /// Time limit of a filler for one window, after which the memory is closed. Longer than a
    /// remote source sits out an outage of its server, so that a guest lives once the server is
    /// back.
    pub timeout: Duration,
    /// Whether the guest is known to write most of its memory, which the automatic choice asks.
    pub mostly_written: bool,
    /// The server that images are shared through.
    #[cfg(all(target_os = "linux", not(afresh_portable)))]
    pub images: Option<std::sync::Arc<crate::images::ImageClient>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            strategy: None,
            answer: Answer::Sigbus,
            window: None,
            background: true,
            streams: 1,
            delay: Duration::ZERO,
            timeout: Duration::from_secs(45),
            mostly_written: false,
            #[cfg(all(target_os = "linux", not(afresh_portable)))]
            images: None,
        }
    }
}

impl Options {
    /// Options with this strategy and everything else by default.
    #[must_use]
    pub fn with(strategy: FillStrategy) -> Self {
        Self { strategy: Some(strategy), ..Self::default() }
    }

    /// Options that bring in exactly the pages that are touched, to learn the working set.
    #[must_use]
    pub fn recording() -> Self {
        Self { window: Some(1), background: false, ..Self::with(FillStrategy::Stream) }
    }
}
