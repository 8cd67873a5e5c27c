//! A delta of 256 pages of a guest with 950 MiB: a micro-VM, a Linux program and a Wasm module.
//!
//! A save begins with the freeze of the guest. Its time is divided at the first write of a blob.
//! The rival writes and syncs the same pages to the same disk, in the same round.

use std::path::Path;
use std::time::Instant;

use afresh_memory::Image;
use afresh_pager::{SnapshotContents, SnapshotState};
use afresh_store::{GuestBuild, SaveRequest, Snapshot, Store};
use afresh_sys::{PAGE_SIZE, PageRange};
use anyhow::Result;
use serde_json::json;

use super::Options;
use super::corpus::{Scratch, pages_into};
use super::report::{Line, Sample};
use super::run::processor_time;
use super::writer::{DELTA_PAGES, write_and_sync};
use crate::Sink;
use crate::row::quantile;

/// Names of the cases.
pub(super) const CASES: [&str; 3] = ["delta-micro-vm", "delta-linux", "delta-wasm"];
/// Memory of the guests, in MiB. Smaller runs have as much as their other cases.
const MIB: usize = 950;
/// A save takes some milliseconds, so more rounds cost little.
const MIN_ROUNDS: usize = 31;

/// A frozen guest, of any kind.
struct FrozenGuest {
    image: Image,
    request: SaveRequest,
}

impl FrozenGuest {
    fn new<S: SnapshotState>(contents: &SnapshotContents<S>) -> Result<Self> {
        let guest: GuestBuild = contents.build();
        let mut request = SaveRequest::new(guest);
        request.state = contents.bytes()?;
        Ok(Self { image: contents.image().clone(), request })
    }
}

/// A guest whose memory has no page of zeros.
trait WritingGuest {
    /// Writes to as many pages as a delta has.
    fn write_pages(&mut self) -> Result<()>;

    /// Freezes it, as a save does.
    fn freeze(&mut self) -> Result<FrozenGuest>;
}

/// Saves a delta of each kind of guest that takes part.
pub(super) fn run(options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let is_full = !options.quick && options.mib >= Options::default().mib;
    let mib = if is_full { MIB } else { options.mib };
    for case in CASES.into_iter().filter(|case| options.wants(case)) {
        let guest = match case {
            "delta-micro-vm" => micro_vm::new(options, mib),
            "delta-linux" => linux::new(mib),
            _ => wasm::new(mib),
        };
        match guest {
            Ok(mut guest) => measure(case, mib, &mut *guest, options, sink)?,
            Err(error) => eprintln!("{case} left out: {error:#}"),
        }
    }
    Ok(())
}

fn measure(
    case: &str,
    mib: usize,
    guest: &mut dyn WritingGuest,
    options: &Options,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let scratch = Scratch::new(&options.dir)?;
    let store = Store::create(scratch.path().join("store"))?;
    let base = guest.freeze()?;
    store.save("base", &base.image, &base.request)?;
    let parent = store.load("base")?;
    let file = scratch.path().join("plain");
    let mut samples: [Vec<Sample>; 4] = Default::default();
    let (mut frozen, mut pages) = (Vec::new(), 0);
    for round in 0..options.rounds.max(MIN_ROUNDS) {
        guest.write_pages()?;
        let mut plain = Vec::new();
        if round % 2 == 0 {
            plain.push(write_plain(&file, pages.max(DELTA_PAGES))?);
        }
        let saved = save(guest, &base, &parent, &store)?;
        if round % 2 == 1 {
            plain.push(write_plain(&file, saved.pages)?);
        }
        frozen.push(saved.freeze);
        pages = saved.pages;
        for (samples, time) in samples.iter_mut().zip([plain, saved.times].concat()) {
            samples.push(time);
        }
    }
    let [plain, whole, before, write] = &samples;
    let freeze = json!((quantile(&mut frozen, 0.5) * 1e3).round() / 1e3);
    for (strategy, samples) in [
        ("write+fsync", plain),
        ("delta", whole),
        ("delta, before its first write", before),
        ("delta, from its first write", write),
    ] {
        let extra =
            vec![("mib", json!(mib)), ("pages", json!(pages)), ("freeze_ms", freeze.clone())];
        let table = "snapshot-write";
        sink(&Line { table, case, strategy, samples, rival: plain, delays: None, extra }.row());
    }
    Ok(())
}

/// Writes and syncs as many pages as a delta has.
fn write_plain(file: &Path, pages: usize) -> Result<Sample> {
    let mut bytes = vec![0; pages * PAGE_SIZE];
    pages_into(0, &mut bytes);
    let (start, cpu) = (Instant::now(), processor_time());
    write_and_sync(file, &bytes)?;
    Ok(sample(start.elapsed().as_secs_f64() * 1e3, processor_time() - cpu))
}

