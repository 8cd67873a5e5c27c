//! Micro-VMs that go through a snapshot: they start in the same state, without initialisation, and
//! a snapshot that is damaged never runs.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{guest, kvm, words};
use afresh_memory::{Feature, Features, Filler, Image, ImageError, Inserter, PageRange, Strategy};
use afresh_pager::Options;
use afresh_store::{Encoding, GuestBuild, MemoryPages, SaveRequest, Store};
use afresh_vm::{
    CallError, Frozen, GuestError, Incompatible, ResetMethod, Sandbox, SandboxBuilder,
    SharedMemory, Snapshot, SnapshotOptions, ThawError, Tracking,
};

const PAGES: u64 = 300;

fn builder() -> SandboxBuilder {
    Sandbox::builder().host_function("stamp", |round: u64| round)
}

/// A guest that has written to many pages, and a word of every one of them.
fn warm() -> (Sandbox, Snapshot) {
    let mut sandbox = builder().memory(4 << 20).stack(128 << 10).build(&guest("dirty")).unwrap();
    for page in (0..PAGES).step_by(2) {
        sandbox.call(&words(&[1, page, 1, 1, page + 1])).unwrap();
    }
    let snapshot = sandbox.checkpoint().unwrap();
    (sandbox, snapshot)
}

/// The answers of a guest to some calls, each from its pristine state.
fn answers(sandbox: &mut Sandbox) -> Vec<Vec<u8>> {
    let mut inputs: Vec<_> = (0..PAGES).step_by(7).map(|page| words(&[2, page, 1, 1])).collect();
    inputs.extend([
        words(&[2, 0, PAGES, 1]),
        words(&[8, 20]),
        words(&[0, 5, 6]),
        words(&[3, 9000]),
    ]);
    inputs.push(words(&[1, 3, 90, 3, 5]));
    inputs.iter().map(|input| sandbox.run(input).unwrap()).collect()
}

fn save(frozen: &Frozen, dir: &Path, with: &SnapshotOptions) -> Store {
    let store = Store::create(dir).unwrap();
    frozen.save(&store, "a", with).unwrap();
    store
}

fn load(store: &Store, name: &str) -> Frozen {
    Frozen::load(store.load(name).unwrap(), &Options::default()).unwrap()
}

#[test]
fn a_guest_out_of_a_snapshot_answers_like_the_one_that_was_frozen() {
    if !kvm() {
        return;
    }
    let some = [ResetMethod::default(), ResetMethod::new(Strategy::Discard, Tracking::Nothing)];
    for (encoding, methods) in [(Encoding::Raw, &ResetMethod::ALL[..]), (Encoding::Zstd, &some)] {
        let (mut sandbox, snapshot) = warm();
        let expected = answers(&mut sandbox);
        let dir = tempfile::tempdir().unwrap();
        let with = SnapshotOptions { encoding, ..SnapshotOptions::default() };
        let store = save(&snapshot.freeze().unwrap(), dir.path(), &with);
        drop((sandbox, snapshot));
        for &method in methods {
            let frozen = load(&store, "a");
            let mut thawed = match builder().reset_method(method).thaw(&frozen) {
                Ok(thawed) => thawed,
                Err(error) => {
                    // Only a forced method may be missing.
                    assert!(method != ResetMethod::default(), "{error}");
                    println!("SKIPPED: {method:?} is unavailable here: {error}");
                    continue;
                }
            };
            for _ in 0..3 {
                assert_eq!(answers(&mut thawed), expected, "{method:?}");
            }
            thawed.verify().unwrap();
            frozen.memory().wait(Duration::from_secs(20)).unwrap();
            thawed.verify().unwrap();
        }
        // And again through another snapshot, of a thawed guest.
        let thawed = builder().thaw(&load(&store, "a")).unwrap();
        let again = tempfile::tempdir().unwrap();
        let frozen = thawed.pristine().freeze().unwrap();
        let store = save(&frozen, again.path(), &SnapshotOptions::default());
        assert_eq!(answers(&mut builder().thaw(&load(&store, "a")).unwrap()), expected);
    }
}

#[test]
fn no_initialisation_runs_and_the_programs_own_variables_are_those_that_were_frozen() {
    if !kvm() {
        return;
    }
    let mut sandbox = Sandbox::builder().build(&guest("crash")).unwrap();
    for _ in 0..3 {
        sandbox.call(b" ").unwrap();
    }
    let frozen = sandbox.snapshot().unwrap().freeze().unwrap();
    drop(sandbox);
    let mut thawed = Sandbox::builder().thaw(&frozen).unwrap();
    for _ in 0..3 {
        assert_eq!(thawed.run(b" ").unwrap(), 4_u64.to_le_bytes());
    }
    assert!(thawed.run(b"u").is_err(), "the guest crashes");
    assert_eq!(thawed.run(b" ").unwrap(), 4_u64.to_le_bytes());
    thawed.verify().unwrap();
}

