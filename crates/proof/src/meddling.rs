//! Host functions that change guest state and the store they are called in, as an embedder's may.
//!
//! `touch`, `change` and `alter` do the same in every store, so that histories with them can be
//! compared. `meddle` spoils what belongs to a store and its lease: epochs, fuel and the embedder's
//! own state.
//!
//! They reach exports by the names of [`memory`], [`table`] and [`GLOBAL`].

use afresh_wasm::wasmtime::{
    ArrayRef, AsContextMut, Caller, Error, ExternRef, Linker, ResourceLimiter, Result, Rooted,
    StructRef, Val,
};
use afresh_wasm::{Host, Limiter, State};

/// The name that memory `index` is exported by.
#[must_use]
pub fn memory(index: usize) -> String {
    format!("memory{index}")
}

/// The name that table `index` is exported by.
#[must_use]
pub fn table(index: usize) -> String {
    format!("table{index}")
}

/// The mutable global of type `i32` that is exported, in some modules.
pub const GLOBAL: &str = "shown";

/// The data of a store that host functions spoil.
pub trait Meddler: 'static {
    /// Spoils it for the rest of its lease.
    fn spoil(&mut self);
}

impl Meddler for () {
    fn spoil(&mut self) {}
}

impl Meddler for Host {
    fn spoil(&mut self) {
        self.state::<RefusingLimiter>().0 = true;
    }
}

/// The embedder's state of a lease: a limiter that refuses all growth once a host function spoilt
/// it.
#[derive(Debug, Default)]
struct RefusingLimiter(bool);

impl ResourceLimiter for RefusingLimiter {
    fn memory_growing(&mut self, _: usize, _: usize, _: Option<usize>) -> Result<bool> {
        Ok(!self.0)
    }

    fn table_growing(&mut self, _: usize, _: usize, _: Option<usize>) -> Result<bool> {
        Ok(!self.0)
    }
}

/// The state that a spoilt lease keeps.
#[must_use]
pub fn state() -> State {
    State::new(RefusingLimiter::default)
}

/// The limiter in it.
#[must_use]
pub fn limiter() -> Limiter {
    Limiter::new(|host| host.state::<RefusingLimiter>())
}

/// Changes one item behind an export, if one exists.
fn touch<T: Meddler>(mut caller: Caller<'_, T>, what: i32, value: i32) -> Result<i32> {
    let (what, at) = ((what & 0x7fff) as usize, (value & 0x7fff) as usize);
    let index = (what >> 3) & 3;
    let table = |caller: &mut Caller<'_, T>| caller.get_export(&table(index))?.into_table();
    let memory = |caller: &mut Caller<'_, T>| caller.get_export(&memory(index))?.into_memory();
    let done = match what & 7 {
        0 | 1 => memory(&mut caller).is_some_and(|memory| {
            let bytes = memory.data_mut(&mut caller);
            let at = at % bytes.len().max(1);
            bytes.get_mut(at).map(|byte| *byte = byte.wrapping_add(what as u8 | 1)).is_some()
        }),
        2 => memory(&mut caller).is_some_and(|memory| memory.grow(&mut caller, 1).is_ok()),
        3 | 4 => match table(&mut caller) {
            Some(table) => {
                let size = table.size(&caller).max(1);
                let element = match table.ty(&caller).element().heap_type().is_extern() {
                    true => Some(ExternRef::new(&mut caller, value)?.into()),
                    false => table.get(&mut caller, (at as u64 + 1) % size),
                };
                let at = at as u64 % size;
                element.is_some_and(|element| table.set(&mut caller, at, element).is_ok())
            }
            None => false,
        },
        5 => match table(&mut caller) {
            Some(table) => match table.get(&mut caller, 0) {
                Some(element) => table.grow(&mut caller, 1, element).is_ok(),
                None => false,
            },
            None => false,
        },
        6 => match caller.get_export(GLOBAL).and_then(|export| export.into_global()) {
            Some(global) => global.set(&mut caller, Val::I32(value)).is_ok(),
            None => false,
        },
        _ => {
            caller.gc(None)?;
            true
        }
    };
    Ok(i32::from(done))
}

/// Sets the second field of a struct.
fn change<T: 'static>(
    mut caller: Caller<'_, T>,
    object: Option<Rooted<StructRef>>,
    value: i32,
) -> Result<()> {
    match object {
        Some(object) => object.set_field(&mut caller, 1, Val::I32(value)),
        None => Ok(()),
    }
}

/// Sets the first element of an array.
fn alter<T: 'static>(
    mut caller: Caller<'_, T>,
    object: Option<Rooted<ArrayRef>>,
    value: i32,
) -> Result<()> {
    match object {
        Some(object) => object.set(&mut caller, 0, Val::I32(value & 0xff)),
        None => Ok(()),
    }
}

/// Takes the fuel and the epoch callback of the store, lets its deadline pass, and spoils the
/// embedder's state.
fn meddle<T: Meddler>(mut caller: Caller<'_, T>) {
    caller.data_mut().spoil();
    let mut store = caller.as_context_mut();
    // Fails where the engine counts no fuel.
    let _ = store.set_fuel(0);
    store.epoch_deadline_trap();
    store.set_epoch_deadline(0);
}

/// Defines them.
///
/// # Errors
/// When a name is taken.
pub fn define<T: Meddler>(linker: &mut Linker<T>) -> Result<()> {
    linker.func_wrap("env", "touch", touch)?;
    linker.func_wrap("env", "change", change)?;
    linker.func_wrap("env", "alter", alter)?;
    linker.func_wrap("env", "meddle", |caller: Caller<'_, T>| {
        meddle(caller);
        Ok::<(), Error>(())
    })?;
    Ok(())
}
