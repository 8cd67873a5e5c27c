//! Bringing a guest's memory back to its image.
//!
//! Promises: after `Resetter::reset` every accessible byte equals the image. The write set holds
//! every page the guest could write without being noticed: a page leaves it only when it has just
//! been copied back and write-protected again. May break it: a machine that cannot tell what it
//! wrote, for which only the strategies that do not ask are accepted.
//!
//! When to relearn: copying a page back costs `COPY`, noticing a write to a protected page costs
//! `FAULT`. A page that is no longer written wastes a copy each reset, so the set is thrown away
//! and learned anew once the copies since the last time cost as much as learning it would (the
//! ski-rental rule, at most twice the optimum). While relearning yields about the same set, the
//! interval grows, up to `PATIENCE` times, so that a steady workload hardly pays for it.

use crate::machine::{KvmError, Machine, Tracking, failed};
use crate::memory::GuestMemory;
use crate::pages::{PageSet, Run};

/// Relative costs of copying a page and of a write fault; only their ratio matters.
const COPY: u64 = 1;
const FAULT: u64 = 30;
/// How much longer than break-even a set that proved stable is kept.
const PATIENCE: u64 = 64;

/// How a sandbox is brought back to its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strategy {
    /// The write set over the best tracker this host has.
    #[default]
    Auto,
    /// Copy all memory back.
    FullCopy,
    /// Throw every private page away and let the next run fault it back in.
    Discard,
    /// The dirty log; every written page is copied back and write-protected again.
    Log,
    /// The dirty ring; every written page is copied back and write-protected again.
    Ring,
    /// The write set, with new pages noticed by the dirty log.
    WriteSetLog,
    /// The write set, with new pages noticed by the dirty ring.
    WriteSetRing,
    /// Do not reset: only to measure the floor. The sandbox is never pristine again.
    None,
}

impl Strategy {
    /// The name used by benchmarks and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::FullCopy => "full-copy",
            Self::Discard => "discard",
            Self::Log => "log",
            Self::Ring => "ring",
            Self::WriteSetLog => "write-set-log",
            Self::WriteSetRing => "write-set-ring",
            Self::None => "none",
        }
    }

    /// The tracking it needs, for a guest of `pages` writable pages on a host whose rings hold up
    /// to `ring_limit` entries.
    pub(crate) fn tracking(self, pages: u64, ring_limit: u32) -> Result<Tracking, KvmError> {
        // KVM keeps some entries in reserve and pushes up to 512 at once.
        let wanted = (pages + 1024).next_power_of_two().max(2048);
        let ring = u32::try_from(wanted).unwrap_or(u32::MAX).min(ring_limit);
        Ok(match self {
            Self::FullCopy | Self::Discard | Self::None => Tracking::Off,
            Self::Log | Self::WriteSetLog => Tracking::Log,
            Self::Ring | Self::WriteSetRing if ring_limit == 0 => {
                return Err(KvmError::NoTracker("dirty ring"));
            }
            Self::Ring | Self::WriteSetRing => Tracking::Ring(ring),
            Self::Auto if ring_limit == 0 => Tracking::Log,
            Self::Auto => Tracking::Ring(ring),
        })
    }
}

/// What a reset did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResetReport {
    /// Pages copied back.
    pub copied: u64,
    /// Pages that the guest wrote for the first time since they were last protected.
    pub fresh: u64,
    /// Pages in the write set afterwards.
    pub write_set: u64,
}

/// The state of one sandbox's resets.
#[derive(Debug)]
pub(crate) struct Resetter {
    strategy: Strategy,
    /// Pages that are writable without notice, all copied back at every reset.
    set: PageSet,
    runs: Vec<Run>,
    /// Pages noticed since the last reset.
    fresh: PageSet,
    /// Copies since the set was last thrown away.
    spent: u64,
    patience: u64,
    /// Size of the set when it was last thrown away.
    before: u64,
}

impl Resetter {
    pub(crate) fn new(strategy: Strategy, pages: u64) -> Self {
        Self {
            strategy,
            set: PageSet::new(pages),
            runs: Vec::new(),
            fresh: PageSet::new(pages),
            spent: 0,
            patience: 1,
            before: 0,
        }
    }

    /// Empties a full ring while the guest is in the middle of a run.
    pub(crate) fn ring_full(&mut self, machine: &mut Machine) -> Result<(), KvmError> {
        machine.drain(&self.set, &mut self.fresh)?;
        machine.protect(&self.fresh.runs())
    }

