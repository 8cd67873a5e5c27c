//! The mappings, descriptors and memory of a process and its descendants.

use std::fs;

use anyhow::{Context, Result};

/// The use of a process and its descendants.
#[derive(Clone, Copy, Default)]
pub(super) struct Usage {
    /// Of the process alone.
    pub(super) mappings: usize,
    /// Of the process alone.
    pub(super) descriptors: usize,
    pub(super) processes: usize,
    pub(super) pss_kib: u64,
    /// Pages that one process has written and shares with none.
    pub(super) written_kib: u64,
}

impl Usage {
    pub(super) fn of(process: u32) -> Result<Self> {
        let mut usage = Self {
            mappings: fs::read_to_string(format!("/proc/{process}/maps"))?.lines().count(),
            descriptors: fs::read_dir(format!("/proc/{process}/fd"))?.count(),
            ..Self::default()
        };
        let mut processes = vec![process];
        while let Some(process) = processes.pop() {
            usage.add_memory(process).with_context(|| format!("process {process}"))?;
            processes.extend(children(process)?);
        }
        Ok(usage)
    }

    fn add_memory(&mut self, process: u32) -> Result<()> {
        let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
        let kib = |name: &str| -> Result<u64> {
            let text = rollup.lines().find_map(|line| line.strip_prefix(name));
            let number = text.and_then(|text| text.split_whitespace().next()?.parse().ok());
            number.with_context(|| format!("smaps_rollup has no {name}"))
        };
        self.processes += 1;
        self.pss_kib += kib("Pss:")?;
        self.written_kib += kib("Private_Dirty:")?;
        Ok(())
    }
}

fn children(process: u32) -> Result<Vec<u32>> {
    let mut children = Vec::new();
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let list = fs::read_to_string(task?.path().join("children"))?;
        children.extend(list.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
    }
    Ok(children)
}

/// KiB of pages of images that this process has written to, which are copies.
pub(super) fn copies_kib() -> Result<i64> {
    let maps = fs::read_to_string("/proc/self/smaps")?;
    let mut is_image = false;
    let mut copies = 0;
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Anonymous:") {
            let kib: Option<i64> = size.split_whitespace().next().and_then(|kib| kib.parse().ok());
            copies += if is_image { kib.unwrap_or(0) } else { 0 };
        } else if line.as_bytes().first().is_some_and(|byte| !byte.is_ascii_uppercase()) {
            is_image = line.contains("memfd:afresh-image");
        }
    }
    Ok(copies)
}
