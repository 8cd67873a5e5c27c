//! Faults by address: which calls wait for which, the contents of a fault, and faults outside the
//! handler's range.
#![cfg(not(miri))]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use afresh_sys::fault::{self, Fault, FaultCause, FaultHandler, FaultSignal};
use afresh_sys::{Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd};

/// Opens the page that was touched, after a call of `first`.
struct OpenHandler<F> {
    memory: Arc<Reservation>,
    first: F,
}

impl<F: Fn(&Fault) + Send + Sync> FaultHandler for OpenHandler<F> {
    fn on_fault(&self, fault: &Fault) -> bool {
        (self.first)(fault);
        let page = (fault.address - self.memory.base().as_ptr() as usize) / PAGE_SIZE;
        self.memory.protect(PageRange::new(page, 1), Protection::ReadWrite).is_ok()
    }
}

fn readable(pages: usize) -> Arc<Reservation> {
    let memory = Reservation::new(pages).unwrap();
    memory.map_anonymous(PageRange::new(0, pages), Protection::Read).unwrap();
    Arc::new(memory)
}

fn poke(memory: &Reservation, page: usize) {
    // SAFETY: the page is mapped, and a handler opens it.
    unsafe { memory.page_ptr(page).write_volatile(1) };
}

fn watch(
    memory: &Arc<Reservation>,
    first: impl Fn(&Fault) + Send + Sync + 'static,
) -> fault::Registration {
    let handler = Arc::new(OpenHandler { memory: memory.clone(), first });
    fault::register(memory.base().as_ptr(), memory.pages() * PAGE_SIZE, handler).unwrap()
}

/// A handler that does not end until the test allows it, as one that waits for a remote page.
#[derive(Clone, Default)]
struct FaultCounts {
    inside: Arc<AtomicUsize>,
    go: Arc<AtomicBool>,
}

