//! Calls by name, with values whose number and types are known only at run time; and the
//! translation of their failures.

use wasmtime::{AsContext, Instance, ThrownException, Trap, Val, ValType};

use crate::call::scope::forget_exception;
use crate::call::store_calls::{ASYNCHRONOUS, AsyncStore};
use crate::call::stores::CallLimits;
use crate::engine::call_path::CallPath;
use crate::error::{PluginFailure, join_names, without_backtrace};
use crate::host::watch::{CpuTimeUsed, StoppedCall};
use crate::{CallError, WarmError};

/// Translates a failed wasmtime call.
pub(crate) fn call_error(error: wasmtime::Error, limits: CallLimits) -> CallError {
    if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
        return CallError::Exit(exit.0);
    }
    if let Some(PluginFailure { status, message }) = error.downcast_ref() {
        return CallError::Failed { status: *status, message: message.clone() };
    }
    if error.is::<ThrownException>() {
        return CallError::Exception(format!("{error:#}"));
    }
    if error.is::<StoppedCall>() {
        return CallError::Stopped;
    }
    if error.is::<CpuTimeUsed>() {
        return CallError::CpuTime(limits.cpu_time.unwrap_or_default());
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => CallError::Timeout(limits.timeout.unwrap_or_default()),
        Some(Trap::OutOfFuel) => CallError::OutOfFuel(limits.fuel.unwrap_or_default()),
        Some(trap) => {
            let (message, backtrace) = without_backtrace(&error);
            CallError::Trap { trap: *trap, message, backtrace }
        }
        None if error.to_string().contains(ASYNCHRONOUS) => CallError::Asynchronous,
        None => CallError::Host(error),
    }
}

/// The error of an instance that could not be made. Start functions end at the limits of a call.
pub(crate) fn start_error(error: wasmtime::Error, limits: CallLimits) -> WarmError {
    let ended = matches!(error.downcast_ref(), Some(Trap::Interrupt | Trap::OutOfFuel));
    match ended || error.is::<StoppedCall>() {
        true => WarmError::Call { name: "start".to_owned(), error: call_error(error, limits) },
        false => WarmError::Instantiate(error),
    }
}

/// Parts of the errors that wasmtime returns for arguments it refuses.
const REFUSED: [&str; 2] = [
    "argument type mismatch",
    "attempted to use a garbage-collected object that has been unrooted",
];

/// Whether a value could be a `ty`. References that are not null are left to wasmtime: it reports,
/// before anything runs, whether one belongs to this store and is still rooted; querying it here
/// would panic.
fn may_match(store: impl AsContext, value: &Val, ty: &ValType) -> bool {
    match value {
        Val::FuncRef(Some(_))
        | Val::ExternRef(Some(_))
        | Val::AnyRef(Some(_))
        | Val::ExnRef(Some(_))
        | Val::ContRef(_) => ty.is_ref(),
        _ => value.matches_ty(store, ty).unwrap_or(false),
    }
}

/// Calls an export by name with dynamic values, within the limits that the store has now.
pub(crate) async fn call_dynamic(
    way: CallPath,
    store: &mut impl AsyncStore,
    instance: Instance,
    name: &str,
    arguments: &[Val],
    limits: CallLimits,
) -> Result<Vec<Val>, CallError> {
    let Some(func) = instance.get_func(&mut *store, name) else {
        let available = instance
            .exports(&mut *store)
            .filter(|e| !e.name().starts_with(afresh_rewrite::names::PREFIX))
            .filter_map(|e| Some((e.name().to_owned(), e.into_func()?)))
            .map(|(name, _)| name);
        let available = join_names(available.collect());
        return Err(CallError::NoSuchExport { name: name.to_owned(), available });
    };
    let ty = func.ty(&*store);
    let wrong = |reason: String| CallError::Arguments {
        name: name.to_owned(),
        expected: ty.to_string(),
        reason,
    };
    if ty.params().len() != arguments.len() {
        return Err(wrong(format!("{} given, {} wanted", arguments.len(), ty.params().len())));
    }
    for (position, (ty, value)) in ty.params().zip(arguments).enumerate() {
        if !may_match(&*store, value, &ty) {
            return Err(wrong(format!("argument {} is not of type {ty}", position + 1)));
        }
    }
    let mut results = vec![Val::I32(0); ty.results().len()];
    let result = way.call(func, store, arguments, &mut results).await;
    if let Some(failure) = store.as_context().data().failure() {
        return Err(CallError::Wasi(failure.to_owned()));
    }
    match result {
        Ok(()) => Ok(results),
        Err(error) => {
            forget_exception(&mut *store);
            if REFUSED.contains(&&*error.to_string()) {
                return Err(wrong(error.root_cause().to_string()));
            }
            match call_error(error, limits) {
                // A command that ends itself with success has succeeded.
                CallError::Exit(0) => Ok(Vec::new()),
                other => Err(other),
            }
        }
    }
}
