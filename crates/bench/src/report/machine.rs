//! The machine and the versions behind a report.

use std::fs;

use serde::{Deserialize, Serialize};

/// The conditions of a run. A field that the host does not reveal is empty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor.
    pub processor: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Whether the machine is virtual, by the processor's `hypervisor` flag.
    pub is_virtual: bool,
    /// Setting of transparent huge pages.
    pub huge_pages: String,
    /// Frequency governor of the first processor.
    pub governor: String,
    /// Load of the last minute when the run began: other work makes figures worse.
    pub load: f64,
    /// Version of afresh.
    pub version: String,
    /// Whether the program was built with optimisation. Figures of other builds mean nothing.
    pub is_optimised: bool,
}

impl Machine {
    /// Describes this machine.
    #[must_use]
    pub fn detect() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let cpuinfo = read("/proc/cpuinfo");
        let meminfo = read("/proc/meminfo");
        let memory = field(&meminfo, "MemTotal").and_then(|text| {
            text.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
        });
        let load = read("/proc/loadavg");
        Self {
            processor: field(&cpuinfo, "model name").unwrap_or_default().to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: memory.unwrap_or_default(),
            kernel: format!(
                "{} {}",
                read("/proc/sys/kernel/ostype"),
                read("/proc/sys/kernel/osrelease")
            ),
            is_virtual: field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            huge_pages: selected(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load: load.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            is_optimised: !cfg!(debug_assertions),
        }
    }

    /// Name and value of each line for a reader.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let kind = if self.is_virtual { ", virtual machine" } else { "" };
        let mut lines = vec![
            ("processor", format!("{}, {} cores{kind}", self.processor, self.cores)),
            ("memory", format!("{:.1} GiB", self.memory as f64 / f64::from(1 << 30))),
            ("kernel", self.kernel.clone()),
            ("transparent huge pages", self.huge_pages.clone()),
            ("frequency governor", self.governor.clone()),
            ("load at the start", format!("{:.2}", self.load)),
            ("afresh", self.version.clone()),
            ("wasmtime, the rival of Wasm guests", WASMTIME.to_owned()),
        ];
        lines.retain(|(_, value)| !value.is_empty());
        lines
    }
}

/// The version of wasmtime in this program; a test compares it with `Cargo.lock`.
const WASMTIME: &str = "48";

/// The first value of `name` in lines of `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The choice in brackets, as in `always [madvise] never`.
fn selected(text: &str) -> String {
    let choice = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    choice.map_or_else(String::new, |(choice, _)| choice.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::detect();
        assert!(machine.cores >= 1 && machine.memory > 1 << 20);
        assert!(machine.kernel.starts_with("Linux "), "{}", machine.kernel);
        assert_eq!(selected("always [madvise] never"), "madvise");
    }

    #[test]
    fn the_version_of_wasmtime_is_that_of_the_lock_file() {
        let lock = include_str!("../../../../Cargo.lock");
        let (_, rest) = lock.split_once("name = \"wasmtime\"\nversion = \"").unwrap();
        assert!(rest.starts_with(&format!("{WASMTIME}.")), "{}", &rest[..10]);
    }
}
