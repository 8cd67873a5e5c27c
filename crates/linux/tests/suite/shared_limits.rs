//! Shared memory at its limits: pages that no process maps any more count as well while they exist,
//! and so do bytes of files beyond the limit of storage.

use std::time::Duration;

use afresh_linux::{Instance, Program, Warm};

use crate::common;
use crate::common::states::ask;

const LIMIT: u64 = 64 << 20;
const STORAGE: u64 = 16 << 20;
/// Bytes that the guest takes at a time.
const STEP: u64 = 8 << 20;

/// The guest with these limits of memory and storage.
fn limited(memory: u64, storage: u64) -> Option<Instance> {
    common::warm("shared_limits.c", |program| {
        let program = program.time_limit(Duration::from_secs(60));
        program.memory_limit(memory).storage_limit(storage).request("echo\n")
    })
}

#[test]
fn a_guest_has_no_more_shared_memory_than_its_limit() {
    let Some(mut instance) = limited(LIMIT, STORAGE) else { return };
    let mut rounds = |request: &str| {
        let answer = instance.call_pristine(format!("{request}\n").as_bytes()).unwrap();
        instance.verify().unwrap();
        String::from_utf8(answer).unwrap().trim_end().parse::<u64>().unwrap()
    };
    for request in ["windows", "remnants", "heirs"] {
        let taken = rounds(request);
        assert!((2..LIMIT / STEP).contains(&taken), "{request}: {taken}");
    }
    for request in ["files", "segments"] {
        let taken = rounds(request);
        assert!((2..=(LIMIT + STORAGE) / STEP).contains(&taken), "{request}: {taken}");
    }
    assert_eq!(rounds("untouched"), 64);
    assert_eq!((rounds("huge"), rounds("holes")), (1, 1));
}

#[test]
fn a_write_to_a_mapped_file_without_room_for_its_bytes_fails_before_it_changes_anything() {
    let limits = |program: afresh_linux::Program| {
        let program = program.time_limit(Duration::from_secs(60));
        program.memory_limit(32 << 20).storage_limit(LIMIT).request("echo\n")
    };
    let Some(mut instance) = common::warm("shared_limits.c", limits) else { return };
    for _ in 0..2 {
        assert_eq!(instance.call_pristine(b"late\n").unwrap(), b"1\n");
        instance.verify().unwrap();
    }
}

#[test]
fn writes_to_a_live_file_need_memory_for_its_unmapped_pages() {
    let limits = |program: afresh_linux::Program| {
        let program = program.time_limit(Duration::from_secs(60));
        program.memory_limit(32 << 20).storage_limit(LIMIT).request("echo\n")
    };
    let Some(mut instance) = common::warm("shared_limits.c", limits) else { return };
    let mut answer = |request: &[u8]| {
        let answer = instance.call_pristine(request).unwrap();
        instance.verify().unwrap();
        String::from_utf8(answer).unwrap().trim_end().parse::<i64>().unwrap()
    };
    for _ in 0..2 {
        let taken = answer(b"appended\n");
        assert!((8..32).contains(&taken), "{taken}");
        assert_eq!(answer(b"cut\n"), 64);
    }
}

#[test]
fn shared_memory_that_its_file_has_as_well_counts_once() {
    let Some(mut instance) = limited(LIMIT, STORAGE) else { return };
    for _ in 0..2 {
        assert_eq!(instance.call_pristine(b"once\n").unwrap(), b"1\n");
        instance.verify().unwrap();
    }
}

#[test]
fn a_file_and_its_mapping_have_the_same_bytes_after_any_writes() {
    let Some(path) = common::compiled("shared_limits.c", &["-static"]) else { return };
    let program = Program::new(path).memory_limit(LIMIT).storage_limit(STORAGE);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..3 {
        assert_eq!(ask(&mut instance, "modelled"), "1");
        Warm::thaw(&instance.freeze().unwrap(), &program).unwrap().instance().verify().unwrap();
    }
    let mut fresh = warm.instance();
    assert_eq!(fresh.call_pristine(b"modelled\n").unwrap(), b"1\n");
    fresh.verify().unwrap();
}

#[test]
fn a_snapshot_of_processes_with_common_memory_opens_under_the_same_limit() {
    let Some(path) = common::compiled("shared_limits.c", &["-static"]) else { return };
    let program = Program::new(path).memory_limit(LIMIT).storage_limit(STORAGE);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "common"), "7");
    let frozen = instance.freeze().unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "common"), "8");
    thawed.verify().unwrap();
}

#[test]
fn a_state_is_saved_only_if_its_files_open_under_the_same_limit() {
    let Some(path) = common::compiled("shared_limits.c", &["-static"]) else { return };
    let program = Program::new(path).memory_limit(LIMIT).storage_limit(STORAGE);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    // Files that are written through mappings, first within the limit of storage.
    for _ in 0..2 {
        assert_eq!(ask(&mut instance, "grow"), "1");
        let frozen = instance.freeze();
        if instance.files().used().bytes <= instance.files().budget().bytes {
            Warm::thaw(&frozen.unwrap(), &program).unwrap();
            continue;
        }
        let error = frozen.unwrap_err().to_string();
        assert!(error.contains("storage limit is") && error.contains("`storage_limit`"), "{error}");
    }
    assert!(instance.files().used().bytes > STORAGE, "the second is beyond it");
    // It continues, and can be saved once it has removed them.
    assert_eq!(ask(&mut instance, "shrink"), "1");
    Warm::thaw(&instance.freeze().unwrap(), &program).unwrap();
    instance.verify().unwrap();
}

#[test]
fn shared_memory_takes_at_most_an_eighth_of_the_descriptors() {
    let Some(mut instance) = limited(LIMIT, STORAGE) else { return };
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let expected = descriptors.map_or(1024, |limit| (limit / 8).min(1024));
    for _ in 0..2 {
        let answer = instance.call_pristine(b"many\n").unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), format!("{expected}\n"));
        instance.verify().unwrap();
    }
}

#[test]
fn shared_memory_beyond_the_file_limit_of_the_host_is_refused() {
    afresh_sys::run_isolated(
        "shared_limits::shared_memory_beyond_the_file_limit_of_the_host_is_refused",
        || {
            use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
            let Some(mut instance) = limited(256 << 20, 256 << 20) else { return };
            let maximum = getrlimit(Resource::Fsize).maximum;
            let limit = Rlimit { current: Some(64 << 20), maximum };
            setrlimit(Resource::Fsize, limit).unwrap();
            for _ in 0..2 {
                assert_eq!(instance.call_pristine(b"lg\n").unwrap(), b"1\n");
                instance.verify().unwrap();
            }
        },
    );
}

#[test]
fn a_mapped_file_of_a_layer_keeps_its_writes_when_it_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().canonicalize().unwrap().join("file");
    std::fs::write(&file, vec![b'l'; 8 * 4096]).unwrap();
    let Some(mut instance) = common::warm("shared_limits.c", |program| {
        program.grant(file.parent().unwrap()).request("echo\n")
    }) else {
        return;
    };
    for _ in 0..2 {
        let request = format!("ly {}\n", file.display());
        assert_eq!(instance.call_pristine(request.as_bytes()).unwrap(), b"1\n");
        instance.verify().unwrap();
    }
    assert_eq!(std::fs::read(&file).unwrap(), vec![b'l'; 8 * 4096]);
}
