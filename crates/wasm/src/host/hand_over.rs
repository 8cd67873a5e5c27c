//! Bytes that a host function hands to the guest.
//!
//! Promises: an address that the guest names is checked before anything is written there. May break
//! it: a guest whose allocator returns memory in use spoils its own memory, and nothing else.

use afresh_rewrite::names;
use wasmtime::{AsContextMut, Caller, Extern};

use crate::engine::call_path::{CallPath, now};
use crate::host::Host;

/// Maximum calls of the allocator of a guest, one within another, that each have their own stack.
/// Without a limit, an allocator that calls a host function which hands bytes over would map stacks
/// until the process has no mapping left.
const MAX_NESTED: u32 = 16;

/// Passes bytes to the guest from one of its host functions. The guest's own allocator
/// ([`BytesEntry`](crate::BytesEntry) names it) provides the memory, and the guest owns the bytes
/// from then on. Returns `None` when the guest has no room, or when its allocator returns an
/// address outside its memory.
///
/// The allocator runs within the call's limits. Where calls run on a separate stack, it runs on one
/// as well, so it has a full stack even when the guest is deep in its own. At most 16 such calls
/// may be one within another. In a guest that is [asynchronous](crate::GuestOptions::asynchronous)
/// use [`hand_over_async`].
///
/// # Errors
/// The failure of the allocator, its absence, or too many of its calls one within another. The host
/// function has to end with it.
pub fn hand_over(caller: &mut Caller<'_, Host>, bytes: &[u8]) -> wasmtime::Result<Option<u32>> {
    match caller.data().call_path() {
        CallPath::Direct => {
            let func = allocator(caller)?.typed::<i32, i32>(&*caller)?;
            let address = func.call(&mut *caller, length(bytes)?)?;
            place(caller, address, bytes)
        }
        CallPath::Deep => now(hand_over_async(caller, bytes)),
        CallPath::Fiber => Err(wasmtime::Error::msg(
            "a host function of an asynchronous guest hands bytes over by `hand_over_async`",
        )),
    }
}

/// As [`hand_over`], in a host function that may wait.
///
/// # Errors
/// As [`hand_over`].
pub async fn hand_over_async(
    caller: &mut Caller<'_, Host>,
    bytes: &[u8],
) -> wasmtime::Result<Option<u32>> {
    let func = allocator(caller)?.typed::<i32, i32>(&*caller)?;
    let length = length(bytes)?;
    let nested = caller.data().handing_over;
    if nested >= MAX_NESTED {
        return Err(wasmtime::Error::msg(format!(
            "the guest's allocator calls host functions that pass bytes to it, more than {MAX_NESTED} deep"
        )));
    }
    caller.data_mut().handing_over = nested + 1;
    let address = func.call_async(caller.as_context_mut(), length).await;
    caller.data_mut().handing_over = nested;
    place(caller, address?, bytes)
}

fn length(bytes: &[u8]) -> wasmtime::Result<i32> {
    i32::try_from(bytes.len())
        .map_err(|_| wasmtime::Error::msg("the bytes passed to the guest are larger than 2 GiB"))
}

fn allocator(caller: &mut Caller<'_, Host>) -> wasmtime::Result<wasmtime::Func> {
    names::ALLOCATORS
        .iter()
        .find_map(|name| caller.get_export(name).and_then(Extern::into_func))
        .ok_or_else(|| {
            wasmtime::Error::msg(format!(
                "the guest exports no allocator for bytes from its host: {}",
                names::ALLOCATORS.join(", ")
            ))
        })
}

fn place(
    caller: &mut Caller<'_, Host>,
    address: i32,
    bytes: &[u8],
) -> wasmtime::Result<Option<u32>> {
    let address = address as u32;
    let memory = caller
        .get_export(&names::memory(0))
        .and_then(Extern::into_memory)
        .ok_or_else(|| wasmtime::Error::msg("the guest has no memory"))?;
    let there = address != 0 && memory.write(&mut *caller, address as usize, bytes).is_ok();
    Ok(there.then_some(address))
}
