//! SIGBUS and SIGSEGV, dispatched by address.
//!
//! The owner of a range of addresses registers it with a [`FaultHandler`]. A fault inside the range
//! goes to that handler *in the faulting thread*, and every other fault is passed to other
//! handlers: wasmtime's, the embedder's, or the default action.
//!
//! Promises: a lookup takes no lock and allocates nothing, so that it can run anywhere a fault can
//! happen. Registering waits for no handler. Dropping a [`Registration`] waits only for handlers of
//! the same range; afterwards that range's handler is never called again. A fault that was taken
//! before that, and is looked up after, is retried and reaches no other handler.
//!
//! May break it: another library that installs its handler later without passing faults on.
//! [`ensure_installed`] puts ours on top again; adapters call it after they have started such a
//! library.

mod chain;
mod readers;
mod sync;
mod table;

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use crate::cause::{Fault, FaultCause, FaultHandler, FaultSignal};

use super::{arch, fork};
use crate::{Call, PerProcess, SysError, inject};
use chain::{Chain, List};
use table::{EntryGuard, Table, UnpublishedTrees};

type Owner = Arc<dyn FaultHandler>;

static TABLE: Table<Owner> = Table::new();
/// Serialises changes of the table and of the installed handlers.
static CHANGES: PerProcess<Mutex<UnpublishedTrees<Owner>>> =
    PerProcess::new(|| Mutex::new(UnpublishedTrees::new()));
/// The signals that some range was ever registered for. The child of a fork also inherits its
/// parent's handlers.
static WANTED: AtomicU32 = AtomicU32::new(0);

const SIGNALS: [(FaultSignal, u32, &Chain); 2] =
    [(FaultSignal::Bus, 1, &chain::BUS), (FaultSignal::Segv, 2, &chain::SEGV)];

fn changes() -> MutexGuard<'static, UnpublishedTrees<Owner>> {
    CHANGES.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a range registered; dropping it unregisters, and waits until no thread is in the range's
/// handler.
pub struct Registration {
    held: Option<EntryGuard<Owner>>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").finish_non_exhaustive()
    }
}

/// Registers `len` bytes at `start`.
///
/// # Errors
/// `EEXIST` when the range overlaps a registered one, `EINVAL` when it is empty or ends beyond all
/// addresses; an error of `sigaction`, which only a sandbox that filters it returns; `EUSERS` when
/// too many foreign handlers are stacked.
pub fn register(
    start: *const u8,
    len: usize,
    handler: Arc<dyn FaultHandler>,
) -> Result<Registration, SysError> {
    let start = start as usize;
    let end = start.checked_add(len).filter(|_| len > 0).ok_or(SysError::invalid(Call::Signal))?;
    inject::gate(Call::Signal)?;
    for (signal, bit, _) in SIGNALS {
        if handler.answers(signal) {
            WANTED.fetch_or(bit, Ordering::Relaxed);
        }
    }
    let mut changes = changes();
    install()?;
    TABLE
        .insert(&mut changes, fork::generation(), (start, end), handler)
        .map(|held| Registration { held: Some(held) })
        .ok_or(SysError::new(Call::Signal, libc::EEXIST))
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let generation = fork::generation();
        let mut changes = changes();
        // The lock makes this the only writer. A child that is forked here keeps an odd number
        // until its next removal.
        REMOVALS.store(REMOVALS.load(Ordering::Relaxed) | 1, Ordering::Release);
        TABLE.remove(&mut changes, generation, &held);
        REMOVALS.store(REMOVALS.load(Ordering::Relaxed) + 1, Ordering::Release);
        drop(changes);
        // Without the lock: only this caller waits for the handlers of its range.
        drop(held.close(generation));
    }
}

/// Makes our handlers the first for every signal with a registered range.
///
/// Cheap when they already are: one or two `sigaction` reads.
///
/// # Errors
/// As for [`register`].
pub fn ensure_installed() -> Result<(), SysError> {
    inject::gate(Call::Signal)?;
    let _changes = changes();
    install()
}

/// The caller holds the lock of `CHANGES`.
fn install() -> Result<(), SysError> {
    let wanted = WANTED.load(Ordering::Relaxed);
    SIGNALS
        .iter()
        .filter(|(_, bit, _)| wanted & bit != 0)
        .try_for_each(|(_, _, chain)| chain.install())
}

/// Removes our handlers where they are the first, so that the handlers beneath can be removed in
/// turn (wasmtime's `Engine::unload_process_handlers` ends the process when its handler is not on
/// top). Until a range is registered again, or [`ensure_installed`] called, faults in registered
/// ranges are not handled: call it when no range is registered.
///
/// # Errors
/// An error of `sigaction`.
pub fn step_aside() -> Result<(), SysError> {
    let _changes = changes();
    SIGNALS.iter().try_for_each(|(_, _, chain)| chain.step_aside())
}

