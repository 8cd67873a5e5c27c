//! How long a save stops a guest that writes 1 % of its pages a second.
//!
//! A VM is memory that is served through userfaultfd, in this process. A slot is plain guest
//! memory. Each contestant saves the same changes; its time is the one for which the guest is
//! stopped.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_memory::{ImageBuilder, Slot, SlotConfig};
use afresh_pager::SnapshotSource;
use afresh_pager::vmm::{Vm, VmSaveOptions, VmmOptions};
use afresh_store::{SaveRequest, Store};
use afresh_sys::{Advice, Interest, PAGE_SIZE, PageRange, Protection, Reservation, Uffd, socket};
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::corpus::{Random, pages_into};
use super::report::{Line, Sample};
use crate::Sink;

/// How often the guest writes: 1 % of its pages a second in parts of this time.
const PERIOD: Duration = Duration::from_millis(5);

/// How often a guest looks whether it is paused.
const PAUSE: Duration = Duration::from_micros(50);

/// A guest that writes to random pages until it is paused.
struct Writer {
    base: usize,
    pages: usize,
    paused: AtomicBool,
    rests: AtomicBool,
    over: AtomicBool,
    written: AtomicUsize,
}

impl Writer {
    fn run(&self) {
        let mut random = Random(7);
        let started = Instant::now();
        while !self.over.load(Ordering::Acquire) {
            self.rests.store(self.paused.load(Ordering::Acquire), Ordering::Release);
            if self.rests.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
                continue;
            }
            let due = (started.elapsed().as_secs_f64() * self.pages as f64 / 100.0) as usize;
            // It does not catch up with writes for which it had no time.
            let done =
                self.written.load(Ordering::Relaxed).max(due.saturating_sub(self.pages / 1000));
            for _ in done..due {
                let page = random.next() as usize % self.pages;
                let at = (self.base + page * PAGE_SIZE + 512) as *mut u64;
                // SAFETY: the page is mapped until this thread has ended, and only this thread
                // writes to it.
                unsafe { at.write_volatile(random.next()) };
            }
            self.written.store(due.max(done), Ordering::Relaxed);
            std::thread::sleep(PERIOD);
        }
    }

    /// Stops the guest, which `work` does something with, and returns for how long.
    fn stopped<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Duration> {
        self.paused.store(true, Ordering::Release);
        while !self.rests.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let started = Instant::now();
        work()?;
        let time = started.elapsed();
        self.paused.store(false, Ordering::Release);
        Ok(time)
    }
}

fn sample(time: Duration) -> Sample {
    let total = time.as_secs_f64() * 1e3;
    Sample { total, first_1000: total, release: total, ..Sample::default() }
}

/// A way to save: its name, its stops, and more fields.
type Contestant<'a> = (&'a str, &'a [Sample], Vec<(&'static str, Value)>);

