//! Version 2 of the state, frozen: a snapshot that was written when the version began opens for
//! ever, answers as then, and its state is written today byte for byte as then.
//!
//! `tests/golden/state-2.afresh` is a snapshot of the sample guest `guests/vm/c/tally.c` and is
//! never written again. A change that makes this test fail needs a new version, a second golden,
//! and code that still reads this one. `AFRESH_WRITE_GOLDEN=1` writes a golden that is missing.

use std::path::{Path, PathBuf};

use afresh_memory::Strategy;
use afresh_pager::Options;
use afresh_store::{Encoding, Store, archive};
use afresh_vm::{
    CpuTemplate, Frozen, ResetMethod, Sandbox, SandboxBuilder, SnapshotOptions, Tracking,
};

use crate::common::{c_guest, kvm, words};

/// The features that the guest sees: those that every processor with KVM of the last fifteen years
/// has.
const FEATURES: &str = "x86-64-v2";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/state-2.afresh")
}

/// Names what is not part of a snapshot.
fn builder() -> SandboxBuilder {
    Sandbox::builder().host_function("seen", |sum: u64| sum * 2)
}

/// The end of a state: the name of the CPU template and the names of its features.
fn cpu_bytes<'a>(template: &str, features: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let features: Vec<Vec<u8>> = features.into_iter().map(text).collect();
    [text(template), vec![u8::try_from(features.len()).unwrap()], features.concat()].concat()
}

/// A state without the processor, which a paravirtual KVM replaces by its own.
fn state_without_cpu(frozen: &Frozen) -> Vec<u8> {
    let (mut bytes, cpu) = (frozen.bytes().unwrap(), frozen.build().cpu);
    let end = cpu_bytes(frozen.cpu_template(), cpu.iter().map(String::as_str));
    assert!(bytes.ends_with(&end), "the state ends with the processor");
    bytes.truncate(bytes.len() - end.len());
    bytes
}

/// The guest after two calls, made from its program. `None` without a C compiler.
fn warm() -> Option<Frozen> {
    let elf = c_guest("tally")?;
    let builder = builder().memory(512 << 10).stack(32 << 10).input(8192);
    let builder = builder.read_only(vec![9; 5000]).gap(4096).read_write(8192);
    let mut sandbox = builder.build(&elf).unwrap();
    sandbox.call(b"afresh").unwrap();
    sandbox.call(&[1, 2, 3]).unwrap();
    Some(sandbox.snapshot().unwrap().freeze().unwrap())
}

/// Writes the golden, if it is missing and this is asked for.
fn write() {
    if golden().exists() || std::env::var_os("AFRESH_WRITE_GOLDEN").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    let options = SnapshotOptions { encoding: Encoding::Zstd, ..SnapshotOptions::default() };
    let frozen = warm().expect("there is a C compiler");
    // The guest uses no feature beyond these, whatever this host has.
    let cpu = CpuTemplate::v2();
    let state = [state_without_cpu(&frozen), cpu_bytes(cpu.name(), cpu.features())].concat();
    let frozen = Frozen::from_parts(frozen.memory().clone(), &state).unwrap();
    frozen.save(&store, "golden", &options).unwrap();
    archive::export(&store.load("golden").unwrap(), &golden(), Some("golden")).unwrap();
}

/// The answers to two calls of one lease: the sum, the calls, the answer of `seen`, the heap and
/// three regions.
fn check(frozen: &Frozen, method: ResetMethod) {
    let mut sandbox = builder().reset_method(method).thaw(frozen).unwrap();
    let sum = 1000 + b"afresh".iter().map(|byte| u64::from(*byte)).sum::<u64>() + 6;
    for _ in 0..2 {
        for (calls, sum) in [(3, sum + 5), (4, sum + 10)] {
            let heap = 7 * 3_u64.pow(calls);
            let calls = u64::from(calls);
            let expected = words(&[sum, calls, 2 * sum, heap, 9, 0, calls, 0]);
            assert_eq!(sandbox.call(&[5]).unwrap(), expected, "{method:?}");
        }
        sandbox.reset().unwrap();
    }
    sandbox.verify().unwrap();
    let again = state_without_cpu(&sandbox.pristine().freeze().unwrap());
    assert!(again == state_without_cpu(frozen), "{method:?}: the state has another form");
}

#[test]
fn a_snapshot_of_state_2_opens_answers_and_is_written_as_it_was() {
    if !kvm() {
        return;
    }
    write();
    let snapshot = archive::open(&golden()).unwrap();
    assert_eq!((&*snapshot.guest().kind, &*snapshot.guest().engine), ("vm", "afresh-vm state 2"));
    let state = snapshot.state().to_vec();
    let frozen = Frozen::load(snapshot, &Options::default()).unwrap();
    assert!(frozen.bytes().unwrap() == state, "the state has another form");
    assert_eq!(frozen.cpu_template(), FEATURES);
    for method in [ResetMethod::default(), ResetMethod::new(Strategy::Discard, Tracking::Nothing)] {
        check(&frozen, method);
    }
    // Its source still gives a guest that answers so.
    if let Some(frozen) = warm() {
        check(&frozen, ResetMethod::default());
    }
}
