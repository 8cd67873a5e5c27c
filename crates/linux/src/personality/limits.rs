//! Limits of a process that it has set itself (`setrlimit`): values that it is told again, and its children inherit.
//!
//! Promises: none is ever above what every guest has. Only the number of descriptors and processor time are kept to; the guest's own bounds hold beside these,
//! whatever is set here. A frozen one is checked before it counts.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::encode::Bytes;
use super::table::DESCRIPTORS;
use super::{DONE, Person, Served, State, copy_out, word_in};
use crate::platform::Process;

/// Resources that there are (`RLIM_NLIMITS`).
const RESOURCES: u32 = 16;

/// What a process has set: the limit that holds, and what it may be raised to, by resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Limits(BTreeMap<u32, (u64, u64)>);

impl Limits {
    /// Descriptors that may be open.
    pub(super) fn descriptors(&self) -> u32 {
        let set = self.0.get(&libc::RLIMIT_NOFILE);
        set.map_or(DESCRIPTORS, |(soft, _)| (*soft).min(DESCRIPTORS.into()) as u32)
    }

    /// What was set of a resource.
    pub(super) fn get(&self, resource: u32) -> Option<(u64, u64)> {
        self.0.get(&resource).copied()
    }

    pub(super) fn set(&mut self, resource: u32, limits: (u64, u64)) {
        self.0.insert(resource, limits);
    }

    /// Whether it is what a guest could have.
    pub(super) fn is_sound(&self) -> bool {
        self.0.iter().all(|(resource, (soft, hard))| *resource < RESOURCES && soft <= hard)
    }
}

impl State {
    /// The limit of a resource for process `id`, and what it may be raised to, if there is such a resource.
    pub(super) fn limit_of(&self, id: u32, resource: u32) -> Option<(u64, u64)> {
        if let Some(set) = self.family.kin(id).and_then(|kin| kin.limits.get(resource)) {
            return Some(set);
        }
        let limit = match resource {
            libc::RLIMIT_STACK => super::STACK_LEN,
            libc::RLIMIT_NOFILE => u64::from(DESCRIPTORS),
            libc::RLIMIT_AS | libc::RLIMIT_DATA | libc::RLIMIT_RSS => self.layout.limit(),
            libc::RLIMIT_NPROC => super::family::PROCESSES as u64,
            libc::RLIMIT_CORE => 0,
            0..RESOURCES => u64::MAX,
            _ => return None,
        };
        Some((limit, limit))
    }
}

impl Person {
    /// `prlimit64`: of the current process where `id` is nought.
    pub(super) fn limit(
        &mut self,
        process: &mut Process,
        id: u64,
        resource: u64,
        new: u64,
        old: u64,
    ) -> Served {
        let id = if id == 0 { self.state.family.own.id } else { id as u32 };
        let resource = resource as u32;
        let known = self.state.limit_of(id, resource).ok_or(Errno::INVAL)?;
        if !self.state.family.lives(id) {
            return Err(Errno::SRCH.into());
        }
        let new = match new {
            0 => None,
            at => Some((word_in(process, at)?, word_in(process, at.wrapping_add(8))?)),
        };
        if let Some((soft, hard)) = new {
            if soft > hard {
                return Err(Errno::INVAL.into());
            }
            if hard > known.1 {
                return Err(Errno::PERM.into());
            }
        }
        if old != 0 {
            copy_out(process, old, &Bytes::default().word(known.0).word(known.1).0)?;
        }
        if let Some(new) = new.filter(|new| *new != known) {
            let state = self.change();
            if let Some(kin) = state.family.kin_mut(id) {
                kin.limits.set(resource, new);
            }
            state.heed_limits();
        }
        Ok(DONE)
    }
}

impl State {
    /// Has the descriptors of the current process keep to its limit.
    pub(super) fn heed_limits(&mut self) {
        self.table.set_room(self.family.own.limits.descriptors());
    }
}
