//! Handlers that take and give bytes, and bytes that a host function hands to the guest.
//!
//! Promises: bytes go where the guest made room for them, and an address that the guest names is
//! checked before anything is written or read there. May break it: a guest whose allocator returns
//! memory in use spoils its own memory, and nothing else.

use afresh_rewrite::names;
use wasmtime::{AsContextMut, Caller, Extern, Instance, Val};

use crate::call_path::{AsyncStore, CallPath, now};
use crate::dynamic::call_dynamic;
use crate::host::Host;
use crate::lease::Entry;
use crate::stores::CallLimits;
use crate::{CallError, Lease, Warm};

/// A handler that takes and gives bytes, resolved by [`crate::Warm::bytes_entry`]. It has one of
/// two forms:
///
/// * `(len: i32) -> i64`. The guest also exports `afresh_buffer(len: i32) -> i32`, which returns
///   the address of an input buffer; the handler reads its input there and returns
///   `address << 32 | length` of its answer.
/// * `(address: i32, len: i32)`, which reads its input where the guest's own allocator has made
///   room for it: the first of `afresh_alloc`, `host_alloc`, `alloc` and `malloc` that it exports,
///   `(len: i32) -> i32`. The guest and its allocator decide when the input is freed. It returns an
///   answer as above, or an `i32`, which is a status like a program's: anything but 0 is a failure,
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

impl Warm {
    /// A handle for calls of a handler that takes and returns bytes.
    ///
    /// # Errors
    /// [`CallError::NoSuchExport`] when the handler, or the allocator for its input, is missing.
    pub fn bytes_entry(&self, name: &str) -> Result<BytesEntry, CallError> {
        let ty = self.function_type(name)?;
        if ty.params().len() != 2 {
            let handler = Handler::Buffer(self.entry(name)?);
            return Ok(BytesEntry { room: self.entry(names::BUFFER)?, handler });
        }
        let known = |allocator: &&str| self.function_type(allocator).is_ok();
        let allocator = names::ALLOCATORS.iter().copied().find(known);
        let room = self.entry(allocator.unwrap_or(names::ALLOCATORS[0]))?;
        let handler = match ty.result(0) {
            None => Handler::Silent(self.entry(name)?),
            Some(ty) if ty.is_i64() => Handler::Answer(self.entry(name)?),
            Some(_) => Handler::Status(self.entry(name)?),
        };
        Ok(BytesEntry { room, handler })
    }
}

impl Lease<'_> {
    /// Calls a handler that takes and gives bytes.
    ///
    /// # Errors
    /// [`CallError`]; [`CallError::Interface`] when the guest names memory that it does not have.
    pub fn call_bytes(&mut self, entry: &BytesEntry, input: &[u8]) -> Result<Vec<u8>, CallError> {
        let len = BytesEntry::length(input)?;
        let address = self.invoke(&entry.room, len)?;
        self.put_input(address, input)?;
        match &entry.handler {
            Handler::Buffer(handler) => {
                let packed = self.invoke(handler, len)?;
                self.take_answer(packed)
            }
            Handler::Answer(handler) => {
                let packed = self.invoke(handler, (address, len))?;
                self.take_answer(packed)
            }
            Handler::Status(handler) => ended(self.invoke(handler, (address, len))?),
            Handler::Silent(handler) => self.invoke(handler, (address, len)).map(|()| Vec::new()),
        }
    }

    /// As [`Lease::call_bytes`], for a guest with [`crate::GuestOptions::asynchronous`].
    ///
    /// # Errors
    /// As [`Lease::invoke_async`]; [`CallError::Interface`] when the guest names memory that it
    /// does not have.
    pub async fn call_bytes_async(
        &mut self,
        entry: &BytesEntry,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let len = BytesEntry::length(input)?;
        let address = self.invoke_async(&entry.room, len).await?;
        self.put_input(address, input)?;
        match &entry.handler {
            Handler::Buffer(handler) => {
                let packed = self.invoke_async(handler, len).await?;
                self.take_answer(packed)
            }
            Handler::Answer(handler) => {
                let packed = self.invoke_async(handler, (address, len)).await?;
                self.take_answer(packed)
            }
            Handler::Status(handler) => ended(self.invoke_async(handler, (address, len)).await?),
            Handler::Silent(handler) => {
                self.invoke_async(handler, (address, len)).await.map(|()| Vec::new())
            }
        }
    }
}

/// Passes bytes to a handler of an instance that is being warmed up; its answer is dropped.
pub(crate) async fn warm_up(
    way: CallPath,
    store: &mut impl AsyncStore,
    instance: Instance,
    name: &str,
    input: &[u8],
) -> Result<(), CallError> {
    let broken = CallError::Interface;
    let limits = CallLimits::default();
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

/// Passes bytes to the guest from one of its host functions. The guest's own allocator
/// ([`BytesEntry`] names it) provides the memory, and the guest owns the bytes from then on.
/// Returns `None` when the guest has no room, or when its allocator returns an address outside its
/// memory.
///
/// The allocator runs within the call's limits. Where calls run on a separate stack, it runs on one
/// as well, so it has a full stack even when the guest is deep in its own. In a guest that is
/// [asynchronous](crate::GuestOptions::asynchronous) use [`hand_over_async`].
///
/// # Errors
/// What ended the allocator, or that the guest exports none. The host function has to end with it.
pub fn hand_over(caller: &mut Caller<'_, Host>, bytes: &[u8]) -> wasmtime::Result<Option<u32>> {
    match caller.data().way() {
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
    let address = func.call_async(caller.as_context_mut(), length(bytes)?).await?;
    place(caller, address, bytes)
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
