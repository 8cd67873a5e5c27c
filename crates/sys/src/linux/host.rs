//! The host's memory and time: headroom, pressure, thread priority, CPU clocks.
//!
//! Read from `/proc` and the memory control group, both hierarchies. Nothing here is exact: other
//! processes take memory between the reading and its use. It is there to refuse growth early, while
//! a refusal is still an error and not a kill.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Call, InheritedCell, SysError, inject};

/// Memory of the host or of a control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRoom {
    /// Bytes that can still be allocated.
    pub left: u64,
    /// All bytes.
    pub total: u64,
}

/// The file cache of a control group that counts as memory that is left.
#[derive(Clone, Copy, Debug)]
enum CountedCache {
    /// Pages that were not used lately: reclaiming them costs little.
    Inactive,
    /// All pages, as in `MemAvailable` of the host: the kernel reclaims those in use before it ends
    /// a process. Waits for memory show if that is slow.
    All,
}

impl CountedCache {
    /// Bytes of this cache, by a `memory.stat` whose fields of interest begin with `prefix`.
    fn bytes(self, stat: &str, prefix: &str) -> u64 {
        let names: &[&str] = match self {
            Self::Inactive => &["inactive_file"],
            Self::All => &["inactive_file", "active_file"],
        };
        let fields = stat.lines().filter_map(|line| line.strip_prefix(prefix)?.split_once(' '));
        let counted = fields.filter(|(name, _)| names.contains(name));
        counted.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
    }
}

/// The memory of the host, and of each control group with a limit on the path to the root.
fn memory_rooms(cache: CountedCache) -> impl Iterator<Item = MemoryRoom> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| host_room(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups: Vec<MemoryRoom> =
        groups.lines().filter_map(group_of).flat_map(|group| group.rooms(cache)).collect();
    host.into_iter().chain(groups)
}

/// Bytes that can still be allocated before the host or the control group runs out; `None` when
/// neither can be read.
#[must_use]
pub fn memory_headroom() -> Option<u64> {
    memory_rooms(CountedCache::Inactive).map(|room| room.left).min()
}

/// The memory of the host or of a control group, whichever has the smallest share left. `None` as
/// for [`memory_headroom`]. All file cache counts as left, also that in use: a process that reads
/// many files fills its group with it, and has no need of memory.
#[must_use]
pub fn memory_room() -> Option<MemoryRoom> {
    let share = |room: &MemoryRoom| (u128::from(room.left) << 32) / u128::from(room.total.max(1));
    memory_rooms(CountedCache::All).min_by_key(share)
}

/// The memory of the host, or that of the smallest control group around this process; `None` as
/// for [`memory_headroom`].
#[must_use]
pub fn memory_size() -> Option<u64> {
    memory_rooms(CountedCache::All).map(|room| room.total).min()
}

/// Releases unused memory of the C library's allocator to the host. Costs some milliseconds at
/// most; does nothing where another allocator or another C library is in use.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes the allocator's own locks and touches only its free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The number of the calling thread. May be called in a signal handler.
#[must_use]
pub fn thread_id() -> i32 {
    // SAFETY: a call without preconditions.
    unsafe { libc::gettid() }
}

/// Mappings that the kernel lets a process have: `vm.max_map_count`, or its default where that
/// cannot be read. Read once a process, so that later calls are safe in a signal handler.
#[must_use]
pub fn max_mappings() -> usize {
    static MAX_MAPPINGS: InheritedCell<usize> = InheritedCell::new();
    *MAX_MAPPINGS.get_or_make(|| {
        let read = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        read.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530)
    })
}

/// Mappings that this process has; `None` when that cannot be read. Costs time in proportion to
/// them.
#[must_use]
pub fn mappings() -> Option<usize> {
    let maps = fs::read("/proc/self/maps").ok()?;
    Some(maps.iter().filter(|byte| **byte == b'\n').count())
}

/// `MemAvailable` and `MemTotal` of `/proc/meminfo`.
fn host_room(meminfo: &str) -> Option<MemoryRoom> {
    let field = |name| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
    };
    Some(MemoryRoom { left: field("MemAvailable:")?, total: field("MemTotal:")? })
}

/// A memory control group: its directory, and the names of its limit and usage there.
struct Group {
    root: &'static str,
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
    /// Beginning of the fields of `memory.stat` that include the groups below.
    prefix: &'static str,
}

/// The memory group that a line of `/proc/self/cgroup` names, in either hierarchy.
fn group_of(line: &str) -> Option<Group> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let path = path.trim_start_matches('/');
    if controllers.is_empty() {
        let root = "/sys/fs/cgroup";
        let path = Path::new(root).join(path);
        let (limit, usage) = ("memory.max", "memory.current");
        Some(Group { root, path, limit, usage, prefix: "" })
    } else if controllers.split(',').any(|name| name == "memory") {
        let root = "/sys/fs/cgroup/memory";
        let path = Path::new(root).join(path);
        let (limit, usage) = ("memory.limit_in_bytes", "memory.usage_in_bytes");
        Some(Group { root, path, limit, usage, prefix: "total_" })
    } else {
        None
    }
}

impl Group {
    /// The memory of each group with a limit, from this one to the root.
    fn rooms(&self, cache: CountedCache) -> Vec<MemoryRoom> {
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        self.path
            .ancestors()
            .take_while(|directory| directory.starts_with(self.root))
            .filter_map(|directory| {
                let limit = number(directory.join(self.limit))?;
                let used = number(directory.join(self.usage))?;
                let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
                let cached = cache.bytes(&stat, self.prefix);
                let left = limit.saturating_sub(used.saturating_sub(cached));
                Some(MemoryRoom { left, total: limit })
            })
            .collect()
    }
}

