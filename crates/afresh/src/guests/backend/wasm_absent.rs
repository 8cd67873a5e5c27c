//! No Wasm guests: this build lacks the feature `wasm`.

use super::absent::Absent;
use super::{OpenFile, Thaw};
use crate::Cause;
use crate::guests::call::Exit;

pub(super) const SNAPSHOT_KIND: &str = "wasm";
pub(super) const OPEN: Option<OpenFile> = None;
pub(super) const THAW: Option<Thaw> = None;

pub(crate) type WarmModule = Absent;
pub(crate) type WarmComponent = Absent;
pub(crate) type ModuleLease<'a> = Absent;
pub(crate) type ComponentLease<'a> = Absent;

/// Options of Wasm guests alone.
#[derive(Clone, Default)]
pub(crate) struct WasmOptions;

impl WasmOptions {
    /// Drops all output of guests.
    pub(crate) fn discard_output(&mut self) {}
}

/// The exit of a guest, if that is the cause of an error.
pub(super) fn exit(_: &Cause) -> Option<Exit<'_>> {
    None
}

/// The stack of a guest at its failure.
pub(super) fn backtrace(_: &Cause) -> Option<String> {
    None
}
