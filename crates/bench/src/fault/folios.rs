//! Folios of several sizes between 4 KiB and 2 MiB (mTHP): a setting of the whole host, which only
//! root may change.
//!
//! The setting is made before the clock starts and taken back when it has stopped, cycle by cycle,
//! so that no other row, and no other process for longer than that, runs under it. A killed process
//! leaves the setting behind.

use std::fs;
use std::path::PathBuf;

use super::kernel::{FreshMapping, Kernel};
use super::{Case, Sample, Strategy};
use anyhow::{Context, Result};

/// Plain anonymous memory while the kernel may answer its faults by folios of one size.
pub(super) struct Folios {
    kernel: Kernel,
    setting: PathBuf,
}

/// Puts the setting back.
struct Restore {
    setting: PathBuf,
    before: String,
}

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = fs::write(&self.setting, &self.before);
    }
}

impl Folios {
    /// For folios of `kib` KiB; fails where the kernel has none or does not allow us to request
    /// them.
    pub(super) fn new(pages: usize, kib: usize) -> Result<Self> {
        let setting = format!("/sys/kernel/mm/transparent_hugepage/hugepages-{kib}kB/enabled");
        let kernel = Kernel::new(pages, FreshMapping::Unadvised)?;
        let folios = Self { kernel, setting: setting.into() };
        drop(folios.allow()?);
        Ok(folios)
    }

    fn allow(&self) -> Result<Restore> {
        let refused = || {
            format!(
                "{} cannot be set: only root may, on a kernel that has it",
                self.setting.display()
            )
        };
        let modes = fs::read_to_string(&self.setting).with_context(refused)?;
        let before = modes.split(['[', ']']).nth(1).unwrap_or("never").to_owned();
        fs::write(&self.setting, "always").with_context(refused)?;
        Ok(Restore { setting: self.setting.clone(), before })
    }
}

impl Strategy for Folios {
    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let restore = self.allow()?;
        let sample = self.kernel.cycle(case);
        drop(restore);
        sample
    }
}
