//! Reads and writes of the files of `/proc` that may be written.
//!
//! Promises: a write changes what its file is about or nothing. Lengths are checked before anything
//! is parsed.

use rustix::io::Errno;

use crate::sentry::fs::permissions::{FilePermissions, WRITE};
use crate::sentry::fs::proc_settings::{ProcFile, ProcSetting};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::{
    Credentials, SETGID, SETUID, SYS_ADMIN, UserNamespace,
};
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::result::SyscallResult;

/// Bytes of the longest word that `setgroups` takes.
const MAX_SWITCH_LEN: usize = 7;
/// Ranges that a map may have.
const MAX_RANGES: usize = 340;

/// A line of a map: the first number inside, the first one outside, and their count.
type MappedRange = (u32, u32, u32);

/// The ranges in a map that is written. Bytes behind a zero are ignored.
fn ranges_in(text: &[u8]) -> Result<Vec<MappedRange>, Errno> {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| Errno::INVAL)?;
    let mut ranges: Vec<MappedRange> = Vec::new();
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        let numbers: Vec<u32> = line
            .split_ascii_whitespace()
            .map(|word| word.parse().map_err(|_| Errno::INVAL))
            .collect::<Result<_, _>>()?;
        let [inside, outside, count] = numbers[..] else { return Err(Errno::INVAL) };
        let ends = [inside, outside].map(|first| first.checked_add(count));
        if count == 0 || ends.contains(&None) || [inside, outside].contains(&u32::MAX) {
            return Err(Errno::INVAL);
        }
        let overlap = |a: u32, b: u32, len: u32| a < b + len && b < a + count;
        let meets =
            |&(i, o, len): &MappedRange| overlap(inside, i, len) || overlap(outside, o, len);
        if ranges.len() >= MAX_RANGES || ranges.iter().any(meets) {
            return Err(Errno::INVAL);
        }
        ranges.push((inside, outside, count));
    }
    Ok(ranges)
}

impl Kernel {
    /// The bytes of a file, as its reader sees them.
    pub(in crate::sentry) fn proc_content(&self, file: &ProcFile) -> Result<Vec<u8>, Errno> {
        let text = match file.setting {
            ProcSetting::UserMap(id) => self.map_text(id, file.opener, false),
            ProcSetting::GroupMap(id) => self.map_text(id, file.opener, true),
            ProcSetting::GroupSwitch(id) => {
                let denied = self.namespaces.get(id).is_some_and(|own| own.denies_groups);
                if denied { "deny\n" } else { "allow\n" }.to_owned()
            }
            ProcSetting::ThreadName(id, thread) => {
                self.thread_name(id, thread).ok_or(Errno::SRCH)? + "\n"
            }
            ProcSetting::OomAdjustment(id) => {
                self.processes.info(id).ok_or(Errno::SRCH)?;
                format!("{}\n", self.tunables.of(id).oom_adjustment)
            }
            ProcSetting::DumpFilter(id) => {
                self.processes.info(id).ok_or(Errno::SRCH)?;
                format!("{:08x}\n", self.tunables.of(id).dump_filter)
            }
            ProcSetting::Namespace(..) | ProcSetting::Memory(_) | ProcSetting::PageMap(_) => {
                return Err(Errno::INVAL);
            }
        };
        Ok(text.into_bytes())
    }

    /// The map of a namespace for a reader in namespace `reader`.
    fn map_text(&self, id: u32, reader: u32, group: bool) -> String {
        let line = |inside: u32, outside: u32, count: u32| {
            format!("{inside:>10} {outside:>10} {count:>10}\n")
        };
        let Some(namespace) = self.namespaces.get(id) else { return line(0, 0, u32::MAX) };
        let Some(inside) = self.namespaces.number(id, group) else { return String::new() };
        // From inside, numbers are shown as in the namespace around it.
        let viewer = if reader == id { namespace.parent } else { reader };
        let outside = self.namespaces.number(viewer, group).unwrap_or(u32::MAX);
        line(inside, outside, 1)
    }

    /// Refuses to open a file for writing that its opener has no right over.
    pub(in crate::sentry) fn may_open_setting(
        &self,
        setting: ProcSetting,
        writes: bool,
    ) -> Result<(), Errno> {
        match setting {
            ProcSetting::Namespace(..) | ProcSetting::PageMap(_) if writes => Err(Errno::ACCESS),
            ProcSetting::Memory(id)
                if !self.has_memory_of(id) && !self.may_inspect(id, FOR_FILES) =>
            {
                Err(Errno::ACCESS)
            }
            ProcSetting::ThreadName(id, _)
            | ProcSetting::OomAdjustment(id)
            | ProcSetting::DumpFilter(id)
                if writes && !self.may_write_about(id, setting.mode()) =>
            {
                Err(Errno::ACCESS)
            }
            ProcSetting::GroupSwitch(id) if writes && !self.has_over_namespace(id, SYS_ADMIN) => {
                Err(Errno::ACCESS)
            }
            _ => Ok(()),
        }
    }

    fn may_write_about(&self, process: u32, mode: u32) -> bool {
        let owner = self.owner_of_process(process);
        self.permits(FilePermissions { mode, owner }, false, WRITE)
    }

