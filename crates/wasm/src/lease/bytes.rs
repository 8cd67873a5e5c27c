//! Calls of handlers that take and give bytes.
//!
//! Promises: bytes go where the guest made room for them, and an address that the guest names is
//! checked before anything is written or read there. May break it: a guest whose allocator returns
//! memory in use spoils its own memory, and nothing else.

use afresh_rewrite::names;

use crate::call::bytes_entry::{BytesEntry, Handler, ended};
use crate::{CallError, Lease, Warm};

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
    /// Calls a handler that takes and returns bytes.
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
