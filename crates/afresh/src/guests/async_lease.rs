//! Leases of tasks: waiting for an instance and for an answer blocks no thread of the runtime.
//!
//! Promises: no runtime is needed, and any may poll. A call that is dropped ends, and its instance
//! comes back pristine or is replaced. In a child of a fork, calls of the parent are closed, and
//! dropping one waits for nothing. May break it: a call that cannot be interrupted ends by
//! itself, at its time limit; its thread and its instance are in use until then.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use afresh_memory::fork;
use afresh_pool::{JobHandle, run_blocking};

use crate::guests::backend::{LeaseControl, LiveInstance, StopCall, WarmGuest, dispatch};
use crate::guests::call::{CallInput, Entry, Function};
use crate::{Answer, Call, CallError, CallOptions, Guest, LeaseError, LeaseOptions, OwnedLease};

/// An [`OwnedLease`] whose calls are futures; [`Guest::lease_async`] takes one.
///
/// A call runs on a thread for blocking calls, which tasks of the whole process share. A Wasm guest
/// whose host functions are asynchronous (`GuestOptions::asynchronous` of `afresh::wasm`) runs in
/// the task itself, which must be one of tokio.
///
/// Dropping the future of a call ends the call: a micro-VM at once, a Linux program within 100 ms,
/// a Wasm guest within 10 ms if it was opened with
/// [`Options::interruptible`](crate::Options::interruptible). The lease is then closed, and its
/// instance goes back to the pool.
///
/// ```
/// # #[cfg(feature = "wasm")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use afresh::{Call, CallError, Guest, Options};
/// # let wasm = wat::parse_str(r#"(module (memory 1)
/// #   (func (export "add") (param i32) (result i32)
/// #     (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
/// #     (i32.load (i32.const 0))))"#)?;
/// # let guest = Guest::from_bytes("counter", &wasm, &Options::new())?;
/// # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
/// # let done: Result<(), CallError> = runtime.block_on(async {
/// let mut lease = guest.lease_async().await?;
/// lease.invoke(Call::text("add", ["40"])).await?;
/// assert_eq!(lease.invoke(Call::text("add", ["2"])).await?.text(), "42");
/// # Ok(())
/// # });
/// # done?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "wasm"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct AsyncLease {
    /// None while a call runs, and after one was dropped.
    lease: Option<OwnedLease>,
}

/// A function that a call on another thread names.
enum OwnedEntry {
    Name(String),
    Function(Function),
}

impl OwnedEntry {
    fn new(entry: Entry<'_>) -> Self {
        match entry {
            Entry::Name(name) => Self::Name(name.to_owned()),
            Entry::Function(function) => Self::Function(function.clone()),
        }
    }

    fn entry(&self) -> Entry<'_> {
        match self {
            Self::Name(name) => Entry::Name(name),
            Self::Function(function) => Entry::Function(function),
        }
    }
}

impl AsyncLease {
    /// Waits for an instance of the guest.
    pub(crate) async fn begin(guest: &Guest, options: LeaseOptions) -> Result<Self, LeaseError> {
        let instance =
            dispatch!(Backend, &guest.inner().backend, warm => warm.async_instance(options).await?);
        Ok(Self { lease: Some(OwnedLease::owned(guest.clone(), instance)) })
    }