/// Whether a runtime turns faults of the instruction at `address` into traps, because it is in a
/// range of code that says so ([`FaultHandler::traps`]). May be called in a signal handler.
#[must_use]
pub fn traps(address: usize) -> bool {
    let found = TABLE.with(address, fork::generation(), |handler| handler.traps(address));
    found.is_some_and(|traps| traps)
}

thread_local! {
    /// Handlers of ranges that this thread is in. Const-initialised without a destructor, so that
    /// reading it in a handler allocates nothing.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// This thread's last fault in no range: its address, and [`REMOVALS`] before it was looked up.
    static RETRIED: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
}

/// Changes when a range is removed. Odd while one is being removed.
static REMOVALS: AtomicU64 = AtomicU64::new(0);

/// Whether a registered handler took the fault, or the access is to be retried.
fn dispatch(fault: &Fault) -> bool {
    let before = REMOVALS.load(Ordering::Acquire);
    let handled = TABLE.with(fault.address, fork::generation(), |handler| {
        DEPTH.set(DEPTH.get() + 1);
        let handled = handler.on_fault(fault);
        DEPTH.set(DEPTH.get() - 1);
        handled
    });
    handled.unwrap_or_else(|| is_late(fault.address, before))
}

/// Whether a fault in no range may have been taken in one that was removed before the lookup. The
/// owner opens the memory before it removes the range, so the access succeeds on a retry. A fault
/// of another kind comes back, and then nothing was removed since.
///
/// `before` was read before the lookup. A lookup that misses a removed range reads a number here
/// that was stored by that removal or later. The thread's last fault in no range recorded an
/// earlier one, or was taken during that removal at an address outside the range.
fn is_late(address: usize, before: u64) -> bool {
    let now = REMOVALS.load(Ordering::Acquire);
    let (last_address, last) = RETRIED.replace((address, before));
    now != last || (now % 2 == 1 && address != last_address)
}

/// The handler, once for each layer.
extern "C" fn on_signal<const LAYER: usize>(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: `errno` is thread-local; it is saved so that the interrupted code finds it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: installed with SA_SIGINFO, so the kernel, or a handler that passes a fault on, passes
    // the kernel's arguments.
    unsafe { answer(LAYER, signal, info, context) };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// # Safety
/// The arguments must be those that the kernel passed to a handler.
unsafe fn answer(
    layer: usize,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let chain = Chain::of(signal);
    // SAFETY: the caller's promise.
    let first = unsafe { (*List::of(info)).is_empty() };
    // If a handler further down returned the fault to us, it was looked up already.
    // SAFETY: the caller's promise.
    if first && unsafe { decode(signal, info, context) }.is_some_and(|fault| dispatch(&fault)) {
        return;
    }
    if DEPTH.get() != 0 {
        // A range's handler is at fault itself. A foreign handler might leave it half-way for good.
        // SAFETY: the caller's promise.
        unsafe { chain.end(info) };
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { chain.pass_on(layer, info, context) };
}

/// `si_code`s that all architectures share; the C library's crate does not have them all.
const SEGV_MAPERR: i32 = 1;
const SEGV_ACCERR: i32 = 2;
const SEGV_PKUERR: i32 = 4;
const BUS_ADRERR: i32 = 2;
const BUS_MCEERR_AR: i32 = 4;
const BUS_MCEERR_AO: i32 = 5;
const SI_KERNEL: i32 = 0x80;

/// Decodes the fault; `None` when it has no address: sent by a process, about memory that the
/// thread did not touch, or by an access whose address the kernel does not know.
///
/// # Safety
/// The arguments must be those that the kernel passed to a handler.
unsafe fn decode(
    signal: libc::c_int,
    info: *const libc::siginfo_t,
    context: *const libc::c_void,
) -> Option<Fault> {
    // SAFETY: the caller's promise.
    let code = unsafe { (*info).si_code };
    let bus = signal == libc::SIGBUS;
    if code <= 0 || code == SI_KERNEL || (bus && code == BUS_MCEERR_AO) {
        return None;
    }
    let cause = match (bus, code) {
        (false, SEGV_MAPERR) => FaultCause::Unmapped,
        (false, SEGV_ACCERR) => FaultCause::Protected,
        (false, SEGV_PKUERR) => FaultCause::Key,
        (true, BUS_ADRERR) => FaultCause::Unavailable,
        (true, BUS_MCEERR_AR) => FaultCause::Poisoned,
        (_, code) => FaultCause::Other(code),
    };
    // SAFETY: a fault of an address carries it.
    let address = unsafe { (*info).si_addr() } as usize;
    let signal = if bus { FaultSignal::Bus } else { FaultSignal::Segv };
    // SAFETY: the caller's promise.
    let write = unsafe { arch::was_write(context) };
    // SAFETY: as above.
    let instruction = unsafe { arch::instruction(context) };
    Some(Fault { address, signal, cause, write, instruction })
}
