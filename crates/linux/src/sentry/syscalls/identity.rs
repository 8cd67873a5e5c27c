//! System calls on the machine and the processor: names, memory, and the bases of segments.

use crate::platform::{GUEST, Process};
use crate::sentry::Sentry;
use crate::sentry::abi::{MACHINES, StructBuilder};
use crate::sentry::fs::mounts::KINDS;
use crate::sentry::fs::root_files::HOST;
use crate::sentry::kernel::identity::{RELEASE, VERSION};
use crate::sentry::mm::user_memory::{copy_out, path_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use rustix::time::ClockId;

use rustix::io::Errno;

/// The personality of programs of 32 bits.
const PER_LINUX32: u32 = 8;
const ARCH_SET_GS: u64 = 0x1001;
const ARCH_SET_FS: u64 = 0x1002;
const ARCH_GET_FS: u64 = 0x1003;
const ARCH_GET_GS: u64 = 0x1004;
const ARCH_GET_CPUID: u64 = 0x1011;
const ARCH_SET_CPUID: u64 = 0x1012;

impl Sentry {
    /// `arch_prctl(2)`: only the bases of FS and GS. `cpuid` is always allowed, as on a processor
    /// that cannot forbid it. Other codes are `EINVAL`.
    pub(in crate::sentry) fn sys_arch_prctl(
        &mut self,
        process: &mut Process,
        code: u64,
        value: u64,
    ) -> SyscallResult {
        match code {
            // An address outside the guest would fault when the stub loads it.
            ARCH_SET_FS | ARCH_SET_GS if value >= GUEST.end => return Err(Errno::PERM.into()),
            ARCH_SET_FS => process.bases.tls = value,
            ARCH_SET_GS => process.bases.second = value,
            ARCH_GET_FS => copy_out(process, value, &process.bases.tls.to_le_bytes())?,
            ARCH_GET_GS => copy_out(process, value, &process.bases.second.to_le_bytes())?,
            ARCH_GET_CPUID => return Ok(SyscallControl::Value(1)),
            ARCH_SET_CPUID => return Err(Errno::NODEV.into()),
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(ZERO)
    }

    /// `uname(2)`: the names are constants. The personality of 32 bits has another machine.
    pub(in crate::sentry) fn sys_uname(&mut self, process: &mut Process, to: u64) -> SyscallResult {
        let mut bytes = vec![0; 6 * 65];
        let is_short = self.state.current().info.traits.persona & 0xff == PER_LINUX32;
        let machine = MACHINES[usize::from(is_short)];
        for (index, name) in ["Linux", HOST, RELEASE, VERSION, machine, "(none)"].iter().enumerate()
        {
            bytes[index * 65..index * 65 + name.len()].copy_from_slice(name.as_bytes());
        }
        copy_out(process, to, &bytes)?;
        Ok(ZERO)
    }

    /// `personality(2)`: stored. That of 32 bits changes `uname`.
    pub(in crate::sentry) fn sys_personality(&mut self, persona: u64) -> SyscallResult {
        let (new, old) = (persona as u32, self.state.current().info.traits.persona);
        if new != u32::MAX && new != old {
            self.change().current_mut().info.traits.persona = new;
        }
        Ok(SyscallControl::Value(old.into()))
    }

    /// `sysinfo(2)`: the memory is that of the guest, loads and swap space are 0, and the number of
    /// processes is 1.
    pub(in crate::sentry) fn sys_sysinfo(
        &mut self,
        process: &mut Process,
        to: u64,
    ) -> SyscallResult {
        let memory = self.state.layout.limit();
        let free = memory.saturating_sub(self.state.layout.bytes_everywhere());
        let bytes = StructBuilder::default()
            .word(self.streams.clock.read(ClockId::Boottime) / 1_000_000_000)
            .zeros(24)
            .word(memory)
            .word(free)
            .zeros(32)
            .half(1)
            .zeros(6)
            .zeros(16)
            .int(1)
            .zeros(4);
        copy_out(process, to, &bytes.0)?;
        Ok(ZERO)
    }

    /// `sched_getaffinity(2)`: there is one processor. Threads of other processes are `ESRCH`.
    pub(in crate::sentry) fn sys_sched_getaffinity(
        &mut self,
        process: &mut Process,
        target: u64,
        size: u64,
        to: u64,
    ) -> SyscallResult {
        if target != 0 && self.state.current().threads.get(target as u32).is_none() {
            return Err(Errno::SRCH.into());
        }
        if size < 8 {
            return Err(Errno::INVAL.into());
        }
        copy_out(process, to, &1u64.to_le_bytes())?;
        Ok(SyscallControl::Value(8))
    }

    /// `sysfs(2)`: the file systems of `/proc/filesystems`.
    pub(in crate::sentry) fn sys_sysfs(
        &mut self,
        process: &mut Process,
        option: u64,
        first: u64,
        to: u64,
    ) -> SyscallResult {
        let value = match option as i32 {
            1 => {
                let name = path_in(process, first)?;
                let found = KINDS.iter().position(|known| known.as_bytes() == name);
                found.ok_or(Errno::INVAL)?
            }
            2 => {
                let name = KINDS.get(first as u32 as usize).ok_or(Errno::INVAL)?;
                copy_out(process, to, &[name.as_bytes(), &[0]].concat())?;
                0
            }
            3 => KINDS.len(),
            _ => return Err(Errno::INVAL.into()),
        };
        Ok(SyscallControl::Value(value as u64))
    }

    /// `getcpu(2)`: processor and node are 0.
    pub(in crate::sentry) fn sys_getcpu(
        &mut self,
        process: &mut Process,
        core: u64,
        node: u64,
    ) -> SyscallResult {
        for address in [core, node] {
            if address != 0 {
                copy_out(process, address, &[0; 4])?;
            }
        }
        Ok(ZERO)
    }
}
