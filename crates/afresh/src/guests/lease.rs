//! A lease: one instance in the warm state, for calls that belong together.

use crate::guests::backend::{Instance, LiveInstance, WarmGuest, dispatch};
use crate::guests::call::{CallInput, Entry};
use crate::{Answer, Call, CallError, Guest, LeaseError, OutputSource, OutputStream, VerifyError};

/// An instance in the warm state. Calls made through one lease see one another's effects; dropping
/// it undoes them all.
pub struct Lease<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) instance: Instance<'a>,
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("guest", self.guest).finish()
    }
}

impl<'a> Lease<'a> {
    #[inline]
    pub(crate) fn begin(guest: &'a Guest) -> Result<Self, LeaseError> {
        let instance = dispatch!(Backend, &guest.inner().backend, warm => warm.lease_instance()?);
        Ok(Self { guest, instance })
    }

    /// An instance that has never run anything but the warm-up, made for this lease and dropped
    /// with it; `None` where instances are always new.
    pub(crate) fn untouched(guest: &'a Guest) -> Result<Option<Self>, LeaseError> {
        let instance = dispatch!(Backend, &guest.inner().backend, warm => warm.lease_untouched()?);
        Ok(instance.map(|instance| Self { guest, instance }))
    }

    /// Calls a handler that takes bytes and gives bytes.
    ///
    /// # Errors
    /// [`CallError`]; the effects of the call stay until the lease is dropped.
    #[inline]
    pub fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        dispatch!(Instance, &mut self.instance, live => live.answer_bytes(self.guest, callee, input))
    }

    /// As [`Lease::call`], but `hear` receives the output of a Linux program at once, piece by
    /// piece, on any [`OutputStream`]. The program waits while `hear` runs, its time passes, and
    /// `false` ends the call. While a program writes nothing, `hear` is called with no bytes, at
    /// least every 100 ms. For other guests `hear` receives the whole answer.
    ///
    /// # Errors
    /// As [`Lease::call`]. The pieces so far may be half of an answer then.
    pub fn call_streaming<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        let callee = function.into();
        dispatch!(Instance, &mut self.instance, live => {
            live.answer_streaming(self.guest, callee, input, hear)
        })
    }

    /// As [`Lease::call`]. `log` receives a Linux program's output that is not part of its answer,
    /// while the program writes it: [`OutputStream::Error`], and of a program that is called
    /// through a port [`OutputStream::Output`]. `log` must bound what it keeps. Other guests log
    /// nothing here: see `Output::Handler` of Wasm guests.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn call_logged<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        dispatch!(Instance, &mut self.instance, live => {
            live.answer_logged(self.guest, callee, input, log)
        })
    }

    /// Time until the next event in a Linux program: zero if some process can run; `None` if all
    /// wait for the caller, and for guests of other kinds.
    #[must_use]
    pub fn due(&self) -> Option<std::time::Duration> {
        dispatch!(Instance, &self.instance, live => live.next_event())
    }

    /// Makes any call.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn ask(&mut self, call: &Call) -> Result<Answer, CallError> {
        let name = call.function.as_str();
        match &call.given {
            CallInput::Bytes(input) => self.call(name, input).map(Answer::Bytes),
            CallInput::Text(texts) => self.call_text(name, texts),
        }
    }

    fn call_text(&mut self, name: &str, texts: &[String]) -> Result<Answer, CallError> {
        dispatch!(Instance, &mut self.instance, live => live.answer_text(self.guest, name, texts))
    }

    /// A unique number for a run from a frozen state, if the guest has one: the same for calls that
    /// continue from one another, another one after each reset, rollback and fork.
    pub fn generation(&mut self) -> Option<u64> {
        dispatch!(Instance, &mut self.instance, live => live.find_generation())
    }

    /// Compares the instance with the warm state: how many bytes of memory differ, and how many
    /// globals, tables, segments or registers. For a micro-VM and a Linux program only the first
    /// difference is counted, and a program is reset first: the comparison is with the initial
    /// state of the next call.
    ///
    /// # Errors
    /// [`VerifyError::Compare`] when the state cannot be read.
    pub fn differences(&mut self) -> Result<(usize, usize), VerifyError> {
        dispatch!(Instance, &mut self.instance, live => live.count_differences())
    }

    /// Drops the instance instead of bringing it back.
    pub fn discard(self) {
        dispatch!(Instance, self.instance, live => live.discard_instance());
    }
}