#[test]
fn a_delta_holds_the_writes_of_calls_and_a_guest_continues_from_it() {
    if !kvm() {
        return;
    }
    let (mut sandbox, snapshot) = warm();
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    sandbox.call(&words(&[1, 40, 3, 1, 99])).unwrap();
    let frozen = sandbox.snapshot().unwrap().freeze().unwrap();
    let expected = sandbox.call(&words(&[2, 0, PAGES, 1])).unwrap();
    let parent = Some(store.load("a").unwrap());
    frozen.save(&store, "b", &SnapshotOptions { parent, ..SnapshotOptions::default() }).unwrap();
    let delta = store.load("b").unwrap().inspect();
    // Three pages, the input buffer and the stack.
    let stored = delta.layers[1].stored;
    assert!((3..12).contains(&stored), "a delta of {stored} pages for three written");
    for frozen in [frozen, load(&store, "b")] {
        let mut fork = builder().thaw(&frozen).unwrap();
        for _ in 0..2 {
            assert_eq!(fork.run(&words(&[2, 0, PAGES, 1])).unwrap(), expected);
        }
    }
}

#[test]
fn nothing_of_one_call_is_seen_by_the_next_in_a_thawed_guest() {
    if !kvm() {
        return;
    }
    let (_, snapshot) = warm();
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    let mut thawed = builder().thaw(&load(&store, "a")).unwrap();
    let heap = thawed.heap();
    let canary = *b"canary: 5cf1d2a8";
    for round in 0..20_u64 {
        let at = heap.start + (20 + round * 13 % 200) * 4096 + 100;
        thawed.write_memory(at, &canary).unwrap();
        thawed.call(&words(&[1, round, 5, 9, 0x5cf1_d2a8])).unwrap();
        thawed.reset().unwrap();
        let mut memory = vec![0; heap.len as usize];
        thawed.read_memory(heap.start, &mut memory).unwrap();
        assert!(!memory.windows(canary.len()).any(|bytes| bytes == canary), "round {round}");
        assert!(!memory.windows(4).any(|bytes| bytes == 0x5cf1_d2a8_u32.to_le_bytes()));
    }
    thawed.verify().unwrap();
}

#[test]
fn two_thaws_of_one_state_have_different_generations() {
    if !kvm() {
        return;
    }
    let (_, snapshot) = warm();
    let frozen = snapshot.freeze().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        let mut thawed = builder().thaw(&frozen).unwrap();
        for _ in 0..3 {
            assert!(seen.insert(thawed.run(&words(&[7, 8])).unwrap()));
        }
    }
}

