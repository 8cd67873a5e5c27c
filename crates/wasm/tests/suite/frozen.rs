//! Warm guests that are saved as a snapshot: they start in the same state, of every kind, and a
//! damaged snapshot never runs.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use afresh_memory::{Feature, Features};
use afresh_pager::Options;
use afresh_store::{Encoding, Store};
use afresh_sys::run_isolated;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, Mode, SnapshotOptions, ThawError,
    Val, Warm, WarmUp,
};

/// Memory, globals, a table and segments all take part in the answer.
const GUEST: &str = r#"(module
    (memory (export "memory") 40)
    (global $count (mut i64) (i64.const 5))
    (global $scale (mut f64) (f64.const 1))
    (table $t 4 funcref)
    (type $op (func (param i32) (result i32)))
    (elem $late func $twice $thrice)
    (data $d "passive")
    (func $twice (type $op) (i32.mul (local.get 0) (i32.const 2)))
    (func $thrice (type $op) (i32.mul (local.get 0) (i32.const 3)))
    (func (export "warm") (param $pages i32)
        (local $i i32)
        (table.init $t $late (i32.const 1) (i32.const 0) (i32.const 2))
        (elem.drop $late)
        (memory.init $d (i32.const 64) (i32.const 0) (i32.const 7))
        (data.drop $d)
        (global.set $count (i64.const 1000))
        (global.set $scale (f64.const 2.5))
        (loop $next
            (i32.store (i32.mul (local.get $i) (i32.const 4096)) (i32.add (local.get $i) (i32.const 1)))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $next (i32.lt_u (local.get $i) (local.get $pages))))
        (drop (memory.grow (i32.const 1)))
        (i32.store (i32.const 2621440) (i32.const 77)))
    (func (export "step") (param $page i32) (result i64)
        (global.set $count (i64.add (global.get $count) (i64.const 1)))
        (i32.store (i32.mul (local.get $page) (i32.const 4096))
            (call_indirect $t (type $op)
                (i32.load (i32.mul (local.get $page) (i32.const 4096)))
                (i32.and (i32.add (local.get $page) (i32.const 1)) (i32.const 1))
                (i32.add (i32.const 1))))
        (i64.add (global.get $count)
            (i64.extend_i32_u (i32.add
                (i32.load (i32.mul (local.get $page) (i32.const 4096)))
                (i32.add (i32.load8_u (i32.const 64))
                    (i32.add (i32.load (i32.const 2621440)) (memory.size)))))))
    (func (export "scale") (result f64) (global.get $scale)))"#;

fn engine(cache: Option<PathBuf>) -> Engine {
    Engine::new(EngineConfig { cache, ..EngineConfig::default() }).unwrap()
}

fn warm(engine: &Engine, mode: Mode) -> Warm {
    let options = GuestOptions { mode, ..GuestOptions::default() };
    let guest = Guest::with_options(engine, &wat::parse_str(GUEST).unwrap(), options).unwrap();
    guest.warm(WarmUp::new().call("warm", &[Val::I32(400)])).unwrap()
}

fn thaw(engine: &Engine, mode: Mode, frozen: &Frozen) -> Result<Warm, ThawError> {
    Warm::thaw(engine, &GuestOptions { mode, ..GuestOptions::default() }, frozen)
}

/// The answers of a guest to some calls, each from its warm state.
fn answers(warm: &Warm) -> Vec<String> {
    let mut lease = warm.lease().unwrap();
    let mut answers: Vec<String> = (0..400)
        .step_by(7)
        .map(|page| format!("{:?}", lease.call("step", &[Val::I32(page)]).unwrap()))
        .collect();
    answers.push(format!("{:?}", lease.call("scale", &[]).unwrap()));
    drop(lease);
    answers
}

fn save(frozen: &Frozen, dir: &Path, with: &SnapshotOptions) -> Store {
    let store = Store::create(dir).unwrap();
    frozen.save(&store, "a", with).unwrap();
    store
}

fn load(store: &Store) -> Frozen {
    Frozen::load(store.load("a").unwrap(), &Options::default()).unwrap()
}

