//! One conformance test for every way of noticing writes: the next reset undoes every write of the
//! guest and the host, at any address.

use crate::common::{guest, kvm, words};
use afresh_vm::{ResetMethod, Sandbox, SandboxBuilder, Span, Tracking};

const PAGE: u64 = 4096;

/// A sandbox with adjacent and separated regions, and a copy of all it holds.
struct Subject {
    method: ResetMethod,
    sandbox: Sandbox,
    spans: Vec<Span>,
    before: Vec<Vec<u8>>,
}

fn builder() -> SandboxBuilder {
    Sandbox::builder()
        .memory(2 << 20)
        .host_function("stamp", |round: u64| round)
        .read_write(3 * PAGE)
        .read_write(5 * PAGE)
        .gap(2 * PAGE)
        .read_write(65 * PAGE)
}

impl Subject {
    fn new(method: ResetMethod, builder: SandboxBuilder) -> Self {
        let sandbox = builder.reset_method(method).build(&guest("dirty")).unwrap();
        let regions = sandbox.regions();
        let mut spans = vec![sandbox.heap()];
        spans.extend([0, 1, 3].map(|index| regions[index]));
        let mut subject = Self { method, sandbox, spans, before: Vec::new() };
        subject.before = subject.content();
        subject
    }

    fn content(&self) -> Vec<Vec<u8>> {
        let read = |span: &Span| {
            let mut bytes = vec![0; span.len as usize];
            self.sandbox.read_memory(span.start, &mut bytes).unwrap();
            bytes
        };
        self.spans.iter().map(read).collect()
    }

    fn guest_writes(&mut self, address: u64) {
        self.sandbox.call(&words(&[4, address, u64::MAX])).unwrap();
    }

    fn host_writes(&mut self, address: u64, len: usize) {
        self.sandbox.write_memory(address, &vec![0xee; len]).unwrap();
    }

    /// Resets, and compares with the copy and with the image.
    fn check(&mut self, what: &str) {
        assert!(self.content() != self.before, "{:?}: {what} wrote nothing", self.method);
        self.sandbox.reset().unwrap();
        for (now, before) in self.content().iter().zip(&self.before) {
            let place = now.iter().zip(before).position(|(a, b)| a != b);
            assert_eq!(place, None, "{:?}: {what} left a trace", self.method);
        }
        self.sandbox.verify().unwrap_or_else(|e| panic!("{:?}, {what}: {e}", self.method));
    }
}

#[test]
fn every_tracker_notices_every_write() {
    if !kvm() {
        return;
    }
    for method in ResetMethod::ALL {
        let mut subject = Subject::new(method, builder());
        // Three times: the second and third meet pages that were learned or protected again.
        for _ in 0..3 {
            for span in subject.spans.clone() {
                subject.guest_writes(span.start);
                subject.check("the guest's write to a first page");
                subject.guest_writes(span.end() - 8);
                subject.check("the guest's write to a last page");
                subject.guest_writes(span.start + PAGE - 3);
                subject.check("the guest's write across two pages");
                subject.host_writes(span.start, 1);
                subject.check("the host's write to a first page");
                subject.host_writes(span.end() - 1, 1);
                subject.check("the host's write to a last page");
                subject.host_writes(span.start + 5, 2 * PAGE as usize);
                subject.check("the host's write across pages");
            }
            // The first two regions touch: one write reaches into both.
            let seam = subject.spans[1].end();
            assert_eq!(seam, subject.spans[2].start);
            subject.guest_writes(seam - 4);
            subject.check("the guest's write across regions");
            subject.host_writes(seam - 4, 8);
            subject.check("the host's write across regions");
            let arrived = subject.sandbox.call(&words(&[8, 40])).unwrap();
            assert_eq!(arrived, 40_u64.to_le_bytes(), "{method:?}");
            subject.check("interleaved writes of guest and host");
        }
    }
}

#[test]
fn a_page_written_by_guest_and_host_is_restored_in_either_order() {
    if !kvm() {
        return;
    }
    for method in ResetMethod::ALL {
        let mut subject = Subject::new(method, builder());
        let address = subject.spans[0].start + 100 * PAGE;
        for _ in 0..3 {
            subject.host_writes(address, 9);
            subject.guest_writes(address + 100);
            subject.check("host, then guest");
            subject.guest_writes(address + PAGE);
            subject.host_writes(address + PAGE + 100, 9);
            subject.check("guest, then host");
        }
    }
}

#[test]
fn a_full_ring_loses_nothing() {
    if !kvm() {
        return;
    }
    // More pages than the largest ring has entries.
    let pages = 70_000;
    let memory = (pages + 2000) * PAGE;
    for method in ResetMethod::ALL.into_iter().filter(|method| method.tracking == Tracking::Ring) {
        let sandbox = Sandbox::builder().memory(memory).reset_method(method).build(&guest("dirty"));
        let mut sandbox = sandbox.unwrap();
        for round in 1..3_u64 {
            sandbox.call(&words(&[1, 0, pages, 1, round])).unwrap();
            let sum = sandbox.call(&words(&[2, 0, pages, 1])).unwrap();
            assert_eq!(sum, (pages * round).to_le_bytes(), "{method:?}");
            sandbox.reset().unwrap();
            sandbox.verify().unwrap_or_else(|error| panic!("{method:?}: {error}"));
        }
    }
}

#[test]
fn a_guest_that_outgrows_the_ring_is_moved_to_the_log() {
    if !kvm() {
        return;
    }
    let pages = 70_000;
    let sandbox = Sandbox::builder().memory((pages + 2000) * PAGE).build(&guest("dirty"));
    let mut sandbox = sandbox.unwrap();
    if sandbox.reset_method().tracking != Tracking::Ring {
        eprintln!("SKIPPED: this host has no dirty ring to outgrow");
        return;
    }
    let handle = sandbox.stop_handle();
    for round in 1..5_u64 {
        sandbox.call(&words(&[1, 0, pages, 1, round])).unwrap();
        let sum = sandbox.call(&words(&[2, 0, pages, 1])).unwrap();
        assert_eq!(sum, (pages * round).to_le_bytes());
        sandbox.reset().unwrap();
        sandbox.verify().unwrap();
    }
    assert_eq!(sandbox.reset_method().tracking, Tracking::Log);
    // A handle from before still reaches the guest: this call would take very long.
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        handle.stop();
    });
    let error = sandbox.run(&words(&[1, 0, u64::MAX, 0, 1])).unwrap_err();
    assert!(error.to_string().contains("stop handle"), "{error}");
    stopper.join().unwrap();
    sandbox.verify().unwrap();
}