    /// Writes a file that `opener` has opened.
    pub(in crate::sentry) fn write_setting(
        &mut self,
        file: &ProcFile,
        bytes: &[u8],
        at: u64,
    ) -> SyscallResult<()> {
        if let ProcSetting::ThreadName(id, thread) = file.setting {
            return Ok(self.rename_thread(id, thread, bytes)?);
        }
        if let ProcSetting::OomAdjustment(id) | ProcSetting::DumpFilter(id) = file.setting {
            self.processes.info(id).ok_or(Errno::SRCH)?;
            match file.setting {
                ProcSetting::OomAdjustment(_) => self.tunables.write_oom_adjustment(id, bytes)?,
                _ => self.tunables.write_dump_filter(id, bytes)?,
            }
            return Ok(());
        }
        if at != 0 || bytes.len() as u64 >= PAGE {
            return Err(Errno::INVAL.into());
        }
        match file.setting {
            ProcSetting::UserMap(id) => self.write_map(id, file.opener, bytes, false)?,
            ProcSetting::GroupMap(id) => self.write_map(id, file.opener, bytes, true)?,
            ProcSetting::GroupSwitch(id) => self.write_group_switch(id, bytes)?,
            ProcSetting::Namespace(..)
            | ProcSetting::ThreadName(..)
            | ProcSetting::Memory(_)
            | ProcSetting::OomAdjustment(_)
            | ProcSetting::DumpFilter(_)
            | ProcSetting::PageMap(_) => return Err(Errno::INVAL.into()),
        }
        Ok(())
    }

    /// Names a thread of the current process. The name ends at a zero, and 15 bytes count.
    fn rename_thread(&mut self, id: u32, thread: u32, bytes: &[u8]) -> Result<(), Errno> {
        self.processes
            .get(id)
            .and_then(|process| process.threads.get(thread))
            .ok_or(Errno::SRCH)?;
        let threads = &mut self.processes.current.threads;
        let named = threads.get_mut(thread).ok_or(Errno::INVAL)?;
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        named.name = Default::default();
        let len = text.len().min(named.name.len() - 1);
        named.name[..len].copy_from_slice(&text[..len]);
        Ok(())
    }

    /// Whether the current process runs in the memory of process `id`.
    pub(in crate::sentry) fn has_memory_of(&self, id: u32) -> bool {
        let memory = self.processes.current.info.memory;
        self.processes.info(id).is_some_and(|info| info.memory == memory)
    }

    /// Maps the guest's user or group in a namespace, which has one number of each. A process that
    /// has changed its user or group maps none.
    fn write_map(&mut self, id: u32, opener: u32, bytes: &[u8], group: bool) -> Result<(), Errno> {
        if !self.namespaces.users.is_first(self.processes.current_id()) {
            return Err(Errno::PERM);
        }
        let own = self.credentials();
        let UserNamespace { parent, denies_groups, .. } =
            *self.namespaces.get(id).ok_or(Errno::PERM)?;
        if opener != id && opener != parent || self.namespaces.number(id, group).is_some() {
            return Err(Errno::PERM);
        }
        if !self.namespaces.has(Credentials { namespace: opener, ..own }, id, SYS_ADMIN) {
            return Err(Errno::PERM);
        }
        let ranges = ranges_in(bytes)?;
        let outside = self.namespaces.number(parent, group);
        let [(inside, number, 1)] = ranges[..] else { return Err(Errno::PERM) };
        let capability = if group { SETGID } else { SETUID };
        let privileged = self.namespaces.has(own, parent, capability) && opener == parent;
        if Some(number) != outside || group && !denies_groups && !privileged {
            return Err(Errno::PERM);
        }
        let namespace = self.namespaces.get_mut(id).ok_or(Errno::PERM)?;
        *(if group { &mut namespace.group } else { &mut namespace.user }) = Some(inside);
        Ok(())
    }

    fn write_group_switch(&mut self, id: u32, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.len() > MAX_SWITCH_LEN {
            return Err(Errno::INVAL);
        }
        let word = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let denies = match word.trim_ascii_end() {
            b"deny" => true,
            b"allow" => false,
            _ => return Err(Errno::INVAL),
        };
        let namespace = self.namespaces.get_mut(id).ok_or(Errno::PERM)?;
        let refused = match denies {
            true => namespace.group.is_some() && !namespace.denies_groups,
            false => namespace.denies_groups,
        };
        if refused {
            return Err(Errno::PERM);
        }
        namespace.denies_groups = denies;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_lines_of_three_numbers() {
        assert_eq!(ranges_in(b"0 1000 1"), Ok(vec![(0, 1000, 1)]));
        assert_eq!(ranges_in(b" 0\t1000 1 \n\0 4 3"), Ok(vec![(0, 1000, 1)]));
        assert_eq!(ranges_in(b"2 0 2\n4 6 2").map(|ranges| ranges.len()), Ok(2));
        for bad in [
            &b""[..],
            b"\n",
            b"1 2",
            b"1 2 3 4",
            b"x 2 3",
            b"-1 2 3",
            b"0 0 0",
            b"4294967295 0 1",
            b"0 4294967290 9",
            b"0 0 2\n1 5 2",
            b"0 0 2\n5 1 2",
            b"0 0 1\n\n1 1 1",
            b"\xff 0 1",
        ] {
            assert_eq!(ranges_in(bad), Err(Errno::INVAL), "{bad:?}");
        }
        let many: String = (0..341).map(|at| format!("{at} {at} 1\n")).collect();
        assert_eq!(ranges_in(many.as_bytes()), Err(Errno::INVAL));
    }
}
