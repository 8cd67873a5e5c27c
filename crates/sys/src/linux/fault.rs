//! SIGBUS and SIGSEGV, dispatched by address.
//!
//! Whoever owns a range of addresses registers it with a [`FaultHandler`]; a fault inside the range
//! goes to that handler *in the faulting thread*, and every other fault goes on to the handler that
//! was installed before ours (wasmtime's, the embedder's, or the default action).
//!
//! What it promises: a lookup takes no lock and allocates nothing, so that it can run anywhere a
//! fault can happen; an unregistered range is never called again once [`Registration`] is dropped.
//!
//! What may break it: another library that installs its handler later without chaining to ours.
//! [`ensure_installed`] puts ours on top again; adapters call it after they have started such a
//! library.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Call, SysError, inject};

/// Which signal a fault came as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSignal {
    /// SIGBUS: userfaultfd in SIGBUS mode, or a file shorter than its mapping.
    Bus,
    /// SIGSEGV: page protection, or nothing mapped.
    Segv,
}

/// Answers faults in a registered range.
///
/// Called in signal context: an implementation must not allocate, log or panic, and may lock only what is
/// never held where such a fault can happen.
pub trait FaultHandler: Send + Sync {
    /// Handles a fault at `address`; `true` when the access can be retried, `false` to pass the
    /// fault on.
    fn on_fault(&self, address: usize, signal: FaultSignal) -> bool;
}

struct Entry {
    start: usize,
    end: usize,
    handler: Arc<dyn FaultHandler>,
}

/// The published table: sorted, immutable, replaced as a whole.
static TABLE: AtomicPtr<Vec<Arc<Entry>>> = AtomicPtr::new(std::ptr::null_mut());
/// Signal handlers that are reading the table now.
static READERS: AtomicUsize = AtomicUsize::new(0);
/// Serialises writers, and holds what was installed before us.
static WRITERS: Mutex<()> = Mutex::new(());

static PREVIOUS_BUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());
static PREVIOUS_SEGV: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps a range registered; dropping it unregisters and waits until no handler is in it.
#[derive(Debug)]
pub struct Registration {
    start: usize,
}

/// Registers `len` bytes at `start`.
///
/// # Errors
/// `EEXIST` when the range overlaps a registered one; an error of `sigaction` otherwise.
pub fn register(
    start: *const u8,
    len: usize,
    handler: Arc<dyn FaultHandler>,
) -> Result<Registration, SysError> {
    ensure_installed()?;
    let start = start as usize;
    let entry = Arc::new(Entry { start, end: start + len, handler });
    let mut overlaps = false;
    replace(|table| {
        let at = table.partition_point(|e| e.start < start);
        overlaps = at > 0 && table[at - 1].end > start
            || table.get(at).is_some_and(|next| next.start < entry.end);
        if !overlaps {
            table.insert(at, entry);
        }
    });
    if overlaps {
        return Err(SysError::new(Call::Signal, libc::EEXIST));
    }
    Ok(Registration { start })
}

impl Drop for Registration {
    fn drop(&mut self) {
        replace(|table| table.retain(|e| e.start != self.start));
    }
}

/// Publishes an edited copy of the table and frees the old one once no handler reads it.
fn replace(edit: impl FnOnce(&mut Vec<Arc<Entry>>)) {
    let _guard = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
    let old = TABLE.load(Ordering::Acquire);
    // SAFETY: a published table is freed only below, under the lock that we hold.
    let mut table = if old.is_null() { Vec::new() } else { unsafe { (*old).clone() } };
    edit(&mut table);
    TABLE.store(Box::into_raw(Box::new(table)), Ordering::SeqCst);
    if old.is_null() {
        return;
    }
    // A reader that is counted may hold the old table; one that comes later sees the new one
    // (both sides are SeqCst: count then load here mirrors store then read of the count).
    while READERS.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
    // SAFETY: unpublished, and the readers that could have seen it have left.
    drop(unsafe { Box::from_raw(old) });
}