/// Bytes of address space that this process may still reserve under its limit (`ulimit -v`); `None`
/// where it has none.
#[must_use]
pub fn address_space() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the structure.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    if asked != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return None;
    }
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let used = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    Some(limit.rlim_cur.saturating_sub(used * crate::PAGE_SIZE as u64))
}

/// The tasks whose waits for memory are counted (PSI).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PressureSource {
    /// Those of this process's control group.
    Group,
    /// Those of the host, which has no count for the group: groups of version 1, or one whose
    /// `cgroup.pressure` is 0.
    Host,
}

/// The tasks that [`memory_pressure`] and [`memory_stalls`] are about; `None` where the kernel
/// reports none.
#[must_use]
pub fn pressure_source() -> Option<PressureSource> {
    Some(stall_information()?.0)
}

/// Share of the last ten seconds in which some task waited for memory, in percent (PSI): a task of
/// this process's control group, or of the host where groups have no such count. `None` where the
/// kernel does not report it.
#[must_use]
pub fn memory_pressure() -> Option<f32> {
    stall_field(&stall_information()?.1, "avg10=")?.parse().ok()
}

/// How long some task has waited for memory, of those that [`memory_pressure`] is about, since they
/// exist.
#[must_use]
pub fn memory_stalls() -> Option<Duration> {
    stall_field(&stall_information()?.1, "total=")?.parse().ok().map(Duration::from_micros)
}

/// The kernel's pressure stall information for memory. Another group at its limit is no pressure
/// for this process, so the group comes before the host. A kernel that was booted with `psi=0` has
/// the files, and reading them fails.
fn stall_information() -> Option<(PressureSource, String)> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).map(|path| {
        fs::read_to_string(Path::new("/sys/fs/cgroup").join(path).join("memory.pressure"))
    });
    if let Some(Ok(of_group)) = group {
        return Some((PressureSource::Group, of_group));
    }
    let of_host = fs::read_to_string("/proc/pressure/memory").ok()?;
    Some((PressureSource::Host, of_host))
}

fn stall_field<'a>(information: &'a str, name: &str) -> Option<&'a str> {
    let some = information.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|field| field.strip_prefix(name))
}

/// Makes the calling thread run only when nothing else wants the processor (`SCHED_IDLE`).
///
/// # Errors
/// `EPERM` where a sandbox forbids it.
pub fn run_when_idle() -> Result<(), SysError> {
    inject::gate(Call::Schedule)?;
    // SAFETY: all-zero is a valid parameter block: SCHED_IDLE takes priority 0.
    let parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: the block lives through the call; 0 names the calling thread.
    let rc = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameter) };
    if rc != 0 { Err(SysError::last(Call::Schedule)) } else { Ok(()) }
}

/// Processor time the calling thread has used.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure; this clock exists for every thread.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

/// CPU time of another process; `None` if it does not exist.
#[must_use]
pub fn process_cpu_time(pid: u32) -> Option<Duration> {
    // As the kernel numbers the clocks of processes (`CPUCLOCK_SCHED`).
    let clock = (!(pid as libc::clockid_t)) << 3 | 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure, or refuses an invalid clock.
    let rc = unsafe { libc::clock_gettime(clock, &mut time) };
    let length =
        Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32);
    (rc == 0).then_some(length)
}

/// An unpredictable number. Another process draws the same with a probability of one in 2^64.
#[must_use]
pub fn random_word() -> u64 {
    let mut word = [0; 8];
    // SAFETY: writes at most eight bytes to a local of that length.
    let got = unsafe { libc::getrandom(word.as_mut_ptr().cast(), word.len(), 0) };
    if got == word.len() as isize {
        return u64::from_ne_bytes(word);
    }
    // Only sandboxes that filter the call come here; the standard library has its own ways there.
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_control_group_are_recognised_and_others_are_not() {
        assert_eq!(group_of("0::/a/b").unwrap().path, Path::new("/sys/fs/cgroup/a/b"));
        let old = group_of("4:memory:/x").unwrap();
        assert_eq!(old.path, Path::new("/sys/fs/cgroup/memory/x"));
        assert_eq!(old.limit, "memory.limit_in_bytes");
        assert!(group_of("3:cpuset:/").is_none());
        assert!(group_of("garbage").is_none());
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        let room = MemoryRoom { left: 3 << 10, total: 9 << 10 };
        assert_eq!(host_room("MemTotal: 9 kB\nMemAvailable:    3 kB\n"), Some(room));
        assert_eq!(host_room("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn cache_in_use_counts_only_where_all_cache_does() {
        let new = "anon 9\nfile 6\ninactive_anon 9\nactive_file 4\ninactive_file 2\n";
        assert_eq!(CountedCache::Inactive.bytes(new, ""), 2);
        assert_eq!(CountedCache::All.bytes(new, ""), 6);
        let old = "inactive_file 1\nactive_file 1\ntotal_inactive_file 2\ntotal_active_file 4\n";
        assert_eq!(CountedCache::Inactive.bytes(old, "total_"), 2);
        assert_eq!(CountedCache::All.bytes(old, "total_"), 6);
        assert_eq!(CountedCache::All.bytes("", "total_"), 0);
    }

    #[test]
    fn random_words_differ() {
        assert_ne!(random_word(), random_word());
    }

    #[test]
    fn an_idle_thread_still_runs() {
        let ran = std::thread::spawn(|| run_when_idle().is_ok() && !thread_cpu_time().is_zero());
        assert!(ran.join().unwrap());
    }
}