    /// Adds to `out` every page that may differ from the image.
    pub(crate) fn written(
        &mut self,
        machine: &mut Machine,
        memory: &GuestMemory,
        out: &mut PageSet,
    ) -> Result<(), KvmError> {
        if machine.tracking() == Tracking::Off {
            for run in memory.slot.accessible().iter() {
                out.insert_range(run.start, run.end);
            }
            return Ok(());
        }
        machine.drain(&self.set, &mut self.fresh)?;
        out.union_with(&self.set);
        out.union_with(&self.fresh);
        out.union_with(&memory.host_written);
        Ok(())
    }

    /// Brings memory back to the image. On an error the memory is in an unknown state.
    pub(crate) fn reset(
        &mut self,
        machine: &mut Machine,
        memory: &mut GuestMemory,
    ) -> Result<ResetReport, KvmError> {
        let report = match self.strategy {
            Strategy::None => ResetReport::default(),
            Strategy::FullCopy => {
                let mut copied = 0;
                for run in memory.writable.iter() {
                    memory.slot.copy_back(run);
                    copied += run.end - run.start;
                }
                ResetReport { copied, ..ResetReport::default() }
            }
            Strategy::Discard => {
                for run in memory.writable.iter() {
                    memory.slot.discard(run).map_err(failed("madvise"))?;
                }
                ResetReport::default()
            }
            Strategy::Log | Strategy::Ring => self.copy_and_protect(machine, memory)?,
            Strategy::Auto | Strategy::WriteSetLog | Strategy::WriteSetRing => {
                self.copy_write_set(machine, memory)?
            }
        };
        memory.host_written.clear();
        Ok(report)
    }

    /// Copies back what was written and protects it again.
    fn copy_and_protect(
        &mut self,
        machine: &mut Machine,
        memory: &mut GuestMemory,
    ) -> Result<ResetReport, KvmError> {
        machine.drain(&self.set, &mut self.fresh)?;
        let guest = self.fresh.runs();
        let fresh = self.fresh.len();
        for run in guest.iter().chain(&memory.host_written.runs()) {
            memory.slot.copy_back(run);
        }
        // Protect only after the copy: the next write must be noticed, the copy must not be.
        machine.protect(&guest)?;
        self.fresh.clear();
        Ok(ResetReport { copied: fresh + memory.host_written.len(), fresh, write_set: 0 })
    }

    fn copy_write_set(
        &mut self,
        machine: &mut Machine,
        memory: &mut GuestMemory,
    ) -> Result<ResetReport, KvmError> {
        machine.drain(&self.set, &mut self.fresh)?;
        let fresh = self.fresh.len();
        if fresh > 0 {
            self.set.union_with(&self.fresh);
            self.fresh.clear();
            self.runs = self.set.runs();
        }
        for run in &self.runs {
            memory.slot.copy_back(run);
        }
        let mut copied = self.set.len();
        if !memory.host_written.is_empty() {
            for run in memory.host_written.runs() {
                for part in self.outside_set(run) {
                    memory.slot.copy_back(&part);
                    copied += part.end - part.start;
                }
            }
        }
        self.spent += self.set.len() * COPY;
        if self.spent > self.set.len() * FAULT * self.patience && !self.set.is_empty() {
            self.relearn(machine)?;
        }
        Ok(ResetReport { copied, fresh, write_set: self.set.len() })
    }

    /// Throws the set away; every page of it was just copied back.
    fn relearn(&mut self, machine: &mut Machine) -> Result<(), KvmError> {
        let size = self.set.len();
        let stable = size >= self.before - self.before / 8 && size <= self.before + self.before / 8;
        self.patience = if stable { (self.patience * 4).min(PATIENCE) } else { 1 };
        self.before = size;
        machine.protect(&self.runs)?;
        self.set.clear();
        self.runs.clear();
        self.spent = 0;
        Ok(())
    }

    fn outside_set(&self, run: Run) -> Vec<Run> {
        let mut parts: Vec<Run> = Vec::new();
        for page in run {
            if self.set.contains(page) {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.end == page => last.end = page + 1,
                _ => parts.push(page..page + 1),
            }
        }
        parts
    }

    /// Forgets everything: memory now equals its image and is write-protected.
    pub(crate) fn restart(&mut self) {
        self.set.clear();
        self.fresh.clear();
        self.runs.clear();
        (self.spent, self.patience, self.before) = (0, 1, 0);
    }
}