#[test]
fn regions_come_from_the_snapshot_or_must_be_those_it_was_frozen_with() {
    if !kvm() {
        return;
    }
    let elf = guest("dirty");
    let table = vec![7; 5000];
    let plain = || Sandbox::builder().gap(8192).read_only(table.clone()).read_write(12288);
    let mut sandbox = plain().memory(2 << 20).build(&elf).unwrap();
    let regions = sandbox.regions();
    sandbox.call(&words(&[4, regions[2].start + 4096, 0x1122_3344])).unwrap();
    let frozen = sandbox.snapshot().unwrap().freeze().unwrap();
    for builder in [Sandbox::builder(), plain()] {
        let mut thawed = builder.thaw(&frozen).unwrap();
        assert_eq!(thawed.regions(), regions);
        let byte = |at: u64| words(&[5, at]);
        assert_eq!(thawed.run(&byte(regions[1].start + 4999)).unwrap(), [7]);
        assert_eq!(thawed.run(&byte(regions[2].start + 4096)).unwrap(), [0x44]);
        assert!(thawed.run(&byte(regions[0].start)).is_err(), "a gap is a gap");
        thawed.verify().unwrap();
    }
    let wrong = [
        (Sandbox::builder().gap(8192), "adds 1 regions"),
        (Sandbox::builder().gap(8192).read_only(table.clone()).read_write(8192), "region 2"),
        (Sandbox::builder().gap(8192).read_only(vec![8; 5000]).read_write(12288), "other bytes"),
    ];
    for (builder, word) in wrong {
        let error = builder.thaw(&frozen).unwrap_err();
        assert!(matches!(error, ThawError::Guest(Incompatible::Regions(_))), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    // Shared memory is the host's, and must be brought.
    let memory = Arc::new(SharedMemory::new(4096).unwrap());
    let with = |memory: &Arc<SharedMemory>| Sandbox::builder().shared(Arc::clone(memory));
    let sandbox = with(&memory).build(&elf).unwrap();
    let place = sandbox.regions()[0].start;
    let frozen = sandbox.pristine().freeze().unwrap();
    let error = Sandbox::builder().thaw(&frozen).unwrap_err();
    assert!(matches!(error, ThawError::Guest(Incompatible::Regions(_))), "{error}");
    let mut thawed = with(&memory).thaw(&frozen).unwrap();
    thawed.run(&words(&[4, place, 0xabcd])).unwrap();
    let mut bytes = [0; 2];
    assert!(memory.read(0, &mut bytes));
    assert_eq!(bytes, [0xcd, 0xab]);
}

#[test]
fn host_functions_limits_and_log_are_the_builders() {
    if !kvm() {
        return;
    }
    let (_, snapshot) = warm();
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    let mut thawed = Sandbox::builder()
        .host_function("stamp", move |round: u64| {
            counter.fetch_add(1, Ordering::Relaxed);
            round
        })
        .timeout(Duration::from_secs(10))
        .thaw(&snapshot.freeze().unwrap())
        .unwrap();
    thawed.run(&words(&[8, 20])).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 20);
}

/// Flips a bit in the middle of the page layer.
fn damage(dir: &Path) {
    let blobs = std::fs::read_dir(dir.join("blobs/sha256")).unwrap();
    let layer =
        blobs.map(|e| e.unwrap().path()).max_by_key(|p| p.metadata().unwrap().len()).unwrap();
    std::fs::set_permissions(&layer, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&layer).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 1], middle).unwrap();
}

/// Whether guests run while pages are missing; prints it when they do not.
fn lazily() -> bool {
    let lazily = Features::host().has(Feature::UffdKernel);
    if !lazily {
        eprintln!("SKIPPED: no userfaultfd for faults of the kernel here; images are filled first");
    }
    lazily
}

#[test]
fn only_the_pages_that_calls_touch_are_fetched() {
    if !kvm() || !lazily() {
        return;
    }
    let (mut sandbox, snapshot) = warm();
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    let saved = store.load("a").unwrap();
    let frozen = Frozen::record(saved.clone()).unwrap();
    let mut thawed = builder().thaw(&frozen).unwrap();
    let program: usize = frozen.memory().touched().iter().map(|run| run.len).sum();
    let input = words(&[2, 100, 3, 2]);
    assert_eq!(thawed.run(&input).unwrap(), sandbox.run(&input).unwrap());
    let touched: usize = frozen.memory().touched().iter().map(|run| run.len).sum();
    assert!((3..30).contains(&(touched - program)), "{touched} pages, {program} of the program");
    assert!(!frozen.memory().pages().is_complete());
    // The recorded pages are present at once next time.
    let with =
        SnapshotOptions { working_set: frozen.memory().touched(), ..SnapshotOptions::default() };
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &with);
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
    let mut thawed = builder().thaw(&frozen).unwrap();
    assert_eq!(thawed.run(&input).unwrap(), sandbox.run(&input).unwrap());
    assert_eq!(frozen.memory().faults(), 0);
    thawed.verify().unwrap();
}

#[test]
fn guests_that_run_while_pages_arrive_agree_with_the_one_that_was_frozen() {
    if !kvm() {
        return;
    }
    let (mut sandbox, snapshot) = warm();
    let expected = answers(&mut sandbox);
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    for background in [false, true] {
        let by_kvm =
            |method: &ResetMethod| matches!(method.tracking, Tracking::Ring | Tracking::Log);
        for method in ResetMethod::ALL.into_iter().filter(by_kvm) {
            let options = Options { background, ..Options::default() };
            let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let Ok(mut thawed) = builder().reset_method(method).thaw(&frozen) else {
                            eprintln!("SKIPPED: {method:?} is unavailable here");
                            return;
                        };
                        let fork = thawed.pristine();
                        for _ in 0..2 {
                            assert_eq!(answers(&mut thawed), expected, "{method:?}");
                        }
                        // To and fro on a tree, while pages are still missing.
                        thawed.call(&words(&[1, 150, 9, 1, 7])).unwrap();
                        let next = thawed.snapshot().unwrap();
                        thawed.restore(&fork).unwrap();
                        assert_eq!(answers(&mut thawed), expected, "{method:?}");
                        thawed.restore(&next).unwrap();
                        let sum = thawed.run(&words(&[2, 150, 9, 1])).unwrap();
                        assert_eq!(sum, 63_u64.to_le_bytes());
                        assert_eq!(answers(&mut fork.fork().unwrap()), expected);
                        thawed.verify().unwrap();
                    });
                }
            });
        }
    }
}