fn rows<const N: usize>(case: &str, contestants: [Contestant<'_>; N], sink: &mut Sink<'_>) {
    let rival = contestants[0].1;
    for (strategy, samples, extra) in contestants {
        let table = "save-running";
        sink(&Line { table, case, strategy, samples, rival, delays: None, extra }.row());
    }
}

/// Saves of a VM that is served by the pager.
pub(super) fn vm(store: &Store, pages: usize, rounds: usize, sink: &mut Sink<'_>) -> Result<()> {
    let uffd = Uffd::open_for_pager().context("userfaultfd")?;
    let memory = Reservation::new(pages)?;
    let all = PageRange::new(0, pages);
    memory.map_anonymous(all, Protection::ReadWrite)?;
    memory.advise(all, Advice::NoHugePage)?;
    uffd.register(memory.page_ptr(0), all.byte_len(), Interest::MISSING)?;
    let base = memory.page_ptr(0) as usize;
    let (ours, theirs) = UnixStream::pair()?;
    let message = json!([{ "base_host_virt_addr": base, "size": all.byte_len(), "offset": 0, "page_size": PAGE_SIZE }]);
    socket::send(&ours, message.to_string().as_bytes(), &[uffd.as_fd()])?;
    let source = Arc::new(SnapshotSource::new(store.load("whole")?));
    let stop = AtomicBool::new(false);
    let mut options = VmmOptions::new(&stop);
    // The VMM is this process.
    options.end_on_failure = false;
    let vm = Vm::accept(&theirs, source, &options)?;
    let writer = Writer {
        base,
        pages,
        paused: AtomicBool::new(false),
        rests: AtomicBool::new(false),
        over: AtomicBool::new(false),
        written: AtomicUsize::new(0),
    };
    let (mut paused, mut frozen) = (Vec::new(), Vec::new());
    let (mut prepared, mut saved, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    std::thread::scope(|scope| -> Result<()> {
        let serving = scope.spawn(|| vm.serve(&options));
        let guest = scope.spawn(|| writer.run());
        let mut run = || -> Result<()> {
            while vm.stats().missing > 0 {
                anyhow::ensure!(!serving.is_finished(), "the pager has ended");
                std::thread::sleep(PERIOD);
            }
            for _ in 0..rounds {
                let time =
                    writer.stopped(|| Ok(vm.snapshot(store, "paused", &Default::default())?))?;
                paused.push(sample(time));
                let started = Instant::now();
                let watch = vm.prepare()?.watch;
                prepared.push(started.elapsed().as_secs_f64() * 1e3);
                frozen.push(sample(writer.stopped(|| Ok(vm.freeze(Some(watch))?))?));
                let started = Instant::now();
                // A guest that writes for a second before it is saved costs the most copies.
                let mut options = VmSaveOptions::default();
                options.watch = Some(watch);
                vm.snapshot(store, "running", &options)?;
                saved.push(started.elapsed().as_secs_f64() * 1e3);
                copied.push(vm.stats().served.faults);
            }
            Ok(())
        };
        let done = run();
        writer.over.store(true, Ordering::Release);
        // It panics only if the guest does.
        let _ = guest.join();
        stop.store(true, Ordering::Release);
        let _ = serving.join();
        done
    })?;
    let case = format!("vm-{}MiB", (pages * PAGE_SIZE) >> 20);
    let extra = vec![
        ("prepare_ms", json!(median(prepared))),
        ("save_ms", json!(median(saved))),
        ("faults", json!(copied.last())),
    ];
    rows(
        &case,
        [("paused snapshot", &paused, Vec::new()), ("prepare+freeze", &frozen, extra)],
        sink,
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    crate::row::quantile(&mut values, 0.5)
}

/// Saves of a slot whose guest has written to 1 % of its pages.
pub(super) fn slot(
    store: &Store,
    pages: usize,
    rounds: usize,
    save: &SaveRequest,
    sink: &mut Sink<'_>,
) -> Result<()> {
    const PART: usize = 512;
    let mut builder = ImageBuilder::new(pages);
    let mut bytes = vec![0; PART * PAGE_SIZE];
    for first in (0..pages).step_by(PART) {
        let len = PART.min(pages - first) * PAGE_SIZE;
        pages_into(first, &mut bytes[..len]);
        builder.segment(first * PAGE_SIZE, &bytes[..len])?;
    }
    let image = builder.build()?;
    let mut slot = Slot::new(&image, SlotConfig::default())?;
    let random = std::cell::RefCell::new(Random(9));
    let poke = |slot: &Slot, count: usize| {
        let mut random = random.borrow_mut();
        for _ in 0..count {
            let page = random.next() as usize % pages;
            let value = random.next();
            // SAFETY: the page is in the slot, which only this thread uses.
            unsafe { slot.base().add(page * PAGE_SIZE).cast::<u64>().write_volatile(value) };
        }
    };
    let dirty = |slot: &mut Slot| -> Result<()> {
        slot.reset()?;
        poke(slot, pages / 100);
        Ok(())
    };
    let parent = store.load("whole")?;
    let write = |frozen: &afresh_memory::Image| -> Result<()> {
        let changed = image.differing_content(frozen)?;
        let mut save = save.clone();
        save.options.parent = Some(parent.clone());
        save.options.changed = Some(changed);
        save.options.compared = true;
        store.save("slot", frozen, &save)?;
        Ok(())
    };
    // Once, so that all find the write set of the guest.
    dirty(&mut slot)?;
    let (mut paused, mut copied, mut live) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prepared, mut preparing) = (Vec::new(), Vec::new());
    let (mut saved, mut saved_live) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        dirty(&mut slot)?;
        let started = Instant::now();
        write(&slot.freeze()?)?;
        paused.push(sample(started.elapsed()));
        dirty(&mut slot)?;
        let started = Instant::now();
        let state = slot.freeze()?;
        copied.push(sample(started.elapsed()));
        let started = Instant::now();
        write(&state)?;
        saved.push(started.elapsed().as_secs_f64() * 1e3);
        dirty(&mut slot)?;
        let started = Instant::now();
        let state = slot.freeze_live()?;
        live.push(sample(started.elapsed()));
        let started = Instant::now();
        write(&state)?;
        saved_live.push(started.elapsed().as_secs_f64() * 1e3);
        drop(state);
        dirty(&mut slot)?;
        let started = Instant::now();
        slot.prepare_freeze()?.run()?;
        let preparation = started.elapsed();
        preparing.push(preparation.as_secs_f64() * 1e3);
        // The writes of a guest that ran meanwhile.
        poke(&slot, (preparation.as_secs_f64() * pages as f64 / 100.0).ceil() as usize);
        let started = Instant::now();
        let state = slot.freeze_live()?;
        prepared.push(sample(started.elapsed()));
        write(&state)?;
    }
    let case = format!("slot-{}MiB", (pages * PAGE_SIZE) >> 20);
    let copied_extra = vec![("save_ms", json!(median(saved)))];
    let live_extra = vec![("save_ms", json!(median(saved_live)))];
    let prepared_extra = vec![("prepare_ms", json!(median(preparing)))];
    rows(
        &case,
        [
            ("paused save", &paused, Vec::new()),
            ("save point, copied at the stop", &copied, copied_extra),
            ("save point", &live, live_extra),
            ("prepared save point", &prepared, prepared_extra),
        ],
        sink,
    );
    Ok(())
}
