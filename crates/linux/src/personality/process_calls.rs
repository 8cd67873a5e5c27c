//! Calls about the process itself: its user and names. The same in every guest and after every reset.

use rustix::io::Errno;

use super::encode::Bytes;
use super::ground::HOST;
use super::{DONE, Outcome, Person, Served, copy_out};
use crate::platform::{GUEST, Process};

/// What the kernel calls itself.
pub(super) const RELEASE: &str = "6.1.0";
pub(super) const VERSION: &str = "#1";
/// The number of the guest's first process and thread.
pub(crate) const PID: u64 = 2;
/// Its user and group.
pub(crate) const USER: u64 = 1000;

const ARCH_SET_GS: u64 = 0x1001;
const ARCH_SET_FS: u64 = 0x1002;
const ARCH_GET_FS: u64 = 0x1003;
const ARCH_GET_GS: u64 = 0x1004;

impl Person {
    pub(super) fn set_base(&mut self, process: &mut Process, code: u64, value: u64) -> Served {
        match code {
            // What is not an address of the guest's would fault where the stub loads it.
            ARCH_SET_FS | ARCH_SET_GS if value >= GUEST.end => return Err(Errno::PERM.into()),
            ARCH_SET_FS => process.bases.fs = value,
            ARCH_SET_GS => process.bases.gs = value,
            ARCH_GET_FS => copy_out(process, value, &process.bases.fs.to_le_bytes())?,
            ARCH_GET_GS => copy_out(process, value, &process.bases.gs.to_le_bytes())?,
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(DONE)
    }

    pub(super) fn identities(&mut self, process: &mut Process, a: &[u64; 6]) -> Served {
        for address in &a[..3] {
            copy_out(process, *address, &(USER as u32).to_le_bytes())?;
        }
        Ok(DONE)
    }

    pub(super) fn names(&mut self, process: &mut Process, to: u64) -> Served {
        let mut bytes = vec![0; 6 * 65];
        for (index, name) in
            ["Linux", HOST, RELEASE, VERSION, "x86_64", "(none)"].iter().enumerate()
        {
            bytes[index * 65..index * 65 + name.len()].copy_from_slice(name.as_bytes());
        }
        copy_out(process, to, &bytes)?;
        Ok(DONE)
    }

    pub(super) fn system(&mut self, process: &mut Process, to: u64) -> Served {
        let memory = self.state.layout.limit();
        let bytes = Bytes::default()
            .word(1)
            .zeros(24)
            .word(memory)
            .word(memory)
            .zeros(32)
            .half(1)
            .zeros(6)
            .zeros(16)
            .int(1)
            .zeros(4);
        copy_out(process, to, &bytes.0)?;
        Ok(DONE)
    }

    pub(super) fn processors(
        &mut self,
        process: &mut Process,
        target: u64,
        size: u64,
        to: u64,
    ) -> Served {
        if target != 0 && self.state.threads.get(target as u32).is_none() {
            return Err(Errno::SRCH.into());
        }
        if size < 8 {
            return Err(Errno::INVAL.into());
        }
        copy_out(process, to, &1u64.to_le_bytes())?;
        Ok(Outcome::Value(8))
    }

    pub(super) fn processor(&mut self, process: &mut Process, core: u64, node: u64) -> Served {
        for address in [core, node] {
            if address != 0 {
                copy_out(process, address, &[0; 4])?;
            }
        }
        Ok(DONE)
    }
}
