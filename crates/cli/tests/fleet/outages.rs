//! Times in which clients get no answer, by the fault that they met.
//!
//! An outage of a sandbox is the time from the first request without an answer, or from the only
//! one, to the next answer. An outage of the fleet is the time between two answers to any client.
//! The lateness is that of a thread that only sleeps: no host can be on time while it is late.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time that the sleeping thread asks for.
const TICK: Duration = Duration::from_millis(20);

/// The worst times during one fault.
#[derive(Clone, Debug)]
struct Worst {
    fault: String,
    begun: Instant,
    sandbox: Duration,
    fleet: Duration,
    late: Duration,
}

impl Worst {
    fn new(fault: String) -> Self {
        let none = Duration::ZERO;
        Self { fault, begun: Instant::now(), sandbox: none, fleet: none, late: none }
    }
}

/// The outages of a run.
#[derive(Debug)]
pub(crate) struct Outages {
    /// In the order of their faults.
    worst: Mutex<Vec<Worst>>,
    /// The last answer to any client; none while all clients rest.
    answered: Mutex<Option<Instant>>,
    /// The times in which the sleeping thread was late.
    late: Mutex<Vec<(Instant, Instant)>>,
}

impl Outages {
    pub(crate) fn new() -> Self {
        let worst = Mutex::new(vec![Worst::new("none".to_owned())]);
        Self { worst, answered: Mutex::new(None), late: Mutex::default() }
    }

    /// A fault begins.
    pub(crate) fn begin(&self, fault: String) {
        self.worst.lock().unwrap().push(Worst::new(fault));
    }

    /// A sandbox answered a client that has waited since then.
    pub(crate) fn answered(&self, since: Instant) {
        let now = Instant::now();
        self.note(since, now, |worst| &mut worst.sandbox);
        let last = self.answered.lock().unwrap().replace(now);
        if let Some(last) = last {
            self.note(last, now, |worst| &mut worst.fleet);
        }
    }

    /// All clients rest.
    pub(crate) fn rest(&self) {
        *self.answered.lock().unwrap() = None;
    }

    /// Measures how late a thread of this machine wakes, until the run is over.
    pub(crate) fn measure_lateness(&self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            std::thread::sleep(TICK);
            let now = Instant::now();
            self.note(begun + TICK, now, |worst| &mut worst.late);
            if now > begun + 2 * TICK {
                self.late.lock().unwrap().push((begun + TICK, now));
            }
        }
    }

    /// The time since `from` in which the machine was late.
    pub(crate) fn lateness_since(&self, from: Instant) -> Duration {
        // The sleeping thread notes its lateness once it is awake.
        std::thread::sleep(2 * TICK);
        let late = self.late.lock().unwrap();
        let since =
            |(begun, end): &(Instant, Instant)| end.saturating_duration_since(from.max(*begun));
        late.iter().rev().take_while(|(_, end)| *end > from).map(since).sum()
    }

    /// Notes a time for the fault that it overlaps most.
    fn note(&self, from: Instant, to: Instant, which: fn(&mut Worst) -> &mut Duration) {
        let mut worst = self.worst.lock().unwrap();
        let overlap = |at: usize, all: &[Worst]| {
            let end = all.get(at + 1).map_or(to, |next| next.begun.min(to));
            end.saturating_duration_since(all[at].begun.max(from))
        };
        let met = (0..worst.len()).max_by_key(|at| overlap(*at, &worst)).unwrap();
        let known = which(&mut worst[met]);
        *known = (*known).max(to.saturating_duration_since(from));
    }

    /// Prints the worst outages of each kind of fault.
    pub(crate) fn print(&self) {
        let all = self.worst.lock().unwrap();
        let mut faults: Vec<&str> = all.iter().map(|worst| worst.fault.as_str()).collect();
        faults.sort_unstable();
        faults.dedup();
        for fault in faults {
            let of: Vec<&Worst> = all.iter().filter(|worst| worst.fault == fault).collect();
            let most = |which: fn(&Worst) -> Duration| of.iter().map(|one| which(one)).max();
            let mut sandboxes: Vec<Duration> = of.iter().map(|worst| worst.sandbox).collect();
            sandboxes.sort_unstable();
            println!(
                "checker: {fault}, {} times: outage of a sandbox at most {:.1?} (median {:.1?}), of the fleet {:.1?}; the machine was up to {:.1?} late",
                of.len(),
                most(|worst| worst.sandbox).unwrap(),
                sandboxes[sandboxes.len() / 2],
                most(|worst| worst.fleet).unwrap(),
                most(|worst| worst.late).unwrap(),
            );
        }
    }
}

#[test]
fn an_outage_belongs_to_the_fault_that_it_overlaps_most() {
    let (outages, start) = (Outages::new(), Instant::now());
    let second = Duration::from_secs(1);
    for (at, fault) in ["one", "two", "three"].iter().enumerate() {
        let begun = start + second * at as u32;
        outages.worst.lock().unwrap().push(Worst { begun, ..Worst::new((*fault).to_owned()) });
    }
    outages.note(start + second / 2, start + second * 7 / 4, |worst| &mut worst.sandbox);
    let worst = outages.worst.lock().unwrap();
    let times: Vec<Duration> = worst.iter().map(|worst| worst.sandbox).collect();
    assert_eq!(times, [Duration::ZERO, Duration::ZERO, second * 5 / 4, Duration::ZERO]);
}

#[test]
fn lateness_counts_within_its_window_alone() {
    let (outages, start) = (Outages::new(), Instant::now());
    let second = Duration::from_secs(1);
    let late =
        [(0, 2), (3, 4), (6, 9)].map(|(begun, end)| (start + second * begun, start + second * end));
    outages.late.lock().unwrap().extend(late);
    let since = |seconds| outages.lateness_since(start + second * seconds);
    assert_eq!([0, 1, 4, 7, 9].map(since), [6, 5, 3, 2, 0].map(|seconds| second * seconds));
}