/// Whether a registered handler took the fault.
fn dispatch(address: usize, signal: FaultSignal) -> bool {
    READERS.fetch_add(1, Ordering::SeqCst);
    let table = TABLE.load(Ordering::SeqCst);
    let handled = if table.is_null() {
        false
    } else {
        // SAFETY: `READERS` is above zero, so the writer waits before it frees this table.
        let table = unsafe { &*table };
        let at = table.partition_point(|e| e.end <= address);
        table.get(at).is_some_and(|e| e.start <= address && e.handler.on_fault(address, signal))
    };
    READERS.fetch_sub(1, Ordering::SeqCst);
    handled
}

extern "C" fn on_signal(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: `errno` is thread-local; it is saved so that the interrupted code finds it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: installed with SA_SIGINFO, so the kernel passes a valid `siginfo_t`.
    let address = unsafe { (*info).si_addr() } as usize;
    let kind = if signal == libc::SIGBUS { FaultSignal::Bus } else { FaultSignal::Segv };
    let handled = dispatch(address, kind);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if handled {
        return;
    }
    if CHAINED.get() == address {
        // The handler we passed this fault to has passed it back: it was installed over ours, and
        // ours over it again. Nobody wants it.
        restore_default(signal);
        return;
    }
    let outer = CHAINED.replace(address);
    // SAFETY: the arguments are the kernel's own.
    unsafe { chain(signal, info, context) };
    CHAINED.set(outer);
}

thread_local! {
    /// Address of the fault this thread has handed on and not yet got back; `usize::MAX` for none.
    /// Const-initialised without a destructor, so that reading it in a handler allocates nothing.
    static CHAINED: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Puts the default action back; the access faults again on return and the kernel ends the process
/// with the right signal and core dump.
fn restore_default(signal: libc::c_int) {
    // SAFETY: an all-zero action with SIG_DFL is valid; `sigaction` may be called in a handler.
    unsafe {
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &default, std::ptr::null_mut());
    }
}

/// Hands a fault that is not ours to whoever was there before.
///
/// # Safety
/// Must be called from a signal handler, with the arguments the kernel passed to it.
unsafe fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let slot = if signal == libc::SIGBUS { &PREVIOUS_BUS } else { &PREVIOUS_SEGV };
    let previous = slot.load(Ordering::Acquire);
    // SAFETY: once set, a saved action is never freed.
    let action = if previous.is_null() { None } else { Some(unsafe { &*previous }) };
    match action {
        Some(action)
            if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN =>
        {
            if action.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: SA_SIGINFO says that the address is a three-argument handler.
                let f: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(action.sa_sigaction) };
                f(signal, info, context);
            } else {
                // SAFETY: without SA_SIGINFO the address is a one-argument handler.
                let f: extern "C" fn(libc::c_int) =
                    unsafe { std::mem::transmute(action.sa_sigaction) };
                f(signal);
            }
        }
        _ => restore_default(signal),
    }
}

/// Makes sure that our handlers are the first to see SIGBUS and SIGSEGV.
///
/// Cheap when they already are: two `sigaction` reads.
///
/// # Errors
/// An error of `sigaction`, which only a sandbox that filters it returns.
pub fn ensure_installed() -> Result<(), SysError> {
    inject::gate(Call::Signal)?;
    let _guard = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
    for (signal, previous) in [(libc::SIGBUS, &PREVIOUS_BUS), (libc::SIGSEGV, &PREVIOUS_SEGV)] {
        // SAFETY: all-zero is a valid `sigaction` to be overwritten.
        let mut current: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: reads the present action into a local.
        if unsafe { libc::sigaction(signal, std::ptr::null(), &mut current) } != 0 {
            return Err(SysError::last(Call::Signal));
        }
        let ours = on_signal as *const () as usize;
        if current.sa_sigaction == ours {
            continue;
        }
        // Saved before ours goes in, and leaked: a handler may read it at any time after.
        previous.store(Box::into_raw(Box::new(current)), Ordering::Release);
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ours;
        // NODEFER: a fault inside a chained handler must reach us again. ONSTACK: a thread whose
        // guest overflowed its stack can only run the handler on the alternate one.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        // SAFETY: `action` is fully initialised and the handler is async-signal-safe.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            return Err(SysError::last(Call::Signal));
        }
    }
    Ok(())
}
