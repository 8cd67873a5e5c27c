//! Planted bugs: mutants of the reset, chosen by an environment variable, which the suites must
//! catch.
//!
//! A suite that never failed proves little. The places that a reset depends on query it for a
//! planted bug. Each suite runs its own tests again, in a child, once for each bug, and demands
//! that they fail ([`must_be_caught`]).
//!
//! Promises: in a program built without the feature `planted`, or without debug assertions, [`is`]
//! is `false` at compile time, and no code of this is left. The feature is only for the tests of
//! this workspace, which enable it in a development dependency. With it, nothing happens unless
//! `AFRESH_PLANT` names a bug.

use std::sync::atomic::{AtomicU8, Ordering};

/// The environment variable that names a bug.
pub const VARIABLE: &str = "AFRESH_PLANT";

/// Whether this program can have bugs planted.
pub const ENABLED: bool = cfg!(all(feature = "planted", debug_assertions));

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The planted bugs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Bug { $($(#[$doc])* $name,)* }

        impl Bug {
            /// Every bug.
            pub const ALL: &'static [Bug] = &[$(Bug::$name),*];

            /// Its name in `AFRESH_PLANT`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Bug::$name => $text,)* }
            }
        }
    };
}

bugs! {
    /// Orders of a Linux guest's stub count as executed without their receipt.
    StubReceipt = "stub-receipt",
    /// A run of pages of the write set is not copied back.
    CopyBack = "copy-back",
    /// A run of newly written pages does not get into the write set.
    Learn = "learn",
    /// A sample leaves a page as it found it.
    Sample = "sample",
    /// Pages that were evicted are not protected again.
    Rearm = "rearm",
    /// Content above the initial size stays for the next growth.
    GrownContent = "grown-content",
    /// Growth is not undone.
    GrownSize = "grown-size",
    /// A tracker opens a page that it does not report.
    Mark = "mark",
    /// A page is not discarded.
    Discard = "discard",
    /// A full copy leaves a page out.
    FullCopy = "full-copy",
    /// A page that the scan found is not restored.
    Scan = "scan",
    /// A page that differs is not copied when a slot moves to another image.
    Switch = "switch",
    /// A slot that moved releases the image in its mappings.
    Shown = "shown",
    /// A page that another state shares is given back with a dropped state.
    Reclaim = "reclaim",
    /// A changed page is left out of a frozen image.
    Freeze = "freeze",
    /// A captured page is opened for writing before it is copied.
    CopyLive = "copy-live",
    /// A page that was written since a freeze was prepared is not protected again.
    Prepare = "prepare",
    /// A new mapping lets the kernel merge its pages.
    Merging = "merging",
    /// A collection removes staged data of living writers.
    Staged = "staged",
    /// A page of a lazily filled image comes without its content.
    Lazy = "lazy",
    /// A page that was written before the first protection is not in the list of private pages.
    Private = "private",
    /// The comparison with the image sees nothing.
    Verify = "verify",
    /// Memory that an operation left half-way stays in use.
    Halfway = "halfway",
    /// A forked child inherits memory with missing pages.
    Withhold = "withhold",
    /// A slot whose reset failed stays in use.
    Quarantine = "quarantine",
    /// A global is not restored.
    Global = "global",
    /// An element of a table is not restored.
    Element = "element",
    /// A dropped segment stays dropped.
    Segment = "segment",
    /// An instance whose table grew is used again.
    Replace = "replace",
    /// wasmtime still believes in the size that a memory had grown to.
    View = "view",
    /// An uncaught exception is still pending in the next call.
    Exception = "exception",
    /// Host state of a call is still there in the next.
    HostState = "host-state",
    /// A reset program does not get its new generation.
    OldGeneration = "old-generation",
    /// A thawed instance does not know that a segment was dropped.
    Thaw = "thaw",
    /// A patch of a page lacks a run of bytes.
    Patch = "patch",
    /// The changes of a turn to the guest's own state are lost.
    Turn = "turn",
    /// A page that a turn changed is taken for one that it did not.
    PageOrigins = "page-origins",
    /// A general register keeps its value from the last call.
    Register = "register",
    /// An exit that the guest left pending is completed in the next call.
    Exit = "exit",
    /// A mapping that a call changed stays as it is.
    Mapping = "mapping",
    /// Writes of a process to the contents of a file are taken for the original.
    Borrowed = "borrowed",
    /// The stub of a Linux guest copies from the image before the last checkpoint.
    Window = "window",
    /// A file that its sender can change counts as a shared image.
    Unsealed = "unsealed",
    /// Shared memory keeps the writes of a call.
    Shared = "shared",
    /// Only the first process of a guest is reset.
    Family = "family",
    /// The process of a sandbox that has ended is used again without a reset.
    SpareReset = "spare-reset",
    /// A process keeps waiting in the kernel while its guest halts.
    ParkedCall = "parked-call",
    /// The offset of a file that was set inside the process is not taken over.
    InsideOffset = "inside-offset",
    /// An item that could not be recycled is leased again.
    Unclean = "unclean",
    /// An item whose user panicked is leased again.
    Unwound = "unwound",
    /// The pool leases an item that is warm for another key.
    Key = "key",
    /// A child gets an item of its parent.
    Parents = "parents",
    /// A global of the warm state is not baked.
    Bake = "bake",
    /// The state that the warm-up left in a component's core modules is not kept.
    Nested = "nested",
    /// The memories of a component after the warm-up are not kept.
    NestedMemory = "nested-memory",
    /// The memories of a component are laid out in another order than wasmtime requests them.
    Order = "order",
    /// Handles that the warm-up of a component left alive go unnoticed.
    Handle = "handle",
    /// A host answers for its sandboxes after the end of its lease.
    Lease = "lease",
    /// A name gets a new meaning regardless of its present one.
    Expected = "expected",
    /// Blobs get their names before they are synced.
    EarlyName = "early-name",
    /// A page of a frozen image is opened for writing before it is copied.
    Torn = "torn",
    /// A snapshot of a freeze that is over saves the present memory.
    Over = "over",
    /// Overlapping mappings of one program are made in one step.
    Overlap = "overlap",
    /// Calls get processors in the order of their arrival, whatever their tenants.
    TenantOrder = "tenant-order",
}

