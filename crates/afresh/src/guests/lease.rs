//! A lease: one instance in the warm state, for calls that belong together.

use std::ops::Deref;

use crate::guests::backend::{Instance, LeaseControl, LiveInstance, StopCall, WarmGuest, dispatch};
use crate::guests::call::{CallInput, Entry};
use crate::guests::call_cost::{CallBytes, OutputCounter};
use crate::{
    Answer, Call, CallError, CallOptions, Guest, LeaseError, LeaseOptions, OutputSource,
    OutputStream, VerifyError, describe_error,
};

/// An instance in the warm state. Calls of one lease see each other's effects. Dropping the lease
/// undoes them all.
///
/// It borrows its guest. An [`OwnedLease`] does not.
pub struct Lease<'a> {
    pub(crate) instance: Instance<'a>,
    pub(crate) guest: LeasedGuest<'a>,
    /// Bytes of its calls.
    pub(crate) bytes: CallBytes,
    /// The reason why its last failed call was cut short.
    failure: Option<Box<str>>,
}

/// A lease that owns a reference to its guest. It can outlive every other handle, and move to other
/// threads and into `'static` tasks. [`Guest::lease_owned`] returns one.
///
/// ```
/// # #[cfg(feature = "wasm")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use afresh::{Call, Guest, Options};
/// # let wasm = wat::parse_str(r#"(module (memory 1)
/// #   (func (export "add") (param i32) (result i32)
/// #     (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
/// #     (i32.load (i32.const 0))))"#)?;
/// let mut lease = Guest::from_bytes("counter", &wasm, &Options::new())?.lease_owned()?;
/// let adding = std::thread::spawn(move || lease.invoke(&Call::text("add", ["42"])));
/// assert_eq!(adding.join().unwrap()?.text(), "42");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "wasm"))]
/// # fn main() {}
/// ```
pub type OwnedLease = Lease<'static>;

/// Stops the calls of one lease from any thread: the running call, and further ones until the
/// instance is reset. A stopped call fails with [`CallError::Stopped`], and is cut short.
///
/// A running Wasm guest notices a stop only if it was opened with
/// [`Options::interruptible`](crate::Options::interruptible) or with a watch. Other guests always
/// notice it. A session is reset by a [rollback](crate::Session::rollback).
pub struct StopHandle(StopCall);

impl StopHandle {
    /// Stops the calls.
    pub fn stop(&self) {
        (self.0)();
    }
}

impl std::fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StopHandle")
    }
}

/// The guest of a lease.
pub(crate) enum LeasedGuest<'a> {
    Borrowed(&'a Guest),
    Owned(Guest),
}

impl Deref for LeasedGuest<'_> {
    type Target = Guest;

    #[inline]
    fn deref(&self) -> &Guest {
        match self {
            Self::Borrowed(guest) => guest,
            Self::Owned(guest) => guest,
        }
    }
}

/// The difference between an instance and the warm state; nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceDifference {
    /// Bytes of memory that differ.
    pub bytes: usize,
    /// Globals, tables, segments or registers that differ.
    pub items: usize,
}

impl InstanceDifference {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("guest", &*self.guest).finish()
    }
}

impl OwnedLease {
    /// A lease that keeps its guest.
    pub(crate) fn begin_owned(guest: &Guest, options: &LeaseOptions) -> Result<Self, LeaseError> {
        let instance =
            dispatch!(Backend, &guest.inner().backend, warm => warm.owned_instance(options)?);
        Ok(Self::owned(guest.clone(), instance))
    }

    pub(crate) fn owned(guest: Guest, instance: Instance<'static>) -> Self {
        let bytes = CallBytes::default();
        Self { instance, guest: LeasedGuest::Owned(guest), bytes, failure: None }
    }
}

impl<'a> Lease<'a> {
    #[inline]
    pub(crate) fn begin(guest: &'a Guest) -> Result<Self, LeaseError> {
        let instance = dispatch!(Backend, &guest.inner().backend, warm => warm.lease_instance()?);
        Ok(Self::new(guest, instance))
    }

