//! Imports of a guest that the linker lacks: all of them, in one error or as functions that trap.

use wasmtime::component::types::{ComponentFunc, ComponentItem};
use wasmtime::component::{Component, Linker as ComponentLinker, LinkerInstance, ResourceType};
use wasmtime::{Engine, ExternType, Linker, Module};

use crate::LoadError;
use crate::call::stores::Stores;
use crate::host::Host;

/// Every import of `module` that `linker` lacks, if that is the error.
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

/// The version of WASI 0.2 that wasmtime-wasi defines. It serves every other patch version.
const WASI: &str = "0.2.12";

/// Defines the functions that `component` imports and `linker` lacks as functions that trap.
///
/// Nothing in the linker is replaced. Interfaces other than WASI come first. If imports are still
/// missing, functions that WASI lacks are added to the interface in `linker` that serves the
/// import. A new interface of another patch version would take precedence over all of its functions
/// and resources.
pub(crate) fn stub(linker: &mut ComponentLinker<Host>, component: &Component) {
    let engine = component.engine();
    let ty = component.component_type();
    linker.allow_shadowing(false);
    for of_wasi in [false, true] {
        if linker.instantiate_pre(component).is_ok() {
            break;
        }
        for (name, import) in ty.imports(engine) {
            if name.starts_with("wasi:") != of_wasi {
                continue;
            }
            // The interface of wasmtime-wasi that serves the import.
            let serving = name
                .split_once('@')
                .filter(|(_, version)| of_wasi && version.starts_with("0.2."))
                .map(|(interface, _)| format!("{interface}@{WASI}"))
                .filter(|serving| !is_defined(linker, name) && is_defined(linker, serving));
            let served = of_wasi && (serving.is_some() || is_defined(linker, name));
            let defined = serving.unwrap_or_else(|| name.to_owned());
            let mut root = linker.root();
            let offer = Offer { engine, interface: None, resources: !served };
            offer.item(&mut root, &defined, &import.ty, &mut Vec::new());
        }
    }
}

/// Whether `linker` has something of exactly this name.
fn is_defined(linker: &ComponentLinker<Host>, name: &str) -> bool {
    // Without shadowing, a name can be defined once.
    linker.clone().root().func_new(name, |_, _, _, _| Ok(())).is_err()
}

/// Every import of `component` that `linker` lacks, if that is the error.
///
/// A linker does not list its definitions, but it refuses a second definition of the same name. So
/// a copy gets a definition of every import, and those that it accepts were missing. WASI's own
/// interfaces come last: a linker may have another version of one that fits.
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
                let offer = Offer { engine, interface: None, resources: true };
                offer.item(&mut copy.root(), name, &import.ty, &mut missing);
            }
        }
        if !missing.is_empty() && copy.instantiate_pre(component).is_ok() {
            break;
        }
    }
    if missing.is_empty() { LoadError::Link(error) } else { LoadError::Imports { missing } }
}

/// Definitions for the items that a linker lacks.
struct Offer<'a> {
    engine: &'a Engine,
    /// The interface that the items belong to.
    interface: Option<&'a str>,
    /// Whether resources are among them. An interface that only names a resource of another does
    /// not define it.
    resources: bool,
}

impl Offer<'_> {
    /// Gives `linker` the item `name`, and notes it in `missing` where it was not there yet.
    fn item(
        &self,
        linker: &mut LinkerInstance<'_, Host>,
        name: &str,
        item: &ComponentItem,
        missing: &mut Vec<String>,
    ) {
        let (taken, kind) = match item {
            ComponentItem::ComponentFunc(ty) => {
                let place = match self.interface {
                    Some(interface) => format!("{interface}#{name}"),
                    None => name.to_owned(),
                };
                (define_trap(linker, name, ty, place).is_ok(), "function")
            }
            ComponentItem::Resource(_) if self.resources => {
                let nothing = ResourceType::host::<()>();
                (linker.resource(name, nothing, |_, _| Ok(())).is_ok(), "resource")
            }
            ComponentItem::ComponentInstance(instance) => {
                if let Ok(mut inner) = linker.instance(name) {
                    let within = Offer { interface: Some(name), ..*self };
                    for (part, export) in instance.exports(self.engine) {
                        within.item(&mut inner, part, &export.ty, missing);
                    }
                }
                return;
            }
            // The linker needs no types, and has no stubs of core modules and components.
            _ => return,
        };
        if taken {
            let place = self.interface.map(|name| format!("{name}.")).unwrap_or_default();
            missing.push(format!("{place}{name} ({kind})"));
        }
    }
}

/// Defines a function whose calls fail.
fn define_trap(
    linker: &mut LinkerInstance<'_, Host>,
    name: &str,
    ty: &ComponentFunc,
    place: String,
) -> wasmtime::Result<()> {
    let unknown =
        move || wasmtime::Error::msg(format!("unknown import: `{place}` has not been defined"));
    #[cfg(feature = "p3")]
    if ty.async_() {
        return linker.func_new_concurrent(name, move |_, _, _, _| {
            let error = unknown();
            Box::pin(async move { Err(error) })
        });
    }
    let _ = ty;
    linker.func_new(name, move |_, _, _, _| Err(unknown()))
}