impl FaultCounts {
    fn wait(&self) {
        self.inside.fetch_add(1, Ordering::SeqCst);
        while !self.go.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn until(&self, inside: usize) {
        while self.inside.load(Ordering::SeqCst) < inside {
            std::thread::yield_now();
        }
    }
}

#[test]
fn registering_and_dropping_waits_for_no_handler_of_another_range() {
    let held = FaultCounts::default();
    let slow = readable(16);
    let handler = held.clone();
    let _slow = watch(&slow, move |_| handler.wait());
    std::thread::scope(|scope| {
        for page in 0..16 {
            let slow = &slow;
            scope.spawn(move || poke(slow, page));
        }
        held.until(16);
        // Sixteen threads stay in their handlers until all of this is done.
        let memory = readable(1);
        for _ in 0..1000 {
            drop(watch(&memory, |_| ()));
        }
        let quick = watch(&memory, |_| ());
        poke(&memory, 0);
        drop(quick);
        assert!(!held.go.swap(true, Ordering::SeqCst));
    });
}

#[test]
fn dropping_a_range_waits_for_its_own_handler_and_ends_it_for_good() {
    let held = FaultCounts::default();
    let memory = readable(1);
    let handler = held.clone();
    let registration = watch(&memory, move |_| handler.wait());
    std::thread::scope(|scope| {
        scope.spawn(|| poke(&memory, 0));
        held.until(1);
        let dropped = Arc::new(AtomicBool::new(false));
        let told = dropped.clone();
        scope.spawn(move || {
            drop(registration);
            told.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!dropped.load(Ordering::SeqCst), "a thread is in the handler");
        held.go.store(true, Ordering::SeqCst);
    });
    // Values that the handler owned are dropped with the registration.
    assert_eq!(Arc::strong_count(&held.go), 1);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn ten_thousand_ranges_come_and_go_in_linear_time() {
    const RANGES: usize = 10_000;
    let memory = Reservation::new(2 * RANGES).unwrap();
    struct NeverHandler;
    impl FaultHandler for NeverHandler {
        fn on_fault(&self, _: &Fault) -> bool {
            false
        }
    }
    let never: Arc<dyn FaultHandler> = Arc::new(NeverHandler);
    let add =
        |at: usize| fault::register(memory.page_ptr(2 * at), PAGE_SIZE, never.clone()).unwrap();
    let began = Instant::now();
    let mut ranges: Vec<_> = (0..RANGES / 10).map(|at| Some(add(at))).collect();
    let tenth = began.elapsed();
    ranges.extend((RANGES / 10..RANGES).map(|at| Some(add(at))));
    // In no order: every 7919th.
    for at in 0..RANGES {
        ranges[at * 7919 % RANGES] = None;
    }
    let all = began.elapsed();
    println!("1,000 registered in {tenth:?}, 10,000 registered and dropped in {all:?}");
    assert!(all < Duration::from_secs(10), "{all:?}");
    // All of it is free again.
    drop(fault::register(memory.page_ptr(0), 2 * RANGES * PAGE_SIZE, never.clone()).unwrap());
}

#[test]
fn each_of_many_ranges_gets_its_own_faults() {
    let memories: Vec<_> = (0..300).map(|_| readable(2)).collect();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut ranges: Vec<_> = memories
        .iter()
        .enumerate()
        .map(|(at, memory)| {
            let seen = seen.clone();
            // Nothing here holds the lock where it could fault.
            Some(watch(memory, move |fault| seen.lock().unwrap().push((at, *fault))))
        })
        .collect();
    for at in (0..300).step_by(3) {
        ranges[at] = None;
    }
    seen.lock().unwrap().reserve(300);
    for (at, memory) in memories.iter().enumerate().filter(|(at, _)| at % 3 != 0) {
        poke(memory, 1);
        let (by, fault) = seen.lock().unwrap().pop().unwrap();
        assert_eq!(by, at);
        assert_eq!(fault.address, memory.page_ptr(1) as usize);
        assert_eq!((fault.signal, fault.cause), (FaultSignal::Segv, FaultCause::Protected));
        assert_ne!(fault.write, Some(false));
    }
}

#[test]
fn a_range_of_nothing_or_beyond_all_addresses_is_refused() {
    let memory = readable(1);
    let handler = || Arc::new(OpenHandler { memory: memory.clone(), first: |_: &Fault| () });
    let start = memory.base().as_ptr().cast_const();
    assert!(fault::register(start, 0, handler()).is_err());
    assert!(fault::register(start, usize::MAX, handler()).is_err());
}

#[test]
fn a_handler_learns_that_the_content_of_a_page_is_lost() {
    let memory = readable(1);
    let uffd = match Uffd::open_for_pager() {
        Ok(uffd) => uffd,
        Err(error) => return println!("SKIPPED: pages cannot be poisoned: {error}"),
    };
    let start = memory.base().as_ptr();
    uffd.register(start, PAGE_SIZE, Interest::MISSING).unwrap();
    if let Err(error) = uffd.poison(start, PAGE_SIZE) {
        return println!("SKIPPED: pages cannot be poisoned: {error}");
    }
    /// Replaces the poisoned page, so that the access continues.
    struct ReplaceHandler(Arc<Reservation>, Arc<Mutex<Vec<Fault>>>);
    impl FaultHandler for ReplaceHandler {
        fn on_fault(&self, fault: &Fault) -> bool {
            self.1.lock().unwrap().push(*fault);
            self.0.map_anonymous(PageRange::new(0, 1), Protection::ReadWrite).is_ok()
        }
    }
    let seen = Arc::new(Mutex::new(Vec::with_capacity(4)));
    let handler = Arc::new(ReplaceHandler(memory.clone(), seen.clone()));
    let _registration = fault::register(start, PAGE_SIZE, handler).unwrap();
    // SAFETY: mapped, and the handler replaces the unreadable page.
    assert_eq!(unsafe { start.read_volatile() }, 0);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1);
    if seen[0].cause == FaultCause::Unavailable {
        return println!(
            "SKIPPED: this kernel was built without CONFIG_MEMORY_FAILURE, and reports no lost page"
        );
    }
    assert_eq!((seen[0].signal, seen[0].cause), (FaultSignal::Bus, FaultCause::Poisoned));
    assert_ne!(seen[0].write, Some(true));
}

#[test]
fn a_child_of_a_fork_drops_ranges_whose_handlers_its_parent_is_in() {
    let held = FaultCounts::default();
    let slow = readable(1);
    let handler = held.clone();
    let mut registration = Some(watch(&slow, move |_| handler.wait()));
    std::thread::scope(|scope| {
        scope.spawn(|| poke(&slow, 0));
        held.until(1);
        // SAFETY: the child allocates, which the C library's fork allows, and touches nothing that
        // threads of the parent may have locked.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let memory = readable(1);
            let mine = watch(&memory, |_| ());
            poke(&memory, 0);
            drop(mine);
            drop(registration.take());
            // SAFETY: ends the child and nothing else.
            unsafe { libc::_exit(0) };
        }
        let patience = Instant::now();
        let mut status = 0;
        // SAFETY: looks for the child just made.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
            if patience.elapsed() > Duration::from_secs(60) {
                // SAFETY: ends the child just made.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        held.go.store(true, Ordering::SeqCst);
        assert_eq!(status, 0);
    });
}

/// A thread can fault, lose the processor, and look its range up after the owner has opened the
/// memory and dropped the registration. Its access succeeds now, so no other handler, nor the
/// default action, may see the fault.
#[test]
fn a_fault_that_is_looked_up_after_its_range_was_dropped_is_retried() {
    use std::os::unix::process::ExitStatusExt;
    static OURS: AtomicUsize = AtomicUsize::new(0);
    static LATE: Mutex<Option<(Arc<Reservation>, fault::Registration)>> = Mutex::new(None);
    /// The owner's work, between the fault and its lookup.
    extern "C" fn late(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        if let Some((memory, registration)) = LATE.lock().unwrap().take() {
            memory.protect(PageRange::new(0, 1), Protection::ReadWrite).unwrap();
            drop(registration);
        }
        type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: the address of the handler that `late` replaced, which takes three arguments.
        let ours: Handler = unsafe { std::mem::transmute(OURS.load(Ordering::SeqCst)) };
        ours(signal, info, context);
    }
    const NAME: &str = "a_fault_that_is_looked_up_after_its_range_was_dropped_is_retried";
    const CHILD: &str = "AFRESH_TEST_LATE_FAULT";
    let Ok(argument) = std::env::var(CHILD) else {
        let run = |argument| afresh_sys::test_command(NAME).env(CHILD, argument).output().unwrap();
        let output = run("late");
        assert!(output.status.success(), "{output:?}");
        // A fault outside of all ranges still ends the process.
        assert_eq!(run("foreign").status.signal(), Some(libc::SIGSEGV));
        return;
    };
    let (first, second) = (readable(1), readable(1));
    let _second = watch(&second, |_| ());
    let registration = watch(&first, |_| ());
    if argument == "foreign" {
        drop(registration);
        poke(&first, 0);
        return;
    }
    // SAFETY: all-zero is a valid action; `late` has the signature that SA_SIGINFO names.
    unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        action.sa_sigaction = late as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, &mut before), 0);
        OURS.store(before.sa_sigaction, Ordering::SeqCst);
    }
    *LATE.lock().unwrap() = Some((first.clone(), registration));
    poke(&first, 0);
    // The handlers are still installed.
    poke(&second, 0);
}