    pub(crate) fn begin_with(guest: &'a Guest, options: &LeaseOptions) -> Result<Self, LeaseError> {
        let instance =
            dispatch!(Backend, &guest.inner().backend, warm => warm.instance_with(options)?);
        Ok(Self::new(guest, instance))
    }

    #[inline]
    pub(crate) fn new(guest: &'a Guest, instance: Instance<'a>) -> Self {
        let bytes = CallBytes::default();
        Self { instance, guest: LeasedGuest::Borrowed(guest), bytes, failure: None }
    }

    /// An instance that has never run anything but the warm-up, made for this lease and dropped
    /// with it; `None` where instances are always new.
    pub(crate) fn untouched(guest: &'a Guest) -> Result<Option<Self>, LeaseError> {
        let instance = dispatch!(Backend, &guest.inner().backend, warm => warm.lease_untouched()?);
        Ok(instance.map(|instance| Self::new(guest, instance)))
    }

    /// Notes a call that was cut short.
    #[inline]
    pub(crate) fn noted<T>(&mut self, called: Result<T, CallError>) -> Result<T, CallError> {
        if let Err(error) = &called {
            self.note(error);
        }
        called
    }

    #[cold]
    fn note(&mut self, error: &CallError) {
        if error.is_cut_short() {
            self.failure = Some(describe_error(error).into());
        }
    }

    /// The reason if a call of this lease was cut short. The state of the instance is then unknown.
    #[must_use]
    pub fn failed(&self) -> Option<&str> {
        let unknown = dispatch!(Instance, &self.instance, live => live.is_spoiled());
        let how = unknown.then_some("a call of the instance was cut short");
        self.failure.as_deref().or(how)
    }

    /// A handle that stops the calls of this lease from another thread.
    #[must_use]
    pub fn stop_handle(&mut self) -> StopHandle {
        StopHandle(dispatch!(Instance, &mut self.instance, live => live.call_stopper()))
    }

