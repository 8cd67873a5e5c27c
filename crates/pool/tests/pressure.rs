//! Idle pools under a control group's limit: they give memory back before the kernel ends the
//! process.
#![cfg(not(miri))]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use afresh_memory::{ImageBuilder, PAGE_SIZE, Slot, SlotConfig, Strategy};
use afresh_pool::{Budget, Limits, Pool, ProcessLimits};
use afresh_sys::host::memory_room;

const NAME: &str = "idle_pools_give_memory_back_before_the_limit_of_their_group_ends_the_process";
/// Set in the child, to whether its pools give memory back.
const CHILD: &str = "AFRESH_TEST_RELIEF";
/// Bytes of the group.
const LIMIT: usize = 128 << 20;
/// Bytes that the idle slots keep.
const IDLE: usize = 64 << 20;
const SLOTS: usize = 8;
/// Bytes that the process takes in addition: with the idle ones they exceed the limit.
const GROWTH: usize = 88 << 20;
/// Longest wait for an idle pool to give memory back. A wait ends with the first one that does.
const RELIEF_TIMEOUT: Duration = Duration::from_secs(120);
/// Status of a child whose host has no write set.
const UNAVAILABLE: i32 = 77;

/// A control group with a limit, which is removed when it is dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        if fs::read_to_string("/proc/sys/vm/panic_on_oom").is_ok_and(|text| text.trim() != "0") {
            return Err("the kernel panics when memory runs out (vm.panic_on_oom)".to_owned());
        }
        let roots = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.swappiness"),
            ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
        ];
        for (root, limit, swap) in roots {
            let group = Path::new(root).join(format!("afresh-relief-{}", std::process::id()));
            if !Path::new(root).exists() || fs::create_dir(&group).is_err() {
                continue;
            }
            let group = Self(group);
            if fs::write(group.0.join(limit), LIMIT.to_string()).is_ok() {
                // A kernel without swap has no such file.
                let _ = fs::write(group.0.join(swap), "0");
                return Ok(group);
            }
        }
        Err("no memory control group can be made here".to_owned())
    }

    /// Runs this test in the group.
    fn run(&self, relief: &str) -> ExitStatus {
        let test = afresh_sys::test_command(NAME);
        let mut child = Command::new("/bin/sh")
            .args(["-c", r#"echo $$ > "$0" && exec "$@""#])
            .arg(self.0.join("cgroup.procs"))
            .arg(test.get_program())
            .args(test.get_args())
            .env(CHILD, relief)
            .spawn()
            .unwrap();
        child.wait().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// In the child: fills a pool with idle slots, and takes memory until the limit is exceeded without
/// their help.
fn grow_beside_idle_pools(relief: bool) {
    let pages = IDLE / SLOTS / PAGE_SIZE;
    let mut builder = ImageBuilder::new(pages);
    builder.segment(0, b"warm").unwrap();
    let image = builder.build().unwrap();
    let budget = Budget::process();
    let pressure = relief.then_some(20);
    budget.set(ProcessLimits { idle: None, pressure, ..ProcessLimits::default() });
    let pool: Pool<Slot> = Pool::new(Limits::default());
    let config = SlotConfig { strategy: Strategy::WriteSet(None), ..SlotConfig::default() };
    let get = || pool.get(image.id(), |_| Slot::new(&image, config.clone()));
    // The second use finds what the first has written, and keeps it.
    for _ in 0..2 {
        let mut leases = Vec::new();
        for _ in 0..SLOTS {
            let mut slot = match get() {
                Ok(slot) => slot,
                Err(error) => {
                    println!("{error:?}");
                    std::process::exit(UNAVAILABLE);
                }
            };
            (0..pages).for_each(|page| slot.write(page * PAGE_SIZE + 8, b"written").unwrap());
            leases.push(slot);
        }
    }
    println!("idle: {:?}", budget.usage());
    assert!(relief || budget.usage().resident_bytes >= IDLE / 2, "{:?}", budget.usage());
    let mut taken: Vec<Vec<u8>> = Vec::new();
    while taken.len() << 20 < GROWTH {
        let since = Instant::now();
        while relief && budget.usage().resident_bytes > 0 && nearly_full() {
            assert!(since.elapsed() < RELIEF_TIMEOUT, "{:?}", budget.usage());
            std::thread::sleep(Duration::from_millis(5));
        }
        taken.push(vec![1; 1 << 20]);
    }
    println!("grown: {:?}", budget.usage());
    assert!(budget.usage().relieved > 0 && budget.usage().evicted == 0, "{:?}", budget.usage());
    drop(taken);
    // They are as they were.
    assert_eq!(pool.stats().alive, SLOTS);
    let leases: Vec<_> = (0..SLOTS).map(|_| get().unwrap()).collect();
    assert_eq!(pool.stats().created, SLOTS as u64);
    for slot in &leases {
        let mut bytes = [1; 16];
        slot.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"warm\0\0\0\0\0\0\0\0\0\0\0\0");
    }
}

/// Whether less than 6 MiB are left of the group. The pools notice 8.
fn nearly_full() -> bool {
    memory_room().is_some_and(|room| room.left < 6 << 20)
}

#[test]
fn idle_pools_give_memory_back_before_the_limit_of_their_group_ends_the_process() {
    if let Some(relief) = std::env::var_os(CHILD) {
        return grow_beside_idle_pools(relief == "1");
    }
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let without = group.run("0");
    if without.code() == Some(UNAVAILABLE) {
        return println!("SKIPPED: this host lacks what a write set needs");
    }
    assert_eq!(without.signal(), Some(libc::SIGKILL), "the limit does not bind: {without}");
    let with = group.run("1");
    assert!(with.success(), "the child ended with {with}");
}
