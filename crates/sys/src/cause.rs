//! Faults: the kernel's report of a failed access, and its handlers.

/// Which signal a fault came as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSignal {
    /// SIGBUS: userfaultfd in SIGBUS mode, a file shorter than its mapping, or broken hardware.
    Bus,
    /// SIGSEGV: page protection, or nothing mapped.
    Segv,
}

/// Why the kernel could not serve an access: `si_code` with a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultCause {
    /// Nothing is mapped at the address.
    Unmapped,
    /// The mapping does not allow the access.
    Protected,
    /// A protection key forbids the access.
    Key,
    /// The kernel has no page to offer. A userfaultfd in SIGBUS mode reports every fault so, be the
    /// page missing or write-protected; but so does a file that ends before the address, or a page
    /// that could not be read back from swap. Those come again however often the access is retried.
    Unavailable,
    /// The content of the page is lost: the hardware reported an error, or the page was poisoned.
    /// No retry cures it.
    Poisoned,
    /// Anything else, as the kernel numbers it.
    Other(i32),
}

/// A fault of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The address of the access.
    pub address: usize,
    /// The signal.
    pub signal: FaultSignal,
    /// Why the access could not be served.
    pub cause: FaultCause,
    /// Whether the access was a write, where the processor reports it.
    pub write: Option<bool>,
    /// Address of the instruction that made the access.
    pub instruction: usize,
}

/// Answers faults in a registered range.
///
/// Called in signal context: an implementation must not allocate, log or panic, and may take only
/// locks that are never held where such a fault can happen. While it runs, the thread takes no
/// signal except for its own faults. If the handler itself faults outside every registered range,
/// the process ends.
pub trait FaultHandler: Send + Sync {
    /// Handles a fault; `true` when the access can be retried, `false` to pass the fault on.
    fn on_fault(&self, fault: &Fault) -> bool;

    /// Whether faults that come as `signal` can be for this handler. Queried once, at registration;
    /// other signals are left to other handlers.
    fn answers(&self, signal: FaultSignal) -> bool {
        let _ = signal;
        true
    }

    /// Whether the range holds code, and a runtime that runs it turns faults of the instruction at
    /// this address into traps. Called in signal context.
    fn traps(&self, instruction: usize) -> bool {
        let _ = instruction;
        false
    }
}