#[test]
fn a_damaged_page_ends_the_call_with_its_cause() {
    if !kvm() {
        return;
    }
    let (_, snapshot) = warm();
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    damage(dir.path());
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
    let names_it = |error: &dyn std::error::Error| {
        assert!(error.to_string().contains("digest"), "{error}");
    };
    if !lazily() {
        return names_it(&builder().thaw(&frozen).unwrap_err());
    }
    let mut thawed = builder().thaw(&frozen).unwrap();
    let failed = (0..PAGES)
        .find_map(|page| thawed.call(&words(&[2, page, 1, 1])).err().map(|error| (page, error)));
    let (page, error) = failed.expect("the damaged page was used");
    assert!(matches!(error, CallError::Memory(_)), "{error}");
    names_it(&error);
    assert!((50..PAGES).contains(&page), "page {page} failed although the middle is damaged");
    // From now on everything refuses, and nothing touches the closed memory.
    let heap = thawed.heap().start;
    names_it(&thawed.read_memory(heap, &mut [0; 8]).unwrap_err());
    names_it(&thawed.write_memory(heap, &[0; 8]).unwrap_err());
    names_it(&thawed.reset().unwrap_err());
    assert!(matches!(thawed.run(&words(&[0])), Err(CallError::Quarantined)));
    names_it(&builder().thaw(&frozen).unwrap_err());
}

/// Fills an image from a whole one, unless it is dead or stuck.
struct FitfulFiller {
    content: Image,
    inserter: Inserter,
    /// Held while a page is filled.
    putting: Mutex<()>,
    dead: AtomicBool,
    stuck: AtomicBool,
}

impl Filler for FitfulFiller {
    fn fill_in_handler(&self, page: usize) -> bool {
        while self.stuck.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.dead.load(Ordering::Acquire) {
            return false;
        }
        let mut bytes = [0; 4096];
        self.content.read(page * 4096, &mut bytes);
        let _putting = self.putting.lock().unwrap();
        if !self.inserter.has(page) {
            self.inserter.put(page, &bytes).unwrap();
        }
        true
    }

    fn fill(&self, pages: PageRange) -> bool {
        (pages.start..pages.end()).all(|page| self.inserter.has(page) || self.fill_in_handler(page))
    }

    fn failure(&self) -> Option<String> {
        self.dead.load(Ordering::Acquire).then(|| "the source is dead".to_owned())
    }
}

/// The same guest, over memory that such a filler fills.
fn fitful(snapshot: &Snapshot) -> (Frozen, Arc<FitfulFiller>) {
    let whole = snapshot.freeze().unwrap();
    let content = whole.memory().pages().clone();
    let stored: Vec<_> = content.stored().collect();
    let mut made = None;
    let image = Image::lazy::<ImageError>(content.pages(), &stored, |inserter| {
        let (dead, stuck) = (AtomicBool::new(false), AtomicBool::new(false));
        let filler = Arc::new(FitfulFiller {
            content: content.clone(),
            inserter,
            putting: Mutex::new(()),
            dead,
            stuck,
        });
        made = Some(filler.clone());
        Ok(filler)
    })
    .unwrap();
    (Frozen::from_parts(image.into(), &whole.bytes().unwrap()).unwrap(), made.unwrap())
}