    /// Whether a call was dropped before its end. Every later one is refused.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lease.is_none()
    }

    /// The lease, for operations that do not wait; `None` if it is closed.
    pub fn get_mut(&mut self) -> Option<&mut OwnedLease> {
        self.lease.as_mut()
    }

    /// The lease, for calls that block; `None` if it is closed.
    #[must_use]
    pub fn into_inner(self) -> Option<OwnedLease> {
        self.lease
    }

    /// As [`Lease::call`](crate::Lease::call).
    ///
    /// # Errors
    /// As [`Lease::call`](crate::Lease::call); [`LeaseError::Closed`] after a call that was
    /// dropped, [`LeaseError::Create`] when the host has no thread for it, which leaves the lease
    /// as it was.
    pub async fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: impl Into<Vec<u8>>,
    ) -> Result<Vec<u8>, CallError> {
        self.call_with(function, input, &CallOptions::new()).await
    }

    /// As [`AsyncLease::call`], with options of this call.
    ///
    /// # Errors
    /// As [`AsyncLease::call`]; [`CallError::Option`] for one that the guest cannot have.
    pub async fn call_with<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: impl Into<Vec<u8>>,
        options: &CallOptions,
    ) -> Result<Vec<u8>, CallError> {
        let (entry, input, options) = (OwnedEntry::new(function.into()), input.into(), *options);
        if self.is_task() {
            let answer = self.run_in_task(entry.entry(), &CallInput::Bytes(input), options).await?;
            return Ok(answer.into_bytes());
        }
        self.run(move |lease| lease.call_with(entry.entry(), &input, &options)).await
    }

    /// As [`Lease::invoke`](crate::Lease::invoke).
    ///
    /// # Errors
    /// As [`AsyncLease::call`].
    pub async fn invoke(&mut self, call: Call) -> Result<Answer, CallError> {
        self.invoke_with(call, &CallOptions::new()).await
    }

    /// As [`AsyncLease::invoke`], with options of this call.
    ///
    /// # Errors
    /// As [`AsyncLease::call_with`].
    pub async fn invoke_with(
        &mut self,
        call: Call,
        options: &CallOptions,
    ) -> Result<Answer, CallError> {
        let options = *options;
        if self.is_task() {
            return self.run_in_task(Entry::Name(&call.function), &call.given, options).await;
        }
        self.run(move |lease| lease.invoke_with(&call, &options)).await
    }

    /// Whether its calls run in the task.
    fn is_task(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| dispatch!(Instance, &lease.instance, live => live.runs_in_task()))
    }

    /// Makes a call in the task. A lease that is dropped with the future ends, and its instance is
    /// replaced.
    async fn run_in_task(
        &mut self,
        entry: Entry<'_>,
        given: &CallInput,
        options: CallOptions,
    ) -> Result<Answer, CallError> {
        let mut lease = self.lease.take().ok_or(LeaseError::Closed)?;
        let guest = lease.guest.clone();
        let called = dispatch!(Instance, &mut lease.instance, live => {
            match live.limit_call(&options, entry.name()) {
                Err(error) => Err(error),
                Ok(limited) => match given {
                    CallInput::Bytes(input) => {
                        let answer = limited.lease.answer_bytes_async(&guest, entry, input).await;
                        answer.map(Answer::Bytes)
                    }
                    CallInput::Text(texts) => {
                        limited.lease.answer_text_async(&guest, entry.name(), texts).await
                    }
                },
            }
        });
        let called = lease.noted(called);
        self.lease = Some(lease);
        called
    }

    /// Runs a call on a thread for blocking calls.
    async fn run<T: Send + 'static>(
        &mut self,
        call: impl FnOnce(&mut OwnedLease) -> Result<T, CallError> + Send + 'static,
    ) -> Result<T, CallError> {
        let mut lease = self.lease.take().ok_or(LeaseError::Closed)?;
        let stop = dispatch!(Instance, &mut lease.instance, live => live.call_stopper());
        let call = match BlockingCall::start(lease, stop, call) {
            Ok(call) => call,
            Err((lease, error)) => {
                self.lease = Some(*lease);
                return Err(error.into());
            }
        };
        let called = poll_fn(|context| call.poll(context)).await;
        let (lease, answer) = called.ok_or(LeaseError::Closed)?;
        self.lease = Some(lease);
        answer
    }
}

impl Guest {
    /// Takes an instance in the warm state. If all instances are in use
    /// ([`Options::limits`](crate::Options::limits)), it waits for one without blocking a thread,
    /// in the order of the calls. Dropping the future ends the wait, so a runtime's timeout can
    /// limit it.
    ///
    /// If no instance is idle and the limit is not reached, the polling thread makes one, as
    /// [`Guest::lease`] does.
    ///
    /// # Errors
    /// As [`Guest::lease`], but a pool at its limit is no error.
    pub async fn lease_async(&self) -> Result<AsyncLease, LeaseError> {
        AsyncLease::begin(self, LeaseOptions::new()).await
    }