fn sample(total: f64, cpu: f64) -> Sample {
    Sample { total, first_1000: total, release: total, cpu, ..Sample::default() }
}

/// A delta that was saved.
struct SavedDelta {
    /// The whole save, the time before its first write, and the time from then on.
    times: Vec<Sample>,
    /// Milliseconds of the freeze.
    freeze: f64,
    pages: usize,
}

/// Freezes the guest and saves the pages that differ from `base`.
fn save(
    guest: &mut dyn WritingGuest,
    base: &FrozenGuest,
    parent: &Snapshot,
    store: &Store,
) -> Result<SavedDelta> {
    let (start, cpu) = (Instant::now(), processor_time());
    let FrozenGuest { image, mut request } = guest.freeze()?;
    let freeze = start.elapsed();
    let changed = base.image.differing_content(&image)?;
    let pages = changed.iter().map(|run: &PageRange| run.len).sum();
    request.options.parent = Some(parent.clone());
    request.options.changed = Some(changed);
    request.options.compared = true;
    let prepared = start.elapsed();
    let (_, times) = store.save_timed("delta", &image, &request)?;
    let total = start.elapsed().as_secs_f64() * 1e3;
    let cpu = processor_time() - cpu;
    let before = (prepared + times.before_write).as_secs_f64() * 1e3;
    anyhow::ensure!(pages >= DELTA_PAGES, "the guest changed {pages} pages");
    let times = vec![sample(total, cpu), sample(before, 0.0), sample(total - before, 0.0)];
    Ok(SavedDelta { times, freeze: freeze.as_secs_f64() * 1e3, pages })
}

/// Pages between two that a guest writes.
fn stride(pages: usize) -> usize {
    (pages / DELTA_PAGES).max(1)
}

#[cfg(feature = "vm")]
mod micro_vm {
    use afresh_vm::{PAGE, Sandbox, Snapshot};
    use anyhow::Context;

    use super::*;

    /// Pages that the guest keeps for its program, stack, input and allocator.
    const OVERHEAD: usize = 80;

    /// The `dirty` sample, which writes words to its pages.
    struct MicroVm {
        sandbox: Sandbox,
        /// The state that each round begins with.
        base: Snapshot,
        pages: usize,
        round: u64,
    }

    pub(super) fn new(options: &Options, mib: usize) -> Result<Box<dyn WritingGuest>> {
        let path = &options.vm_guest;
        let program = std::fs::read(path).with_context(|| {
            format!("{}; `cargo xtask guests --only vm` builds it", path.display())
        })?;
        let pages = (mib << 20) / PAGE_SIZE - OVERHEAD;
        let mut sandbox = Sandbox::builder().memory((mib as u64) << 20).build(&program)?;
        debug_assert_eq!(PAGE, PAGE_SIZE as u64);
        sandbox.call(&words(&[1, 0, pages as u64, 1, 7]))?;
        let base = sandbox.snapshot()?;
        // The next freeze is that of the base: it copies nothing.
        sandbox.restore(&base)?;
        Ok(Box::new(MicroVm { sandbox, base, pages, round: 7 }))
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    impl WritingGuest for MicroVm {
        fn write_pages(&mut self) -> Result<()> {
            self.sandbox.restore(&self.base)?;
            let stride = stride(self.pages) as u64;
            for page in 0..DELTA_PAGES as u64 {
                // Equal pages would be stored once.
                self.round += 1;
                self.sandbox.call(&words(&[1, page * stride, 1, 1, self.round]))?;
            }
            Ok(())
        }

        fn freeze(&mut self) -> Result<FrozenGuest> {
            FrozenGuest::new(&self.sandbox.snapshot()?.freeze()?)
        }
    }
}

#[cfg(not(feature = "vm"))]
mod micro_vm {
    use super::*;

    pub(super) fn new(_: &Options, _: usize) -> Result<Box<dyn WritingGuest>> {
        anyhow::bail!("this build has no micro-VMs")
    }
}

#[cfg(feature = "linux")]
mod linux {
    use afresh_linux::Instance;
    use anyhow::Context;

    use super::*;
    use crate::linux::Python;

    /// CPython, which writes to each page of a large object, and then to some of them.
    struct Program(Instance);

    const REQUEST: &[u8] = b"write\n";