#[test]
fn a_guest_out_of_a_snapshot_answers_like_the_one_that_was_frozen() {
    let engine = engine(None);
    for mode in [Mode::Reset, Mode::Fresh] {
        for encoding in [Encoding::Raw, Encoding::Zstd] {
            let warm = warm(&engine, mode);
            let expected = answers(&warm);
            let dir = tempfile::tempdir().unwrap();
            let with = SnapshotOptions { encoding, ..SnapshotOptions::default() };
            let store = save(&warm.freeze().unwrap(), dir.path(), &with);
            drop(warm);
            // Any mode can open the files of either.
            for mode in [Mode::Reset, Mode::Fresh] {
                let frozen = load(&store);
                let thawed = thaw(&engine, mode, &frozen).unwrap();
                assert_eq!(thawed.report().mode, mode);
                for _ in 0..3 {
                    assert_eq!(answers(&thawed), expected, "{mode:?}");
                    assert_eq!(thawed.differences().unwrap(), (0, 0));
                }
                frozen.memory().wait(Duration::from_secs(20)).unwrap();
                // And again through another snapshot, of the thawed guest.
                let again = tempfile::tempdir().unwrap();
                let store =
                    save(&thawed.freeze().unwrap(), again.path(), &SnapshotOptions::default());
                assert_eq!(answers(&thaw(&engine, mode, &load(&store)).unwrap()), expected);
            }
        }
    }
}

