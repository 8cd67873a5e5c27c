//! The result of a call, in a form that compares across instances and stores.

use afresh_wasm::CallError;
use afresh_wasm::wasmtime::{Error, Trap, Val};

/// Results by their bits, references by properties that every store can read.
#[must_use]
pub fn values(values: &[Val]) -> String {
    let mut shown = String::new();
    for value in values {
        if !shown.is_empty() {
            shown.push(' ');
        }
        shown += &match value {
            Val::I32(v) => format!("i32:{v}"),
            Val::I64(v) => format!("i64:{v}"),
            Val::F32(bits) => format!("f32:{bits:#x}"),
            Val::F64(bits) => format!("f64:{bits:#x}"),
            Val::V128(v) => format!("v128:{:#x}", v.as_u128()),
            other => match other.ref_() {
                Some(reference) if reference.is_null() => "null".to_owned(),
                _ => "reference".to_owned(),
            },
        };
    }
    shown
}

/// A failure of plain wasmtime's.
#[must_use]
pub fn failure(error: &Error) -> String {
    match error.downcast_ref::<Trap>() {
        Some(trap) => format!("trap: {trap:?}"),
        // An uncaught exception, or an error of a host function.
        None => "thrown".to_owned(),
    }
}

/// A call through a lease.
#[must_use]
pub fn lease(result: &Result<Vec<Val>, CallError>) -> String {
    match result {
        Ok(results) => values(results),
        Err(CallError::Trap { trap, .. }) => format!("trap: {trap:?}"),
        Err(error @ (CallError::Arguments { .. } | CallError::NoSuchExport { .. })) => {
            format!("not called: {error}")
        }
        Err(_) => "thrown".to_owned(),
    }
}
