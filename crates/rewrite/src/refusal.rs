//! Why a module's state cannot be restored.

use std::fmt;

/// Maximum refusals of a module, of each kind of work.
pub(crate) const MAX_REFUSALS: usize = 8;

/// One reason, naming the item that causes it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A shared memory may be written by another thread at any time.
    #[error("memory {memory} is shared: other threads may write it while it is restored")]
    SharedMemory {
        /// The memory's index.
        memory: u32,
    },
    /// An imported memory belongs to its exporter.
    #[error(
        "memory {memory} is imported as {module:?} {name:?}: its content belongs to the exporter; \
         link the two, or let the module define its memory"
    )]
    ImportedMemory {
        /// The memory's index.
        memory: u32,
        /// The import's module name, shortened.
        module: String,
        /// The import's field name, shortened.
        name: String,
    },
    /// An imported mutable global belongs to its exporter.
    #[error(
        "global {global}, imported as {module:?} {name:?}, is mutable: its value belongs to the \
         exporter; link the two, or let the module define it"
    )]
    ImportedMutableGlobal {
        /// The global's index.
        global: u32,
        /// The import's module name, shortened.
        module: String,
        /// The import's field name, shortened.
        name: String,
    },
    /// An imported table that the module itself writes.
    #[error(
        "table {table}, imported as {module:?} {name:?}, is written by function {function}: its \
         elements belong to the exporter; link the two"
    )]
    ImportedTableWritten {
        /// The table's index.
        table: u32,
        /// The import's module name, shortened.
        module: String,
        /// The import's field name, shortened.
        name: String,
        /// The first function that writes it.
        function: u32,
    },
    /// An instruction that changes a GC object in place; such changes leave no trace to undo.
    #[error(
        "function {function} changes a GC object in place ({instruction}), which cannot be undone"
    )]
    GcWrite {
        /// The first such function.
        function: u32,
        /// The instruction.
        instruction: &'static str,
    },
    /// A host function that can reach GC objects may change them in place.
    #[error(
        "the host function {function} can reach GC objects with mutable fields, and what it changes there \
         cannot be undone"
    )]
    GcHost {
        /// The imported function.
        function: u32,
    },
    /// A continuation holds a stack, which cannot be copied.
    #[error(
        "function {function} switches stacks ({instruction}): a suspended stack cannot be restored"
    )]
    StackSwitching {
        /// The first such function.
        function: u32,
        /// The instruction.
        instruction: &'static str,
    },
}

/// Several reasons, separated by semicolons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusals(pub Vec<Refusal>);

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, refusal) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            refusal.fmt(f)?;
        }
        Ok(())
    }
}