#[test]
fn a_lease_is_frozen_with_the_state_of_its_calls_and_forks_from_there() {
    let engine = engine(None);
    let warm = warm(&engine, Mode::Reset);
    let mut lease = warm.lease().unwrap();
    for _ in 0..3 {
        lease.call("step", &[Val::I32(9)]).unwrap();
    }
    let frozen = lease.freeze().unwrap();
    let next = format!("{:?}", lease.call("step", &[Val::I32(9)]).unwrap());
    drop(lease);
    let dir = tempfile::tempdir().unwrap();
    let store = save(&warm.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    let parent = Some(store.load("a").unwrap());
    frozen.save(&store, "b", &SnapshotOptions { parent, ..SnapshotOptions::default() }).unwrap();
    let delta = store.load("b").unwrap().inspect();
    assert!(
        delta.layers[1].stored <= 2,
        "a delta of {} pages for one written",
        delta.layers[1].stored
    );
    let saved = Frozen::load(store.load("b").unwrap(), &Options::default()).unwrap();
    for frozen in [frozen, saved] {
        let fork = thaw(&engine, Mode::Reset, &frozen).unwrap();
        for _ in 0..2 {
            let answer = fork.lease().unwrap().call("step", &[Val::I32(9)]).unwrap();
            assert_eq!(format!("{answer:?}"), next);
        }
    }
    assert_eq!(warm.differences().unwrap(), (0, 0), "the guest itself is untouched");
}

/// Whether pages are fetched only when they are touched; a loud skip otherwise.
fn lazy() -> bool {
    let lazy = Features::host().has(Feature::UffdSigbus);
    if !lazy {
        println!("SKIPPED: userfaultfd in SIGBUS mode is unavailable here: nothing is lazy");
    }
    lazy
}

#[test]
fn with_a_cache_only_the_pages_that_calls_touch_are_fetched() {
    if !lazy() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let engine = engine(Some(dir.path().join("cache")));
    let warm = warm(&engine, Mode::Reset);
    let store =
        save(&warm.freeze().unwrap(), &dir.path().join("store"), &SnapshotOptions::default());
    let snapshot = store.load("a").unwrap();
    // The first thaw compiles, and therefore reads the module.
    drop(thaw(&engine, Mode::Reset, &load(&store)).unwrap());
    let frozen = Frozen::record(snapshot.clone()).unwrap();
    let thawed = thaw(&engine, Mode::Reset, &frozen).unwrap();
    let mut lease = thawed.lease().unwrap();
    lease.call("step", &[Val::I32(100)]).unwrap();
    drop(lease);
    let touched: usize = frozen.memory().touched().iter().map(|run| run.len).sum();
    assert!((1..20).contains(&touched), "{touched} of {} pages", snapshot.pages());
    // The recorded pages are prefetched next time.
    let with =
        SnapshotOptions { working_set: frozen.memory().touched(), ..SnapshotOptions::default() };
    let store = save(&warm.freeze().unwrap(), &dir.path().join("store"), &with);
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
    let thawed = thaw(&engine, Mode::Reset, &frozen).unwrap();
    thawed.lease().unwrap().call("step", &[Val::I32(100)]).unwrap();
    assert_eq!(frozen.memory().faults(), 0);
}

#[test]
fn a_guest_shares_the_compiled_code_of_an_open_guest() {
    let dir = tempfile::tempdir().unwrap();
    let config = EngineConfig { cache: Some(dir.path().into()), ..EngineConfig::default() };
    let shared = || Engine::shared(config.clone()).unwrap();
    let same =
        |a: &Engine, b: &Engine| afresh_wasm::wasmtime::Engine::same(a.wasmtime(), b.wasmtime());
    let engine = shared();
    assert!(same(&engine, &shared()));
    let other = Engine::shared(EngineConfig { fuel: true, ..config.clone() }).unwrap();
    assert!(!same(&engine, &other));
    let first = warm(&engine, Mode::Reset);
    let (frozen, wanted) = (first.freeze().unwrap(), answers(&first));
    let compiled = || {
        let files = std::fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().path());
        files.filter(|file| file.extension() == Some("cwasm".as_ref())).collect::<Vec<_>>()
    };
    assert!(!compiled().is_empty());
    compiled().iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let second = thaw(&shared(), Mode::Reset, &frozen).unwrap();
    assert_eq!(answers(&second), wanted);
    assert!(compiled().is_empty(), "nothing was compiled again");
    drop((first, second));
    assert_eq!(answers(&thaw(&shared(), Mode::Reset, &frozen).unwrap()), wanted);
    assert_eq!(compiled().len(), 1, "it went with the last guest that used it");
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

#[test]
fn a_damaged_page_ends_the_call_with_its_cause_and_the_pool_stays_whole() {
    if !lazy() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let engine = engine(Some(cache.path().into()));
    let dir = tempfile::tempdir().unwrap();
    let warm = warm(&engine, Mode::Reset);
    let store = save(&warm.freeze().unwrap(), dir.path(), &SnapshotOptions::default());
    drop(thaw(&engine, Mode::Reset, &load(&store)).unwrap());
    damage(dir.path());
    let options = Options { background: false, ..Options::default() };
    let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
    let thawed = thaw(&engine, Mode::Reset, &frozen).unwrap();
    let mut lease = thawed.lease().unwrap();
    let mut failed = None;
    for page in 0..400 {
        match lease.call("step", &[Val::I32(page)]) {
            Ok(_) => {}
            Err(error) => {
                failed = Some((page, error));
                break;
            }
        }
    }
    let (page, error) = failed.expect("the damaged page was used");
    assert!(matches!(&error, CallError::Memory(cause) if cause.contains("digest")), "{error}");
    assert!((100..400).contains(&page), "page {page} failed although the middle is damaged");
    let refused = lease.read_memory(0, &mut [0; 8]).unwrap_err();
    assert!(matches!(refused, CallError::Memory(_)), "{refused}");
    drop(lease);
    let refused = thawed.lease().map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("digest"), "{refused}");
}

#[test]
fn states_that_do_not_fit_are_refused_by_name() {
    let engine = engine(None);
    let frozen = warm(&engine, Mode::Reset).freeze().unwrap();
    let (pages, bytes) = (frozen.memory().pages().clone(), frozen.bytes().unwrap());
    assert!(Frozen::from_parts(pages.clone().into(), &bytes).is_ok());
    let short = pages.slice(afresh_memory::PageRange::new(0, pages.pages() - 1));
    let empty = afresh_memory::Image::zero(pages.pages());
    let mut longer = bytes.clone();
    longer.push(0);
    let parts = [(&short, &bytes[..]), (&pages, &bytes[..40]), (&pages, &longer[..])];
    for (pages, bytes) in parts {
        let error = Frozen::from_parts(pages.clone().into(), bytes).unwrap_err();
        assert!(matches!(error, ThawError::State(_)), "{error}");
    }
    // Another module in the pages: found when it is read.
    let other = Frozen::from_parts(empty.into(), &bytes).unwrap();
    let error = thaw(&engine, Mode::Reset, &other).unwrap_err().to_string();
    assert!(error.contains("digest"), "{error}");
    // Every truncation and many bit flips of the state: an error or a state, never a panic.
    for len in 0..bytes.len() {
        assert!(Frozen::from_parts(pages.clone().into(), &bytes[..len]).is_err());
    }
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            if let Ok(frozen) = Frozen::from_parts(pages.clone().into(), &flipped) {
                let _ = thaw(&engine, Mode::Fresh, &frozen);
            }
        }
    }
}

