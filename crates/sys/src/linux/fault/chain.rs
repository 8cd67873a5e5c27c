//! Handlers of others, for faults outside our ranges.
//!
//! wasmtime, language runtimes, crash reporters and we all want SIGSEGV, and each remembers only
//! its predecessor. Ours must be called first, so it is put on top again whenever a range is
//! registered. That must lose no other handler, and must not end in a circle of handlers that pass
//! faults to one another. Hence:
//!
//! * **Each time we are put on top it is with another entry point**, a *layer*, that remembers the
//!   handler beneath it. A handler above a layer that passes faults on comes back to that very
//!   layer, which continues downwards. A handler that removes itself puts a layer back, which shows
//!   us that it has left.
//! * **A fault carries a list of the handlers that had it already**, in the part of `siginfo_t`
//!   that the kernel clears at each delivery (since Linux 4.20) and leaves unused. No handler is
//!   offered a fault twice; when all had it the default action ends the process. As the list dies
//!   with the delivery, nothing is left over when a handler jumps out (`siglongjmp`) and never
//!   comes back.
//!
//! A handler beneath us is called as the kernel would have called it: with its mask, and once if it
//! has `SA_RESETHAND`.
//!
//! May break it: a handler installed over ours that neither knows the fault nor passes it on.
//! Nothing can be done about that, here as anywhere. At most twelve foreign handlers at the same
//! time, each on top of the last.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::{Call, SysError};

/// A handler with three arguments.
type Entry = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Entry points, and so handlers of others that can be remembered at a time.
pub(super) const LAYERS: usize = 12;

/// One entry point for each layer.
static ENTRIES: [Entry; LAYERS] = [
    super::on_signal::<0>,
    super::on_signal::<1>,
    super::on_signal::<2>,
    super::on_signal::<3>,
    super::on_signal::<4>,
    super::on_signal::<5>,
    super::on_signal::<6>,
    super::on_signal::<7>,
    super::on_signal::<8>,
    super::on_signal::<9>,
    super::on_signal::<10>,
    super::on_signal::<11>,
];

/// Another's handler.
struct ForeignHandler {
    action: libc::sigaction,
    /// It has `SA_RESETHAND` and was called once.
    spent: AtomicBool,
}

impl ForeignHandler {
    fn is_default(&self) -> bool {
        self.action.sa_sigaction == libc::SIG_DFL || self.spent.load(Ordering::Relaxed)
    }
}

/// The layers of one signal.
pub(super) struct Chain {
    signal: libc::c_int,
    /// The handler beneath each layer. Set before the layer is installed; never freed, as a handler
    /// may read it at any time.
    beneath: [AtomicPtr<ForeignHandler>; LAYERS],
    /// Layers that may be reached from the top. Changed by [`Chain::install`] and
    /// [`Chain::step_aside`] only.
    used: AtomicUsize,
}

pub(super) static BUS: Chain = Chain::new(libc::SIGBUS);
pub(super) static SEGV: Chain = Chain::new(libc::SIGSEGV);

impl Chain {
    const fn new(signal: libc::c_int) -> Self {
        let beneath = [const { AtomicPtr::new(std::ptr::null_mut()) }; LAYERS];
        Self { signal, beneath, used: AtomicUsize::new(0) }
    }

