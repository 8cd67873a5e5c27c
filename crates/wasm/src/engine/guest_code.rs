//! The machine code of guests, as the fault handler knows it.
//!
//! A page of a lazily opened snapshot may be lost. An instruction of a guest that touches it traps,
//! if wasmtime has a trap for that instruction. It has none for most copies of few bytes, which it
//! compiles without a call. They get zeros, as code of the host does.
//!
//! Promises: the code of a guest is known until the guest is dropped. Guests of one module share
//! it. May break it: a wasmtime that stores its traps in another way. Then every instruction gets
//! zeros, and the call fails when it ends.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_sys::PerProcess;
use afresh_sys::fault::{self, Fault, FaultHandler, FaultSignal, Registration};
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};
use wasmtime::{Module, component::Component};
use wasmtime_environ::lookup_trap_code;
use wasmtime_environ::obj::ELF_WASMTIME_TRAPS;

/// A range of code, and the guests that use it.
struct KnownCode {
    users: usize,
    _registration: Registration,
}

/// By first address.
static CODE_RANGES: PerProcess<Mutex<HashMap<usize, KnownCode>>> = PerProcess::new(Mutex::default);

fn known_code() -> MutexGuard<'static, HashMap<usize, KnownCode>> {
    CODE_RANGES.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The traps of a range of code.
struct Traps {
    text: usize,
    /// wasmtime's table of them, which is dropped with the code.
    table: &'static [u8],
}

impl FaultHandler for Traps {
    fn on_fault(&self, _: &Fault) -> bool {
        false
    }

    fn answers(&self, _: FaultSignal) -> bool {
        false
    }

    fn traps(&self, instruction: usize) -> bool {
        lookup_trap_code(self.table, instruction - self.text).is_some()
    }
}

/// Keeps a range of code known. Its owner drops it before the code.
#[derive(Debug)]
pub(crate) struct GuestCode {
    start: usize,
}

impl GuestCode {
    /// Makes the code of a module known, unless that fails.
    pub(crate) fn of_module(module: &Module) -> Option<Self> {
        Self::register(module.text(), module.image_range())
    }

    /// As [`GuestCode::of_module`], for a component.
    pub(crate) fn of_component(component: &Component) -> Option<Self> {
        Self::register(component.text(), component.image_range())
    }

    fn register(text: &[u8], image: Range<*const u8>) -> Option<Self> {
        let start = text.as_ptr() as usize;
        let mut known = known_code();
        if let Some(code) = known.get_mut(&start) {
            code.users += 1;
            return Some(Self { start });
        }
        let len = image.end as usize - image.start as usize;
        // SAFETY: the bytes of a loaded image, which wasmtime never changes. They stay until the
        // code is dropped, and the registration, which alone reads them, is dropped before.
        let image: &'static [u8] = unsafe { std::slice::from_raw_parts(image.start, len) };
        let image = ElfFile64::<Endianness>::parse(image).ok()?;
        let table = image.section_by_name(ELF_WASMTIME_TRAPS)?.data().ok()?;
        let traps = Arc::new(Traps { text: start, table });
        let registration = fault::register(text.as_ptr(), text.len(), traps).ok()?;
        known.insert(start, KnownCode { users: 1, _registration: registration });
        Some(Self { start })
    }
}

impl Drop for GuestCode {
    fn drop(&mut self) {
        let mut known = known_code();
        // A child of a fork knows no code of its parent.
        if let Some(code) = known.get_mut(&self.start) {
            code.users -= 1;
            if code.users == 0 {
                known.remove(&self.start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_a_known_module_trap_until_its_last_guest_is_dropped() {
        let engine = wasmtime::Engine::default();
        let load = r#"(module (memory 1)
            (func (export "load") (param i32) (result i32) (i32.load (local.get 0))))"#;
        let module = Module::new(&engine, wat::parse_str(load).unwrap()).unwrap();
        let text = module.text().as_ptr_range();
        let all =
            || (text.start as usize..text.end as usize).filter(|at| fault::traps(*at)).count();
        assert_eq!(all(), 0);
        let first = GuestCode::of_module(&module).unwrap();
        let second = GuestCode::of_module(&module).unwrap();
        drop(first);
        let trapping = all();
        assert!(0 < trapping && trapping < module.text().len() / 4, "{trapping}");
        drop(second);
        assert_eq!(all(), 0);
    }
}