    /// As [`Guest::lease_async`], with options of this lease.
    ///
    /// # Errors
    /// As [`Guest::lease_async`]; [`LeaseError::Option`] for one that the guest cannot have.
    pub async fn lease_async_with(&self, options: &LeaseOptions) -> Result<AsyncLease, LeaseError> {
        AsyncLease::begin(self, *options).await
    }

    /// As [`Guest::call`], waiting as a task does; see [`AsyncLease`].
    ///
    /// # Errors
    /// As [`AsyncLease::call`].
    pub async fn call_async<'f>(
        &self,
        function: impl Into<Entry<'f>>,
        input: impl Into<Vec<u8>>,
    ) -> Result<Vec<u8>, CallError> {
        self.call_async_with(function, input, &CallOptions::new()).await
    }

    /// As [`Guest::call_async`], with options of this call.
    ///
    /// # Errors
    /// As [`AsyncLease::call_with`].
    pub async fn call_async_with<'f>(
        &self,
        function: impl Into<Entry<'f>>,
        input: impl Into<Vec<u8>>,
        options: &CallOptions,
    ) -> Result<Vec<u8>, CallError> {
        let (entry, input) = (OwnedEntry::new(function.into()), input.into());
        self.lease_async().await?.call_with(entry.entry(), input, options).await
    }

    /// As [`Guest::invoke`], waiting as a task does; see [`AsyncLease`].
    ///
    /// # Errors
    /// As [`AsyncLease::call`].
    pub async fn invoke_async(&self, call: Call) -> Result<Answer, CallError> {
        self.lease_async().await?.invoke(call).await
    }

    /// As [`Guest::invoke_async`], with options of this call.
    ///
    /// # Errors
    /// As [`AsyncLease::call_with`].
    pub async fn invoke_async_with(
        &self,
        call: Call,
        options: &CallOptions,
    ) -> Result<Answer, CallError> {
        self.lease_async().await?.invoke_with(call, options).await
    }
}

/// The result of a call on another thread, or its panic.
type Outcome<T> = std::thread::Result<(OwnedLease, Result<T, CallError>)>;

/// The stage of a call on another thread, with the waker of the task that awaits it.
enum Stage<T> {
    /// It waits for its thread.
    Queued(Box<OwnedLease>, Option<Waker>),
    Running(Option<Waker>),
    Done(Box<Outcome<T>>),
    /// Nothing awaits it.
    Dropped,
}

impl<T> Stage<T> {
    /// The place of the waker, until the call is done.
    fn waker_mut(&mut self) -> Option<&mut Option<Waker>> {
        match self {
            Self::Queued(_, waker) | Self::Running(waker) => Some(waker),
            Self::Done(_) | Self::Dropped => None,
        }
    }
}

/// A call on another thread. Dropping it stops the call, or withdraws it from the queue of calls
/// that wait for a thread: its lease ends at once then.
struct BlockingCall<T> {
    stage: Arc<Mutex<Stage<T>>>,
    job: JobHandle,
    stop: StopCall,
    /// The process that has its thread. In a child of a fork that thread may hold the lock, and the
    /// call never ends.
    generation: u32,
}

/// Locks a stage. No panic leaves one half-changed. Neither a waker nor an outcome is dropped under
/// the lock: both are foreign code.
fn locked<T>(stage: &Mutex<Stage<T>>) -> MutexGuard<'_, Stage<T>> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> BlockingCall<T> {
    fn is_here(&self) -> bool {
        self.generation == fork::generation()
    }
}

