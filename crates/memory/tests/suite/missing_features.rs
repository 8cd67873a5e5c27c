//! Hosts that forbid a facility: the next strategy is taken and reported, and a probe never kills
//! the process. Each case runs in a separate process, under a seccomp filter.
#![cfg(all(not(miri), target_os = "linux"))]

use afresh_memory::{
    Feature, Features, HostAccess, Image, ImageBuilder, PAGE_SIZE, Slot, SlotConfig, SlotError,
    Strategy,
};
use afresh_sys::run_isolated;

const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_ALLOW: u32 = 0x7fff_0000;

/// From now on `call` is answered with `verdict`; `false` where the host has no seccomp.
fn forbid(call: libc::c_long, verdict: u32) -> bool {
    let statement =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number of the system call is the first field.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, verdict, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a filter that lives through the call, for this process only, which is a test's own.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                std::ptr::from_ref(&program),
            ) == 0
    }
}

fn image() -> Result<Image, afresh_memory::ImageError> {
    let mut builder = ImageBuilder::new(8);
    builder.segment(0, &[7; 8 * PAGE_SIZE])?;
    builder.build()
}

/// Checks that the chosen strategy works.
fn works(access: HostAccess) {
    let config = SlotConfig { host_access: access, ..SlotConfig::default() };
    let mut slot = Slot::new(&image().unwrap(), config).unwrap();
    for page in 0..8 {
        slot.write(page * PAGE_SIZE, b"dirt").unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    }
}

fn without_userfaultfd(verdict: u32, says: &str) {
    if !forbid(libc::SYS_userfaultfd, verdict) {
        return println!("SKIPPED: this host has no seccomp");
    }
    // The privileged one may come from a device instead.
    for feature in [Feature::UffdSigbus, Feature::UffdAsync] {
        let why = Features::host().why_missing(feature).unwrap();
        assert!(why.contains("userfaultfd") && why.contains(says), "{why}");
    }
    let choice = Strategy::Auto.choose(Features::host(), HostAccess::Threads).unwrap();
    assert!(choice.reason.contains("userfaultfd"), "{}", choice.reason);
    works(HostAccess::Threads);
    works(HostAccess::Syscalls);
}

#[test]
fn a_host_that_kills_for_userfaultfd_gets_another_tracker() {
    let name = "missing_features::a_host_that_kills_for_userfaultfd_gets_another_tracker";
    run_isolated(name, || without_userfaultfd(RET_KILL_PROCESS, "would end this process"));
}

#[test]
fn where_userfaultfd_is_refused_another_tracker_serves() {
    let refused = RET_ERRNO | libc::EPERM as u32;
    run_isolated("missing_features::where_userfaultfd_is_refused_another_tracker_serves", || {
        without_userfaultfd(refused, "not permitted");
    });
}

fn without_memfd(verdict: u32) {
    if !forbid(libc::SYS_memfd_create, verdict) {
        return println!("SKIPPED: this host has no seccomp");
    }
    let why = Features::host().why_missing(Feature::Memfd).unwrap();
    assert!(why.contains("memfd_create"), "{why}");
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        let error = strategy.choose(Features::host(), HostAccess::Threads).unwrap_err();
        assert!(matches!(error, SlotError::Unavailable { .. }));
        assert!(error.to_string().contains("memfd_create"), "{error}");
    }
}

#[test]
fn without_memfd_create_no_strategy_is_promised() {
    run_isolated("missing_features::without_memfd_create_no_strategy_is_promised", || {
        without_memfd(RET_ERRNO | libc::ENOSYS as u32);
        let error = image().unwrap_err().to_string();
        assert!(error.contains("memfd_create"), "{error}");
    });
}

#[test]
fn a_host_that_kills_for_memfd_create_is_probed_safely() {
    run_isolated("missing_features::a_host_that_kills_for_memfd_create_is_probed_safely", || {
        without_memfd(RET_KILL_PROCESS);
    });
}
