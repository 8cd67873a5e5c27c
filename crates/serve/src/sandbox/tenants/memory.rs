//! The memory that all sandboxes of a server may take, and how much they do.
//!
//! Promises: none is made or comes back from the store while the server's process and the programs
//! that it runs take more than the limit. May break it: live sandboxes, which can grow to the
//! limits of their templates.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::resident::resident_bytes;
use crate::sandbox::lifecycle::tasks::blocking;

/// The charge of a new sandbox until memory is measured again.
const NEW_SANDBOX_BYTES: u64 = 4 << 20;

/// The memory of all sandboxes.
pub(crate) struct Memory {
    limit: u64,
    /// The last measurement, and the admissions since.
    used: AtomicU64,
}

/// Three quarters of the limit: the host's memory or that of the control group.
pub(crate) fn default_limit() -> u64 {
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let limits = [
        format!("/sys/fs/cgroup{group}/memory.max"),
        "/sys/fs/cgroup/memory.max".to_owned(),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned(),
    ];
    let limits =
        limits.iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
    limits.chain(total).min().map_or(u64::MAX, |least| least / 4 * 3)
}

/// The parent of a process.
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may have anything in it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Memory of a process that is its own alone.
fn own_bytes(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let mut pages = statm.split(' ').skip(1).map(|pages| pages.parse::<u64>().unwrap_or(0));
    let (resident, shared) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    resident.saturating_sub(shared).saturating_mul(rustix::param::page_size() as u64)
}

/// The children of a process, by the kernel's lists for its threads. One that ends at this moment
/// can hide another.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.flat_map(|task| fs::read_to_string(task.path().join("children")));
    let parse = |list: String| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>();
    lists.flat_map(parse).collect()
}

/// The children of every process of the host.
fn all_children() -> HashMap<u32, Vec<u32>> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some((pid, parent)) = pid.and_then(|pid| Some((pid, parent(pid)?))) {
            children.entry(parent).or_default().push(pid);
        }
    }
    children
}

/// Memory of this process, and of those that it has started. Other processes of the host are only
/// read where the kernel has no lists of children.
fn used_bytes() -> u64 {
    let has_lists = Path::new("/proc/thread-self/children").exists();
    let mut all = if has_lists { HashMap::new() } else { all_children() };
    let mut children_of = |pid| match has_lists {
        true => children(pid),
        false => all.remove(&pid).unwrap_or_default(),
    };
    let mut used = resident_bytes() as u64;
    let mut left = children_of(std::process::id());
    while let Some(pid) = left.pop() {
        used = used.saturating_add(own_bytes(pid));
        left.extend(children_of(pid));
    }
    used
}

impl Memory {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, used: AtomicU64::new(used_bytes()) }
    }

    /// Measures the memory in use. This takes a moment, longer with many programs.
    pub(crate) fn measure(&self) {
        self.used.store(used_bytes(), Ordering::Relaxed);
    }

    fn take(&self, count: usize) -> Result<(), ErrorResponse> {
        let more = NEW_SANDBOX_BYTES.saturating_mul(count as u64);
        let fits = |used: u64| used.checked_add(more).filter(|sum| *sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map(drop).map_err(|used| {
            let (used, limit) = (used >> 20, self.limit >> 20);
            let message = format!(
                "the server uses {used} MiB of memory, and its sandboxes may have it use {limit} MiB; pause or kill some, \
                 or try again later"
            );
            ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// Admits `count` more sandboxes. Blocks for a moment where there seems to be no room.
    pub(crate) fn admit_now(&self, count: usize) -> Result<(), ErrorResponse> {
        self.take(count).or_else(|_| {
            self.measure();
            self.take(count)
        })
    }

    /// As [`Memory::admit_now`].
    pub(crate) async fn admit(self: &Arc<Self>, count: usize) -> Result<(), ErrorResponse> {
        match self.take(count) {
            Ok(()) => Ok(()),
            Err(_) => {
                let this = self.clone();
                blocking(move || this.admit_now(count)).await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_are_admitted_up_to_the_limit() {
        let used = used_bytes();
        assert!(used > 1 << 20, "{used}");
        let usual = default_limit();
        assert!(usual > 64 << 20, "{usual}");
        let memory = Memory::new(used.saturating_add(64 << 20));
        memory.admit_now(1).unwrap();
        let refused = memory.admit_now(1000).unwrap_err();
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert!(refused.message.contains("pause or kill"), "{}", refused.message);
        assert!(Memory::new(0).admit_now(1).is_err());
    }

    #[test]
    fn the_memory_of_programs_counts() {
        let before = used_bytes();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let own = own_bytes(child.id());
        assert!(parent(child.id()) == Some(std::process::id()) && own > 0);
        // Both ways find it, also if another thread has started it.
        assert!(all_children()[&std::process::id()].contains(&child.id()));
        let found = std::thread::spawn(|| children(std::process::id())).join().unwrap();
        let has_lists = Path::new("/proc/thread-self/children").exists();
        assert_eq!(found.contains(&child.id()), has_lists);
        assert!(used_bytes() > 0 && before > 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