#[test]
fn a_source_that_dies_ends_the_call_and_one_that_hangs_does_not_outlast_the_time_limit() {
    if !kvm() || !lazily() {
        return;
    }
    let (_, snapshot) = warm();
    let (frozen, filler) = fitful(&snapshot);
    let limit = Duration::from_millis(100);
    let mut thawed = builder().timeout(limit).thaw(&frozen).unwrap();
    let (one, other) = (words(&[2, 10, 1, 1]), words(&[2, 200, 1, 1]));
    assert_eq!(thawed.run(&one).unwrap(), 11_u64.to_le_bytes());
    filler.stuck.store(true, Ordering::Release);
    let unstick = Arc::clone(&filler);
    // In case the kernel cannot interrupt the wait: then it lasts until the filler ends.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(5));
        unstick.stuck.store(false, Ordering::Release);
    });
    let started = Instant::now();
    let error = thawed.call(&other).unwrap_err();
    let took = started.elapsed();
    assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
    if took > Duration::from_secs(4) {
        eprintln!("SKIPPED: this kernel's KVM cannot be interrupted while it waits for a page");
    }
    filler.stuck.store(false, Ordering::Release);
    thawed.reset().unwrap();
    assert_eq!(thawed.run(&other).unwrap(), 201_u64.to_le_bytes());
    thawed.verify().unwrap();

    let (frozen, filler) = fitful(&snapshot);
    let mut thawed = builder().thaw(&frozen).unwrap();
    assert_eq!(thawed.run(&one).unwrap(), 11_u64.to_le_bytes());
    filler.dead.store(true, Ordering::Release);
    let error = thawed.run(&other).unwrap_err().to_string();
    assert!(error.contains("the source is dead"), "{error}");
}

/// Run in a separate process, on a host that pretends to lack the feature.
#[test]
fn without_a_userfaultfd_for_the_kernel_everything_is_there_first() {
    const CHILD: &str = "AFRESH_TEST_EAGER";
    if !kvm() {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let status = afresh_sys::test_command(
            "frozen::without_a_userfaultfd_for_the_kernel_everything_is_there_first",
        )
        .env(CHILD, "1")
        .env("AFRESH_WITHOUT", "uffd-kernel")
        .status()
        .unwrap();
        assert!(status.success());
        return;
    }
    let (mut sandbox, snapshot) = warm();
    let dir = tempfile::tempdir().unwrap();
    let store = save(&snapshot.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
    let mut thawed = builder().thaw(&frozen).unwrap();
    // Nothing is streamed, so only the thaw can have requested it.
    let end = Instant::now() + Duration::from_secs(10);
    while !frozen.memory().pages().is_complete() {
        assert!(Instant::now() < end, "the thaw did not wait for everything");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(answers(&mut thawed), answers(&mut sandbox));
}

#[test]
fn states_that_do_not_fit_are_refused_by_name() {
    if !kvm() {
        return;
    }
    let (_, snapshot) = warm();
    let frozen = snapshot.freeze().unwrap();
    let (pages, bytes) = (frozen.memory().pages().clone(), frozen.bytes().unwrap());
    assert!(Frozen::from_parts(pages.clone().into(), &bytes).is_ok());
    let mut longer = bytes.clone();
    longer.push(0);
    for bytes in [&bytes[..20], &longer[..]] {
        let error = Frozen::from_parts(pages.clone().into(), bytes).unwrap_err();
        assert!(matches!(error, ThawError::State(_)), "{error}");
    }
    let thaw = |pages: Image, bytes: &[u8]| {
        Frozen::from_parts(pages.into(), bytes).and_then(|frozen| builder().thaw(&frozen))
    };
    // Pages of another length, and another program in them: found before anything runs.
    let short = pages.slice(PageRange::new(1, pages.pages() - 1));
    let error = thaw(short, &bytes).unwrap_err();
    assert!(matches!(error, ThawError::State(_)), "{error}");
    let error = thaw(Image::zero(pages.pages()), &bytes).unwrap_err();
    assert!(matches!(error, ThawError::Program), "{error}");
    for len in 0..bytes.len() {
        assert!(Frozen::from_parts(pages.clone().into(), &bytes[..len]).is_err());
    }
    // Bit flips: an error, or a guest that fails in any way, contained.
    for at in 0..bytes.len() {
        for bit in [0, 7] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            if let Ok(mut thawed) = thaw(pages.clone(), &flipped) {
                let _ = thawed.run(&words(&[2, 0, 3, 1]));
            }
        }
    }
}

#[test]
fn snapshots_of_other_guests_engines_and_processors_are_refused_by_name() {
    let build = GuestBuild {
        kind: "wasm".into(),
        module: "m".into(),
        engine: "afresh-vm state 2".into(),
        cpu: Vec::new(),
    };
    let other_engine =
        GuestBuild { kind: "vm".into(), engine: "afresh-vm 0.0.7".into(), ..build.clone() };
    let other_cpu = GuestBuild { kind: "vm".into(), cpu: vec!["avx9000".into()], ..build.clone() };
    let cases = [(build, "wasm guest"), (other_engine, "0.0.7"), (other_cpu, "avx9000")];
    for (build, word) in cases {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let pages = MemoryPages(vec![1; 4096]);
        store.save("a", &pages, &SaveRequest::new(build)).unwrap();
        let error = Frozen::load(store.load("a").unwrap(), &Options::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}