    pub(super) fn new(mib: usize) -> Result<Box<dyn WritingGuest>> {
        let bytes = mib << 20;
        let step = stride(bytes / PAGE_SIZE) * PAGE_SIZE;
        let script = format!(
            "import sys\nb = bytearray({bytes})\n\
             for i in range(0, {bytes}, {PAGE_SIZE}): b[i:i+8] = (i + 1).to_bytes(8, 'little')\n\
             for line in sys.stdin:\n    \
             for i in range(8, {bytes}, {step}): b[i] = (b[i] + 1) & 255\n    \
             sys.stdout.write('done\\n'); sys.stdout.flush()\n"
        );
        let program = Python::find()?.guest(&script).memory_limit(2 * bytes as u64 + (1 << 30));
        let warm = program.request("write\n").warm()?;
        let mut instance = warm.instance();
        // Pages that the first calls alone write belong to the base.
        anyhow::ensure!(instance.call(REQUEST)? == b"done\n", "the guest answers otherwise");
        Ok(Box::new(Program(instance)))
    }

    impl WritingGuest for Program {
        fn write_pages(&mut self) -> Result<()> {
            self.0.call(REQUEST).map(drop).context("the guest")
        }

        fn freeze(&mut self) -> Result<FrozenGuest> {
            FrozenGuest::new(&self.0.freeze()?)
        }
    }
}

#[cfg(not(feature = "linux"))]
mod linux {
    use super::*;

    pub(super) fn new(_: usize) -> Result<Box<dyn WritingGuest>> {
        anyhow::bail!("this build has no Linux programs")
    }
}

mod wasm {
    use afresh_wasm::{
        Engine, EngineConfig, Entry, Guest, GuestOptions, LeaseOptions, Mode, OwnedLease, WarmUp,
    };
    use wasm_encoder::{
        BlockType, CodeSection, ExportKind, ExportSection, Function, FunctionSection, MemArg,
        MemorySection, MemoryType, Module as Encoded, TypeSection, ValType,
    };

    use super::*;

    /// A module that writes to pages of its memory.
    struct Module {
        lease: OwnedLease,
        entry: Entry<(i32, i32, i32), ()>,
        pages: usize,
        round: i32,
    }

    /// `write(step, end, value)` writes to a word at each multiple of `step` bytes below `end` the
    /// value, plus the address. `fill` writes to all pages.
    fn module(mib: usize) -> Vec<u8> {
        const WORD: MemArg = MemArg { offset: 0, align: 2, memory_index: 0 };
        let mut types = TypeSection::new();
        types.ty().function([ValType::I32; 3], []);
        types.ty().function([], []);
        let mut functions = FunctionSection::new();
        functions.function(0).function(1);
        let mut memories = MemorySection::new();
        memories.memory(MemoryType {
            minimum: (mib as u64) << 4,
            maximum: None,
            memory64: false,
            shared: false,
            page_size_log2: None,
        });
        let mut exports = ExportSection::new();
        exports.export("memory", ExportKind::Memory, 0);
        exports.export("write", ExportKind::Func, 0).export("fill", ExportKind::Func, 1);
        let mut write = Function::new([(1, ValType::I32)]);
        let mut code = write.instructions();
        code.loop_(BlockType::Empty);
        code.local_get(3).local_get(3).local_get(2).i32_add().i32_store(WORD);
        code.local_get(3).local_get(0).i32_add().local_tee(3);
        code.local_get(1).i32_lt_u().br_if(0);
        code.end().end();
        let mut fill = Function::new([]);
        let mut code = fill.instructions();
        code.i32_const(PAGE_SIZE as i32).i32_const((mib << 20) as i32).i32_const(1).call(0).end();
        let mut codes = CodeSection::new();
        codes.function(&write).function(&fill);
        let mut module = Encoded::new();
        module.section(&types).section(&functions).section(&memories);
        module.section(&exports).section(&codes);
        module.finish()
    }

    pub(super) fn new(mib: usize) -> Result<Box<dyn WritingGuest>> {
        let engine = Engine::new(EngineConfig { timeouts: false, ..EngineConfig::default() })?;
        let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &module(mib), options)?;
        let warm = guest.warm(WarmUp::new().call("fill", &[]))?;
        let entry = warm.entry("write")?;
        let lease = warm.lease_owned(&LeaseOptions::default())?;
        let pages = (mib << 20) / PAGE_SIZE;
        Ok(Box::new(Module { lease, entry, pages, round: 1 }))
    }

    impl WritingGuest for Module {
        fn write_pages(&mut self) -> Result<()> {
            self.round += 1;
            let step = (stride(self.pages) * PAGE_SIZE) as i32;
            let end = step * DELTA_PAGES as i32;
            Ok(self.lease.invoke(&self.entry, (step, end, self.round))?)
        }

        fn freeze(&mut self) -> Result<FrozenGuest> {
            FrozenGuest::new(&self.lease.freeze()?)
        }
    }
}
