//! The warm state except memory: reading it from an instance, and writing it to another.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use afresh_rewrite::{VisibleState, WarmState, WarmValue, names};
use afresh_sys::planted::{Bug, is};
use wasmtime::{AnyRef, AsContextMut, I31, Instance, RootScope, Val};

use crate::WarmError;
use crate::host::Host;

pub(crate) fn missing(what: &str) -> WarmError {
    WarmError::State(format!("the prepared module lacks its export {what}"))
}

/// The module's functions by the address of their reference in this instance.
pub(crate) fn functions(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    visible: &VisibleState,
) -> Result<HashMap<usize, u32>, WarmError> {
    let mut map = HashMap::with_capacity(visible.functions.len());
    for &index in &visible.functions {
        let name = names::func(index);
        let func = instance.get_func(&mut *store, &name).ok_or_else(|| missing(&name))?;
        map.insert(func.to_raw(&mut *store) as usize, index);
    }
    Ok(map)
}

/// The value as every instance of the module can hold it.
pub(crate) fn warm_value(
    store: &mut impl AsContextMut<Data = Host>,
    functions: &HashMap<usize, u32>,
    value: &Val,
) -> WarmValue {
    match value {
        Val::I32(v) => WarmValue::I32(*v),
        Val::I64(v) => WarmValue::I64(*v),
        Val::F32(bits) => WarmValue::F32(*bits),
        Val::F64(bits) => WarmValue::F64(*bits),
        Val::V128(v) => WarmValue::V128(v.as_u128()),
        Val::FuncRef(Some(func)) => {
            let address = func.to_raw(&mut *store) as usize;
            functions.get(&address).map_or(WarmValue::Opaque, |index| WarmValue::Func(*index))
        }
        Val::FuncRef(None) | Val::ExternRef(None) | Val::AnyRef(None) | Val::ExnRef(None) => {
            WarmValue::Null
        }
        Val::AnyRef(Some(object)) => match object.as_i31(&*store) {
            Ok(Some(number)) => WarmValue::I31(number.get_i32()),
            _ => WarmValue::Opaque,
        },
        _ => WarmValue::Opaque,
    }
}

/// Reads globals, tables and dropped segments.
pub(crate) fn read(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    visible: &VisibleState,
    memories: Vec<u64>,
) -> Result<WarmState, WarmError> {
    let functions = functions(store, instance, visible)?;
    let mut globals = BTreeMap::new();
    for &index in &visible.globals {
        let name = names::global(index);
        let global = instance.get_global(&mut *store, &name).ok_or_else(|| missing(&name))?;
        let value = global.get(&mut *store);
        globals.insert(index, warm_value(store, &functions, &value));
    }
    if is(Bug::Bake) {
        globals.pop_last();
    }
    let mut tables = BTreeMap::new();
    for &index in &visible.tables {
        let name = names::table(index);
        let table = instance.get_table(&mut *store, &name).ok_or_else(|| missing(&name))?;
        let mut elements = Vec::new();
        for at in 0..table.size(&*store) {
            let element = table.get(&mut *store, at).map_or(WarmValue::Opaque, |element| {
                warm_value(store, &functions, &Val::from(element))
            });
            elements.push(element);
        }
        tables.insert(index, elements);
    }
    let mut flagged = |indices: &[u32], name: fn(u32) -> String| {
        let mut set = BTreeSet::new();
        for &index in indices {
            let name = name(index);
            let flag = instance.get_global(&mut *store, &name).ok_or_else(|| missing(&name))?;
            match flag.get(&mut *store).i32() {
                Some(0) => {}
                Some(-1) => {
                    set.insert(index);
                }
                other => {
                    return Err(WarmError::State(format!("{name} is {other:?}, neither 0 nor -1")));
                }
            }
        }
        Ok::<_, WarmError>(set)
    };
    let dropped_data = flagged(&visible.data, names::data_dropped)?;
    let dropped_elements = flagged(&visible.elements, names::elem_dropped)?;
    Ok(WarmState { memories, globals, tables, dropped_data, dropped_elements })
}

/// Puts a state that was read from one instance into another of the same module.
pub(crate) fn apply(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    state: &WarmState,
) -> Result<(), WarmError> {
    let failed = |what: &str, error: wasmtime::Error| {
        WarmError::State(format!("{what} cannot be set in a new instance: {error:#}"))
    };
    // Small numbers that are references would be rooted for the life of the store.
    let store = &mut RootScope::new(store);
    for (index, value) in &state.globals {
        let name = names::global(*index);
        let global = instance.get_global(&mut *store, &name).ok_or_else(|| missing(&name))?;
        let ty = global.ty(&*store).content().clone();
        let value = val(store, instance, &ty, *value).ok_or_else(|| opaque(&name))?;
        global.set(&mut *store, value).map_err(|e| failed(&name, e))?;
    }
    for (index, elements) in &state.tables {
        let name = names::table(*index);
        let table = instance.get_table(&mut *store, &name).ok_or_else(|| missing(&name))?;
        let ty = wasmtime::ValType::Ref(table.ty(&*store).element().clone());
        let mut size = table.size(&*store);
        for (at, element) in (0u64..).zip(elements) {
            let element = val(store, instance, &ty, *element)
                .and_then(Val::ref_)
                .ok_or_else(|| opaque(&name))?;
            if at < size {
                table.set(&mut *store, at, element).map_err(|e| failed(&name, e))?;
            } else {
                let more = elements.len() as u64 - size;
                table.grow(&mut *store, more, element).map_err(|e| failed(&name, e))?;
                size += more;
            }
        }
    }
    let flags = state.dropped_data.iter().map(|i| names::data_dropped(*i));
    let flags = flags.chain(state.dropped_elements.iter().map(|i| names::elem_dropped(*i)));
    for name in flags.skip(usize::from(is(Bug::Thaw))) {
        let global = instance.get_global(&mut *store, &name).ok_or_else(|| missing(&name))?;
        // Every bit, as the instruction that drops the segment sets them: the guards rely on it.
        global.set(&mut *store, Val::I32(-1)).map_err(|e| failed(&name, e))?;
    }
    Ok(())
}

fn opaque(name: &str) -> WarmError {
    WarmError::State(format!(
        "{name} holds a reference to a host or GC object, which no other instance can hold; clear it at \
         the end of the warm-up"
    ))
}

/// The value in this instance; `None` if only its original instance can hold it.
pub(crate) fn val(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    ty: &wasmtime::ValType,
    value: WarmValue,
) -> Option<Val> {
    Some(match value {
        WarmValue::I32(v) => Val::I32(v),
        WarmValue::I64(v) => Val::I64(v),
        WarmValue::F32(bits) => Val::F32(bits),
        WarmValue::F64(bits) => Val::F64(bits),
        WarmValue::V128(v) => Val::V128(v.into()),
        WarmValue::Null => Val::null_ref(ty.as_ref()?.heap_type()),
        WarmValue::Func(index) => {
            let func = instance.get_func(store.as_context_mut(), &names::func(index))?;
            Val::FuncRef(Some(func))
        }
        WarmValue::I31(number) => {
            let number = I31::new_i32(number)?;
            Val::AnyRef(Some(AnyRef::from_i31(store.as_context_mut(), number)))
        }
        WarmValue::Opaque => return None,
    })
}
