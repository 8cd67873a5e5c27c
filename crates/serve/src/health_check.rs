//! The parts of a server whose health is probed.

/// A part that is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    #[cfg(feature = "fleet")]
    Lease,
    /// The directory of saved sandboxes.
    Directory,
    /// The calls of sandboxes, which end soon after their time limit.
    Calls,
    #[cfg(feature = "fleet")]
    Store,
}

impl Check {
    /// Its name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(feature = "fleet")]
            Self::Lease => "lease",
            Self::Directory => "directory",
            Self::Calls => "calls",
            #[cfg(feature = "fleet")]
            Self::Store => "store",
        }
    }

    /// The fault, for any client.
    pub(crate) fn fault(self) -> &'static str {
        match self {
            #[cfg(feature = "fleet")]
            Self::Lease => "the lease is lost, and sandboxes are refused until NATS renews it",
            Self::Directory => "the directory cannot be written, and saves are refused",
            Self::Calls => {
                "calls run far past their time limit and hold places; restart the server"
            }
            #[cfg(feature = "fleet")]
            Self::Store => "the fleet's store does not answer, and saves are refused",
        }
    }
}
