//! Handlers that take and give bytes: their forms, and their call in a warm-up.

use afresh_rewrite::names;
use wasmtime::{Instance, Val};

use crate::CallError;
use crate::call::dynamic::call_dynamic;
use crate::call::entry::Entry;
use crate::call::store_calls::AsyncStore;
use crate::call::stores::CallLimits;
use crate::engine::call_path::CallPath;

/// A handler that takes and returns bytes, resolved by [`crate::Warm::bytes_entry`]. It has one of
/// two forms:
///
/// * `(len: i32) -> i64`. The guest also exports `afresh_buffer(len: i32) -> i32`, which returns
///   the address of an input buffer; the handler reads its input there and returns
///   `address << 32 | length` of its answer.
/// * `(address: i32, len: i32)`, which reads its input from memory of the guest's own allocator:
///   the first of `afresh_alloc`, `host_alloc`, `alloc` and `malloc` that it exports, `(len: i32)
///   -> i32`. The guest and its allocator decide when the input is freed. It returns an answer as
///   above, or an `i32`, which is a status like a program's: anything but 0 is a failure,
///   [`CallError::Exit`]; or nothing. Without an answer the call gives no bytes.
#[derive(Clone, Debug)]
pub struct BytesEntry {
    pub(crate) room: Entry<i32, i32>,
    pub(crate) handler: Handler,
}

/// The forms of a handler.
#[derive(Clone, Debug)]
pub(crate) enum Handler {
    Buffer(Entry<i32, i64>),
    Answer(Entry<(i32, i32), i64>),
    Status(Entry<(i32, i32), i32>),
    Silent(Entry<(i32, i32), ()>),
}

/// The result of a handler of the second form.
pub(crate) fn ended(status: i32) -> Result<Vec<u8>, CallError> {
    match status {
        0 => Ok(Vec::new()),
        status => Err(CallError::Exit(status)),
    }
}

impl BytesEntry {
    /// The length of an input, as the guest takes it.
    pub(crate) fn length(input: &[u8]) -> Result<i32, CallError> {
        i32::try_from(input.len())
            .map_err(|_| CallError::Interface("the input is larger than 2 GiB".to_owned()))
    }
}

/// Passes bytes to a handler of an instance that is being warmed up; its answer is dropped.
pub(crate) async fn warm_up(
    way: CallPath,
    store: &mut impl AsyncStore,
    instance: Instance,
    name: &str,
    input: &[u8],
    limits: CallLimits,
) -> Result<(), CallError> {
    let broken = CallError::Interface;
    let length = Val::I32(BytesEntry::length(input)?);
    let func = instance.get_func(&mut *store, name);
    let takes_address = func.is_some_and(|func| func.ty(&*store).params().len() == 2);
    let room = match takes_address {
        false => names::BUFFER,
        true => {
            let mut known = |name: &&str| instance.get_func(&mut *store, name).is_some();
            let first = names::ALLOCATORS.iter().copied().find(|name| known(name));
            first.unwrap_or(names::ALLOCATORS[0])
        }
    };
    let given = call_dynamic(way, store, instance, room, &[length], limits).await?;
    let [address @ Val::I32(at)] = given[..] else {
        return Err(broken(format!("{room} does not give an address")));
    };
    let memory = instance
        .get_memory(&mut *store, &names::memory(0))
        .ok_or_else(|| broken("the guest has no memory".to_owned()))?;
    let at = at as u32 as usize;
    if at == 0 && !input.is_empty() {
        return Err(broken("the guest has no room for the input".to_owned()));
    }
    memory
        .write(&mut *store, at, input)
        .map_err(|_| broken("the input is outside the guest's memory".to_owned()))?;
    let arguments = if takes_address { &[address, length][..] } else { &[length][..] };
    let results = call_dynamic(way, store, instance, name, arguments, limits).await?;
    match results[..] {
        [Val::I32(status)] if takes_address => ended(status).map(drop),
        _ => Ok(()),
    }
}