impl<T: Send + 'static> BlockingCall<T> {
    /// Queues a call. Without a thread for it, the lease comes back with the cause.
    fn start(
        lease: OwnedLease,
        stop: StopCall,
        call: impl FnOnce(&mut OwnedLease) -> Result<T, CallError> + Send + 'static,
    ) -> Result<Self, (Box<OwnedLease>, LeaseError)> {
        let stage = Arc::new(Mutex::new(Stage::Queued(Box::new(lease), None)));
        let shared = Arc::clone(&stage);
        let run = move || {
            let Some(mut lease) = begin(&shared).map(|lease| *lease) else { return };
            let answer = catch_unwind(AssertUnwindSafe(|| call(&mut lease)));
            let outcome = match answer {
                Ok(answer) => Ok((lease, answer)),
                Err(panic) => {
                    // The unwound code may have left the instance in an unknown state.
                    lease.discard();
                    Err(panic)
                }
            };
            finish(&shared, outcome);
        };
        match run_blocking(run) {
            Ok(job) => Ok(Self { stage, job, stop, generation: fork::generation() }),
            Err(error) => {
                let lease = begin(&stage).expect("a call that no thread took waits");
                Err((lease, LeaseError::Create(error.into())))
            }
        }
    }

    /// The lease and the answer; `None` in a child of a fork.
    fn poll(&self, context: &Context<'_>) -> Poll<Option<(OwnedLease, Result<T, CallError>)>> {
        if !self.is_here() {
            return Poll::Ready(None);
        }
        let mut waker = Some(context.waker().clone());
        let mut stage = locked(&self.stage);
        if let Some(last) = stage.waker_mut() {
            std::mem::swap(last, &mut waker);
            drop(stage);
            return Poll::Pending;
        }
        let last = std::mem::replace(&mut *stage, Stage::Dropped);
        drop(stage);
        match last {
            Stage::Done(outcome) => {
                Poll::Ready(Some(outcome.unwrap_or_else(|panic| resume_unwind(panic))))
            }
            // Polled after its end.
            _ => Poll::Pending,
        }
    }
}

/// Begins a call with its lease; `None` where nothing awaits it any more.
fn begin<T>(stage: &Mutex<Stage<T>>) -> Option<Box<OwnedLease>> {
    let mut stage = locked(stage);
    match std::mem::replace(&mut *stage, Stage::Dropped) {
        Stage::Queued(lease, waker) => {
            *stage = Stage::Running(waker);
            Some(lease)
        }
        last => {
            *stage = last;
            None
        }
    }
}

/// Hands the outcome over, or drops it where nothing awaits it: the instance comes back then.
fn finish<T>(stage: &Mutex<Stage<T>>, outcome: Outcome<T>) {
    let outcome = Box::new(outcome);
    let mut stage = locked(stage);
    let Some(waker) = stage.waker_mut().map(Option::take) else {
        drop(stage);
        return drop(outcome);
    };
    *stage = Stage::Done(outcome);
    drop(stage);
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl<T> Drop for BlockingCall<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        let mut stage = locked(&self.stage);
        let last = std::mem::replace(&mut *stage, Stage::Dropped);
        // Under the lock: the instance is still that of the call.
        if matches!(last, Stage::Running(_)) {
            (self.stop)();
        }
        drop(stage);
        if matches!(last, Stage::Queued(..)) {
            self.job.withdraw();
        }
        drop(last);
    }
}

#[cfg(all(test, feature = "wasm", not(miri)))]
mod tests {
    use super::*;
    use crate::Options;

    #[test]
    fn a_child_drops_and_polls_calls_of_its_parent_without_waiting() {
        let wasm = wat::parse_str(r#"(module (memory 1) (func (export "f")))"#).unwrap();
        let guest = Guest::from_bytes("a guest", &wasm, &Options::new()).unwrap();
        let instance = dispatch!(Backend, &guest.inner().backend, warm => {
            let mut leased = std::pin::pin!(warm.async_instance(LeaseOptions::new()));
            match leased.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(instance) => instance.unwrap(),
                Poll::Pending => panic!("an empty pool makes an instance at once"),
            }
        });
        let lease = OwnedLease::owned(guest.clone(), instance);
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let call = BlockingCall::start(lease, Box::new(|| {}), move |_| {
            ended.recv().unwrap();
            Ok(7)
        });
        let mut call = call.map_err(|(_, error)| error).ok();
        let stage = Arc::clone(&call.as_ref().unwrap().stage);
        let held = locked(&stage);
        assert!(afresh_sys::child_passes(|| {
            let Some(call) = call.take() else { return false };
            let context = Context::from_waker(Waker::noop());
            let closed = matches!(call.poll(&context), Poll::Ready(None));
            drop(call);
            closed
        }));
        drop(held);
        end.send(()).unwrap();
        drop(call);
    }
}