    /// Calls a handler that takes and returns bytes.
    ///
    /// # Errors
    /// [`CallError`]. The effects of the call stay until the lease is dropped.
    #[inline]
    pub fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        let called = dispatch!(Instance, &mut self.instance, live => {
            live.answer_bytes(&self.guest, callee, input)
        });
        self.bytes.add(input.len(), &called);
        self.noted(called)
    }

    /// As [`Lease::call`], with options of this call.
    ///
    /// # Errors
    /// As [`Lease::call`]; [`CallError::Option`] for one that the guest cannot have.
    pub fn call_with<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        options: &CallOptions,
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        let called = dispatch!(Instance, &mut self.instance, live => {
            live.limited(options, callee.name(), |live| {
                live.answer_bytes(&self.guest, callee, input)
            })
        });
        self.bytes.add(input.len(), &called);
        self.noted(called)
    }

    /// As [`Lease::call`], but `hear` receives the output of a Linux program when it is written, on
    /// each [`OutputStream`]. While `hear` runs the program waits, and its time limit continues. If
    /// `hear` returns `false` the call ends. While a program writes nothing, `hear` is called
    /// without bytes at least every 100 ms. For other guests `hear` receives the whole answer.
    ///
    /// # Errors
    /// As [`Lease::call`]. The received pieces may then be a part of an answer.
    pub fn call_streaming<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.call_streaming_with(function, input, &CallOptions::new(), hear)
    }

    /// As [`Lease::call_streaming`], with options of this call.
    ///
    /// # Errors
    /// As [`Lease::call_streaming`]; [`CallError::Option`] for one that the guest cannot have.
    pub fn call_streaming_with<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        options: &CallOptions,
        mut hear: impl FnMut(OutputSource, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        let callee = function.into();
        let output = OutputCounter::default();
        let counter = output.clone();
        let hear = move |from, piece: &[u8]| {
            counter.add(piece);
            hear(from, piece)
        };
        let called = dispatch!(Instance, &mut self.instance, live => {
            live.limited(options, callee.name(), |live| {
                live.answer_streaming(&self.guest, callee, input, hear)
            })
        });
        self.bytes.add_streamed(input.len(), &output);
        self.noted(called)
    }

    /// As [`Lease::call`]. `log` receives output of a Linux program that is not part of its answer
    /// when it is written: [`OutputStream::Error`], and also [`OutputStream::Output`] if the
    /// program is called through a port. `log` must bound the output that it keeps. For other
    /// guests it is not called: see `Output::Handler` of Wasm guests.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn call_logged<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        self.call_logged_with(function, input, &CallOptions::new(), log)
    }

    /// As [`Lease::call_logged`], with options of this call.
    ///
    /// # Errors
    /// As [`Lease::call_logged`]; [`CallError::Option`] for one that the guest cannot have.
    pub fn call_logged_with<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        options: &CallOptions,
        mut log: impl FnMut(OutputStream, &[u8]) + Send + 'static,
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        let output = OutputCounter::default();
        let counter = output.clone();
        let log = move |stream, piece: &[u8]| {
            counter.add(piece);
            log(stream, piece);
        };
        let called = dispatch!(Instance, &mut self.instance, live => {
            live.limited(options, callee.name(), |live| {
                live.answer_logged(&self.guest, callee, input, log)
            })
        });
        self.bytes.add_streamed(input.len(), &output);
        self.bytes.add(0, &called);
        self.noted(called)
    }

    /// Time until the next event in a Linux program: zero if a process can run, `None` if all wait
    /// for the caller. `None` for other kinds of guests.
    #[must_use]
    pub fn due(&self) -> Option<std::time::Duration> {
        dispatch!(Instance, &self.instance, live => live.next_event())
    }

    /// Makes any call.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn invoke(&mut self, call: &Call) -> Result<Answer, CallError> {
        let name = call.function.as_str();
        match &call.given {
            CallInput::Bytes(input) => self.call(name, input).map(Answer::Bytes),
            CallInput::Text(texts) => {
                let called = dispatch!(Instance, &mut self.instance, live => {
                    live.answer_text(&self.guest, name, texts)
                });
                self.bytes.add_texts(texts, &called);
                self.noted(called)
            }
        }
    }

    /// As [`Lease::invoke`], with options of this call.
    ///
    /// # Errors
    /// As [`Lease::call_with`].
    pub fn invoke_with(&mut self, call: &Call, options: &CallOptions) -> Result<Answer, CallError> {
        let name = call.function.as_str();
        match &call.given {
            CallInput::Bytes(input) => self.call_with(name, input, options).map(Answer::Bytes),
            CallInput::Text(texts) => {
                let called = dispatch!(Instance, &mut self.instance, live => {
                    live.limited(options, name, |live| live.answer_text(&self.guest, name, texts))
                });
                self.bytes.add_texts(texts, &called);
                self.noted(called)
            }
        }
    }

    /// A unique number of the run from a frozen state, if the kind of guest has one. It changes
    /// with each reset, rollback and fork, and not between other calls.
    pub fn generation(&mut self) -> Option<u64> {
        dispatch!(Instance, &mut self.instance, live => live.find_generation())
    }

    /// Compares the instance with the warm state. For micro-VMs and Linux programs only the first
    /// difference is counted. A Linux program is reset first, so the comparison is with the initial
    /// state of the next call.
    ///
    /// # Errors
    /// [`VerifyError::Compare`] when the state cannot be read.
    pub fn differences(&mut self) -> Result<InstanceDifference, VerifyError> {
        dispatch!(Instance, &mut self.instance, live => live.count_differences())
    }

    /// Drops the instance instead of returning it to the pool.
    pub fn discard(self) {
        dispatch!(Instance, self.instance, live => live.discard_instance());
    }
}
