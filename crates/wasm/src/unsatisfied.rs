//! Which imports of a guest nobody provides: all of them, named at once.

use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, Linker as ComponentLinker, LinkerInstance, ResourceType};
use wasmtime::{Engine, ExternType, Linker, Module};

use crate::LoadError;
use crate::host::Host;
use crate::stores::Stores;

/// Every import of `module` that `linker` lacks, where that is what is wrong.
pub(crate) fn of_module(
    linker: &Linker<Host>,
    module: &Module,
    stores: &Stores,
    error: wasmtime::Error,
) -> LoadError {
    let Ok(mut store) = stores.make() else { return LoadError::Link(error) };
    let missing: Vec<String> = module
        .imports()
        .filter(|import| linker.get(&mut store, import.module(), import.name()).is_err())
        .map(|import| format!("{}.{} ({})", import.module(), import.name(), describe(&import.ty())))
        .collect();
    if missing.is_empty() { LoadError::Link(error) } else { LoadError::Imports { missing } }
}

fn describe(ty: &ExternType) -> String {
    match ty {
        ExternType::Func(ty) => ty.to_string(),
        ExternType::Global(_) => "a global".to_owned(),
        ExternType::Table(_) => "a table".to_owned(),
        ExternType::Memory(_) => "a memory".to_owned(),
        ExternType::Tag(_) => "a tag".to_owned(),
    }
}

/// Every import of `component` that `linker` lacks, where that is what is wrong.
///
/// A linker does not tell what it has, but refuses to be given something twice. So a copy is given everything that is
/// imported, and what it takes was missing. WASI's own interfaces are asked about last: of those, a linker may also have
/// another version that serves.
pub(crate) fn of_component(
    linker: &ComponentLinker<Host>,
    component: &Component,
    error: wasmtime::Error,
) -> LoadError {
    let engine = component.engine();
    let ty = component.component_type();
    let mut copy = linker.clone();
    copy.allow_shadowing(false);
    let mut missing = Vec::new();
    for of_wasi in [false, true] {
        for (name, import) in ty.imports(engine) {
            if name.starts_with("wasi:") == of_wasi {
                offer(engine, &mut copy.root(), None, name, &import.ty, &mut missing);
            }
        }
        if !missing.is_empty() && copy.instantiate_pre(component).is_ok() {
            break;
        }
    }
    if missing.is_empty() { LoadError::Link(error) } else { LoadError::Imports { missing } }
}

/// Gives `linker` the item `name`, and notes it in `missing` where it was not there yet.
fn offer(
    engine: &Engine,
    linker: &mut LinkerInstance<'_, Host>,
    interface: Option<&str>,
    name: &str,
    item: &ComponentItem,
    missing: &mut Vec<String>,
) {
    let (taken, kind) = match item {
        ComponentItem::ComponentFunc(_) => {
            let absent = |_: wasmtime::StoreContextMut<'_, Host>, _, _: &[_], _: &mut [_]| {
                Err(wasmtime::Error::msg("never called"))
            };
            (linker.func_new(name, absent).is_ok(), "function")
        }
        ComponentItem::Resource(_) => {
            let nothing = ResourceType::host::<()>();
            (linker.resource(name, nothing, |_, _| Ok(())).is_ok(), "resource")
        }
        ComponentItem::ComponentInstance(instance) => {
            if let Ok(mut inner) = linker.instance(name) {
                for (part, export) in instance.exports(engine) {
                    offer(engine, &mut inner, Some(name), part, &export.ty, missing);
                }
            }
            return;
        }
        // Types need nobody; core modules and components nobody can stub.
        _ => return,
    };
    if taken {
        let place = interface.map(|interface| format!("{interface}.")).unwrap_or_default();
        missing.push(format!("{place}{name} ({kind})"));
    }
}