/// Which bug is planted: not looked up yet, none, or its number and 2.
static PLANTED: AtomicU8 = AtomicU8::new(0);

#[cold]
fn look_up() -> u8 {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let found = Bug::ALL.iter().find(|bug| bug.name() == wanted);
    assert!(wanted.is_empty() || found.is_some(), "{VARIABLE} names no bug: {wanted:?}");
    let number = found.map_or(1, |bug| *bug as u8 + 2);
    PLANTED.store(number, Ordering::Relaxed);
    number
}

/// Whether `bug` is planted. Not for fault handlers.
#[inline(always)]
#[must_use]
pub fn is(bug: Bug) -> bool {
    ENABLED && {
        let planted = match PLANTED.load(Ordering::Relaxed) {
            0 => look_up(),
            number => number,
        };
        planted == bug as u8 + 2
    }
}

/// Looks up which bug is planted, so that fault handlers know.
#[inline(always)]
pub fn prepare() {
    let _ = is(Bug::Lazy);
}

/// Whether `bug` is planted, for fault handlers: `false` before the first call of [`is`].
#[inline(always)]
#[must_use]
pub fn is_in_handler(bug: Bug) -> bool {
    ENABLED && PLANTED.load(Ordering::Relaxed) == bug as u8 + 2
}

/// `items`, without the last where `bug` is planted.
#[inline(always)]
#[must_use]
pub fn but_last<T>(bug: Bug, items: &[T]) -> &[T] {
    if is(bug) { items.split_last().map_or(items, |(_, rest)| rest) } else { items }
}

/// Runs `tests` of this very program again, in a child for each of `bugs`, and panics unless some
/// fail or the child dies, of each bug. Without a bug the tests run in this program, and must pass
/// there.
///
/// # Panics
/// When a bug is not caught, or the child cannot be started or runs no test.
#[cfg(feature = "planted")]
pub fn must_be_caught(bugs: &[Bug], tests: &[&str]) {
    use std::process::Command;

    if !ENABLED {
        println!("SKIPPED: planted bugs: this program is built without debug assertions");
        return;
    }
    let program = std::env::current_exe().expect("a program knows its file");
    for bug in bugs {
        let start = std::time::Instant::now();
        let output = Command::new(&program)
            .args(tests)
            .args(["--exact", "--include-ignored"])
            .env(VARIABLE, bug.name())
            // A failure is enough; the smallest input is not needed.
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .output()
            .expect("this program runs once more");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains(&format!("running {} test", tests.len())),
            "{bug:?}: not all of {tests:?} ran: {said}"
        );
        assert!(
            !output.status.success(),
            "planted bug {bug:?} ({}={}) was not caught by {tests:?}:\n{said}",
            VARIABLE,
            bug.name()
        );
        println!("planted bug {}: caught, {:.1} s", bug.name(), start.elapsed().as_secs_f64());
    }
}