#[test]
fn a_snapshot_larger_than_the_memory_limit_is_refused_in_every_mode() {
    let engine = engine(None);
    let frozen = warm(&engine, Mode::Reset).freeze().unwrap();
    let options = |mode, memory_limit| GuestOptions { mode, memory_limit, ..Default::default() };
    // 40 pages, one that the warm-up added, and four elements of a table.
    let bytes = (41 << 16) + 4 * 16;
    for mode in [Mode::Reset, Mode::Fresh] {
        let error = Warm::thaw(&engine, &options(mode, bytes - 1), &frozen).unwrap_err();
        assert!(error.to_string().contains("2687040 bytes"), "{}: {error}", mode.name());
        let thawed = Warm::thaw(&engine, &options(mode, bytes), &frozen).unwrap();
        assert!(thawed.lease().unwrap().call("scale", &[]).is_ok());
    }
    // A state of a session, saved elsewhere.
    let guest = wat::parse_str(GUEST).unwrap();
    let guest = Guest::with_options(&engine, &guest, options(Mode::Reset, bytes - 1)).unwrap();
    let small = guest.warm(WarmUp::new()).unwrap();
    let error = small.thaw_state(&frozen).unwrap_err().to_string();
    assert!(error.contains("2687040 bytes"), "{error}");
}

#[test]
fn a_snapshot_of_another_kind_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    let build = afresh_store::GuestBuild {
        kind: "vm".into(),
        module: "m".into(),
        engine: "e".into(),
        cpu: Vec::new(),
    };
    let pages = afresh_store::MemoryPages(vec![1; 4096]);
    store.save("a", &pages, &afresh_store::SaveRequest::new(build)).unwrap();
    let error = Frozen::load(store.load("a").unwrap(), &Options::default()).unwrap_err();
    assert!(error.to_string().contains("vm guest"), "{error}");
}

/// Private mappings of images: how many there are, and how many are write-protected by a
/// userfaultfd.
fn image_mappings() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut all, mut protected, mut inside) = (0, 0, false);
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            all += usize::from(inside);
            protected += usize::from(inside && flags.split_whitespace().any(|flag| flag == "uw"));
        } else if line.split_whitespace().nth(1).is_some_and(|rights| rights.len() == 4) {
            inside = line.contains("rw-p") && line.contains("/memfd:afresh-image");
        }
    }
    (all, protected)
}

#[test]
fn the_first_call_of_a_thawed_guest_takes_no_signals_for_its_writes() {
    const NAME: &str = "frozen::the_first_call_of_a_thawed_guest_takes_no_signals_for_its_writes";
    if !Features::host().has(Feature::PagemapScan) {
        return println!("SKIPPED: the kernel does not list private pages");
    }
    run_isolated(NAME, || {
        let engine = engine(None);
        let dir = tempfile::tempdir().unwrap();
        let frozen = warm(&engine, Mode::Reset).freeze().unwrap();
        let store = save(&frozen, dir.path(), &SnapshotOptions::default());
        drop(frozen);
        // Pages are missing until they are touched.
        let options = Options { background: false, ..Options::default() };
        let frozen = Frozen::load(store.load("a").unwrap(), &options).unwrap();
        let thawed = thaw(&engine, Mode::Reset, &frozen).unwrap();
        let before = image_mappings();
        let mut lease = thawed.lease().unwrap();
        lease.call("step", &[Val::I32(9)]).unwrap();
        let during = image_mappings();
        drop(lease);
        let after = image_mappings();
        assert_eq!(thawed.differences().unwrap(), (0, 0));
        if after.1 == 0 {
            return println!("SKIPPED: written pages are not noticed by userfaultfd");
        }
        assert!(before.0 > 0, "{before:?}");
        assert_eq!((before.1, during.1), (0, 0), "{before:?}, {during:?}");
    });
}