    pub(super) fn of(signal: libc::c_int) -> &'static Self {
        if signal == libc::SIGBUS { &BUS } else { &SEGV }
    }

    fn foreign(&self, layer: usize) -> Option<&'static ForeignHandler> {
        // SAFETY: null, or from a box that was leaked.
        unsafe { self.beneath[layer].load(Ordering::Acquire).as_ref() }
    }

    /// Puts a layer on top, unless one is there. The caller sees to it that one thread at a time
    /// does this.
    pub(super) fn install(&self) -> Result<(), SysError> {
        let top = self.exchange(None)?;
        if let Some(layer) = layer_of(&top) {
            // The handler above it has left.
            self.used.store(layer + 1, Ordering::Relaxed);
            return Ok(());
        }
        let layer = self.remember(top)?;
        let replaced = self.exchange(Some(ENTRIES[layer]))?;
        // A handler came or left between the two calls, and the first result may be outdated. If
        // one of our layers came back, the new one replaces it.
        match layer_of(&replaced) {
            Some(back) => self.foreign(back).into_iter().for_each(|f| self.set(layer, f.action)),
            None => self.set(layer, replaced),
        }
        Ok(())
    }

    /// The layer to put over `top`.
    fn remember(&self, top: libc::sigaction) -> Result<usize, SysError> {
        let used = self.used.load(Ordering::Relaxed);
        if used > 0 && self.foreign(used - 1).is_some_and(|last| same(&last.action, &top)) {
            return Ok(used - 1);
        }
        let layer = if used < LAYERS { used } else { self.gather(&top) };
        if layer == LAYERS {
            return Err(SysError::new(Call::Signal, libc::EUSERS));
        }
        self.set(layer, top);
        self.used.store(layer + 1, Ordering::Relaxed);
        Ok(layer)
    }

    /// Forgets handlers that are remembered twice, the lower of the two, and `top`, which is on top
    /// now. Returns how many there are left.
    fn gather(&self, top: &libc::sigaction) -> usize {
        let all: Vec<_> = (0..LAYERS).filter_map(|layer| self.foreign(layer)).collect();
        let last = |at: usize| {
            let later = &all[at + 1..];
            !same(&all[at].action, top) && later.iter().all(|b| !same(&b.action, &all[at].action))
        };
        let kept: Vec<_> = (0..all.len()).filter(|at| last(*at)).map(|at| all[at]).collect();
        for (layer, foreign) in kept.iter().enumerate() {
            self.beneath[layer].store(std::ptr::from_ref(*foreign).cast_mut(), Ordering::Release);
        }
        kept.len()
    }

    fn set(&self, layer: usize, action: libc::sigaction) {
        let known = self.foreign(layer).is_some_and(|foreign| {
            same(&foreign.action, &action) && !foreign.spent.load(Ordering::Relaxed)
        });
        if !known {
            let foreign = Box::new(ForeignHandler { action, spent: AtomicBool::new(false) });
            // Leaked: a handler may read it at any time after. One for each handler that others
            // install.
            self.beneath[layer].store(Box::into_raw(foreign), Ordering::Release);
        }
    }

    /// Takes our layers away as far as they are on top. The caller sees to it as for
    /// [`Chain::install`].
    pub(super) fn step_aside(&self) -> Result<(), SysError> {
        while let Some(layer) = layer_of(&self.exchange(None)?) {
            let Some(foreign) = self.foreign(layer) else { break };
            // SAFETY: an action that the kernel gave us, for the same signal.
            if unsafe { libc::sigaction(self.signal, &foreign.action, std::ptr::null_mut()) } != 0 {
                return Err(SysError::last(Call::Signal));
            }
            self.used.store(layer, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The present action, replaced by `new` if given.
    fn exchange(&self, new: Option<Entry>) -> Result<libc::sigaction, SysError> {
        // SAFETY: all-zero is a valid `sigaction`.
        let (mut action, mut old): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        if let Some(entry) = new {
            action.sa_sigaction = entry as usize;
            // NODEFER: a fault inside a handler must reach us again. ONSTACK: a thread whose guest
            // overflowed its stack can only run the handler on the alternate one.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
            action.sa_mask = blocked_signals();
        }
        let given = if new.is_some() { &raw const action } else { std::ptr::null() };
        // SAFETY: both structures are initialised and live through the call; the handler is
        // async-signal-safe.
        if unsafe { libc::sigaction(self.signal, given, &mut old) } != 0 {
            return Err(SysError::last(Call::Signal));
        }
        Ok(old)
    }

    /// Passes a fault that is not ours to the next handler that has not had it: the one beneath
    /// `layer`, or below that.
    ///
    /// # Safety
    /// Must be called from a signal handler, with the arguments the kernel passed to it.
    pub(super) unsafe fn pass_on(
        &self,
        layer: usize,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: the caller's promise.
        let had = unsafe { &mut *List::of(info) };
        for at in (0..=layer).rev() {
            let Some(foreign) = self.foreign(at).filter(|_| !had.contains(at)) else { continue };
            let twice = (0..LAYERS)
                .filter(|other| had.contains(*other))
                .filter_map(|other| self.foreign(other))
                .any(|other| same(&other.action, &foreign.action));
            had.add(at);
            if twice {
                continue;
            }
            if foreign.is_default() {
                break;
            }
            if foreign.action.sa_sigaction == libc::SIG_IGN {
                // The kernel lets a sent signal be ignored, but not a fault.
                // SAFETY: the caller's promise.
                if unsafe { is_sent_by_process(info) } {
                    return;
                }
                break;
            }
            // SAFETY: the caller's promise.
            unsafe { self.call(foreign, info, context) };
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.end(info) };
    }

    /// Calls a handler as the kernel would.
    ///
    /// # Safety
    /// As [`Chain::pass_on`]; `foreign` must hold a function.
    unsafe fn call(
        &self,
        foreign: &ForeignHandler,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        let action = &foreign.action;
        if action.sa_flags & libc::SA_RESETHAND != 0 {
            foreign.spent.store(true, Ordering::Relaxed);
        }
        // SAFETY: the kernel passed the context; of its mask it fills one word. A `sigset_t` begins
        // with that word too.
        let (interrupted, asked) = unsafe {
            let context = context.cast::<libc::ucontext_t>();
            let word = |set: *const libc::sigset_t| set.cast::<u64>().read();
            (word(&raw const (*context).uc_sigmask), word(&raw const action.sa_mask))
        };
        let own = if action.sa_flags & libc::SA_NODEFER != 0 { 0 } else { bit(self.signal) };
        let before = set_mask(interrupted | asked | own);
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            // SAFETY: SA_SIGINFO means that the address is a three-argument handler.
            let handler: Entry = unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(self.signal, info, context);
        } else {
            // SAFETY: without SA_SIGINFO the address is a one-argument handler.
            let handler: extern "C" fn(libc::c_int) =
                unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(self.signal);
        }
        set_mask(before);
    }

    /// Puts the default action back. An access faults again on return, and the kernel ends the
    /// process with the right signal and core dump; a signal that was sent is sent again.
    ///
    /// # Safety
    /// As [`Chain::pass_on`].
    pub(super) unsafe fn end(&self, info: *mut libc::siginfo_t) {
        // SAFETY: an all-zero action with SIG_DFL is valid; `sigaction` may be called in a handler.
        unsafe {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(self.signal, &default, std::ptr::null_mut());
        }
        // SAFETY: the caller's promise.
        if unsafe { is_sent_by_process(info) } {
            // SAFETY: `raise` may be called in a handler.
            unsafe { libc::raise(self.signal) };
        }
    }
}

/// The layers that had a fault: a word of `siginfo_t` that the kernel clears, and another that
/// marks the first as valid.
#[repr(C)]
pub(super) struct List {
    tag: u32,
    layers: u32,
}

const TAG: u32 = 0xaf5e_5e6d;

impl List {
    /// The list that belongs to `info`.
    ///
    /// # Safety
    /// `info` must be the one that the kernel passed to a handler, which is 128 bytes long and, for
    /// the signals here, in use up to byte 48.
    pub(super) unsafe fn of(info: *mut libc::siginfo_t) -> *mut Self {
        const { assert!(size_of::<libc::siginfo_t>() == 128) };
        // SAFETY: the last eight of 128 bytes, aligned as the structure is.
        let list = unsafe { info.cast::<u8>().add(128 - size_of::<Self>()) }.cast::<Self>();
        // SAFETY: as above, and plain words.
        unsafe {
            if (*list).tag != TAG {
                *list = Self { tag: TAG, layers: 0 };
            }
        }
        list
    }

    /// Whether no handler had it.
    pub(super) fn is_empty(&self) -> bool {
        self.layers == 0
    }

    fn contains(&self, layer: usize) -> bool {
        self.layers & 1 << layer != 0
    }

    fn add(&mut self, layer: usize) {
        self.layers |= 1 << layer;
    }
}

/// Whether a signal was sent by a process, and is not a fault of the receiving thread.
///
/// # Safety
/// `info` must be the one that the kernel passed to a handler.
pub(super) unsafe fn is_sent_by_process(info: *const libc::siginfo_t) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (*info).si_code <= 0 }
}

/// Which of our layers an action is.
fn layer_of(action: &libc::sigaction) -> Option<usize> {
    ENTRIES.iter().position(|entry| *entry as usize == action.sa_sigaction)
}

fn same(a: &libc::sigaction, b: &libc::sigaction) -> bool {
    a.sa_sigaction == b.sa_sigaction
}

fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

/// All signals except those that a thread raises by executing an instruction, which must not be
/// blocked.
fn blocked_signals() -> libc::sigset_t {
    // SAFETY: fills a local set, and takes valid numbers out of it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for signal in [
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
            libc::SIGTRAP,
            libc::SIGSYS,
            libc::SIGABRT,
        ] {
            libc::sigdelset(&mut set, signal);
        }
        set
    }
}

/// Sets the thread's signal mask, as the kernel counts signals, and returns the old one.
fn set_mask(mask: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: both words live through the call, and the kernel's sets are eight bytes long.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            &raw mut before,
            size_of::<u64>(),
        );
    }
    before
}
