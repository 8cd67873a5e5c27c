//! Locks on files: those of `fcntl`, by ranges of bytes, which belong to a process or to an open description, and those of `flock`,
//! which belong to an open description and know nothing of the others. Plain data, like all else.

use afresh_files::Node;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::encode::Bytes;
use super::table::Open;
use super::threads::{On, Wait};
use super::{DONE, Outcome, Person, Served, State, copy_in, copy_out};
use crate::platform::Process;

/// Locks that a guest may hold.
const LOCKS: usize = 1 << 14;

/// Whose a lock is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Owner {
    Process(u32),
    Description(u64),
}

/// A lock that is held, or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lock {
    node: Node,
    owner: Owner,
    start: u64,
    end: u64,
    writes: bool,
    /// Whether it is one of `flock`.
    whole: bool,
}

impl Lock {
    /// Whether both cannot be held.
    fn excludes(&self, other: &Self) -> bool {
        (self.node, self.whole) == (other.node, other.whole)
            && self.owner != other.owner
            && self.start < other.end
            && other.start < self.end
            && (self.writes || other.writes)
    }
}

/// All locks that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Locks(Vec<Lock>);

impl Locks {
    /// A lock that stands against `wanted`.
    pub(super) fn against(&self, wanted: &Lock) -> Option<&Lock> {
        self.0.iter().find(|held| held.excludes(wanted))
    }

    /// Gives up what the owner of `what` holds in its range.
    fn release(&mut self, what: &Lock) {
        let own = |held: &Lock| {
            (held.node, held.owner, held.whole) == (what.node, what.owner, what.whole)
                && held.start < what.end
                && what.start < held.end
        };
        let (cut, kept): (Vec<Lock>, Vec<Lock>) = self.0.iter().partition(|held| own(held));
        self.0 = kept;
        for held in cut {
            let before = Lock { end: what.start, ..held };
            let behind = Lock { start: what.end, ..held };
            self.0.extend([before, behind].into_iter().filter(|part| part.start < part.end));
        }
    }

    /// Gives up what `process` holds of a file, one of whose descriptors it has closed.
    fn close(&mut self, process: u32, node: Node) {
        let gone = |held: &Lock| held.owner == Owner::Process(process) && held.node == node;
        self.0.retain(|held| !gone(held));
    }

    /// Keeps what belongs to processes that live, and to what is open.
    pub(super) fn retain(&mut self, lives: impl Fn(u32) -> bool, open: impl Fn(u64) -> bool) {
        self.0.retain(|held| match held.owner {
            Owner::Process(id) => lives(id),
            Owner::Description(id) => open(id),
        });
    }
}

impl State {
    /// Gives up locks whose owners are no more.
    pub(super) fn drop_unowned(&mut self) {
        let (family, table) = (&self.family, &self.table);
        self.locks.retain(|id| family.lives(id), |id| table.description(id).is_some());
    }
}

impl Person {
    /// The file that a descriptor is open on, if it is one.
    fn file_of(&self, descriptor: u64) -> Option<Node> {
        match self.state.table.get(descriptor).map(|description| &description.open) {
            Ok(Open::File(open)) => Some(open.node),
            _ => None,
        }
    }

    /// Serves a call that may close descriptors, and gives up the locks that go with them.
    pub(super) fn closing(
        &mut self,
        closed: Vec<u64>,
        serve: impl FnOnce(&mut Self) -> Served,
    ) -> Served {
        if self.state.locks.0.is_empty() {
            return serve(self);
        }
        let nodes: Vec<Node> =
            closed.into_iter().filter_map(|number| self.file_of(number)).collect();
        let outcome = serve(self)?;
        let own = self.state.family.own.id;
        let state = self.change();
        nodes.into_iter().for_each(|node| state.locks.close(own, node));
        state.drop_unowned();
        Ok(outcome)
    }

    /// The lock that a `struct flock` at `address` tells of, and whether it is to be given up.
    fn lock_in(
        &self,
        process: &Process,
        descriptor: u64,
        address: u64,
        owner: Owner,
    ) -> Served<(Option<Lock>, bool)> {
        let bytes = copy_in(process, address, 32)?;
        let half = |at: usize| i32::from(i16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let word = |at: usize| {
            bytes[at..at + 8].iter().rev().fold(0, |word, &b| word << 8 | u64::from(b)) as i64
        };
        let (kind, whence, start, len) = (half(0), half(2), word(8), word(16));
        let description = self.state.table.get(descriptor)?;
        let node = self.file_of(descriptor);
        let base = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => description.offset() as i64,
            libc::SEEK_END => match node {
                Some(node) => self.state.tree.stat(node)?.size as i64,
                None => 0,
            },
            _ => return Err(Errno::INVAL.into()),
        };
        let mut from = base.checked_add(start).ok_or(Errno::OVERFLOW)?;
        let mut end = match len {
            0 => i64::MAX,
            len => from.checked_add(len).ok_or(Errno::OVERFLOW)?,
        };
        if end < from {
            std::mem::swap(&mut from, &mut end);
        }
        if from < 0 {
            return Err(Errno::INVAL.into());
        }
        let writes = kind == libc::F_WRLCK;
        let frees = kind == libc::F_UNLCK;
        if !writes && !frees && kind != libc::F_RDLCK {
            return Err(Errno::INVAL.into());
        }
        let (start, end, whole) = (from as u64, end as u64, false);
        Ok((node.map(|node| Lock { node, owner, start, end, writes, whole }), frees))
    }

    /// `fcntl` with one of its commands about locks.
    pub(super) fn lock_range(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        command: i32,
        address: u64,
    ) -> Served {
        let of_description =
            [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_OFD_GETLK].contains(&command);
        let owner = match of_description {
            true => Owner::Description(self.state.table.id(descriptor)?),
            false => Owner::Process(self.state.family.own.id),
        };
        let (lock, frees) = self.lock_in(process, descriptor, address, owner)?;
        if command == libc::F_GETLK || command == libc::F_OFD_GETLK {
            if frees {
                return Err(Errno::INVAL.into());
            }
            let Some(held) = lock.as_ref().and_then(|lock| self.state.locks.against(lock)) else {
                let free = (libc::F_UNLCK as u16).to_le_bytes();
                copy_out(process, address, &free)?;
                return Ok(DONE);
            };
            let kind = if held.writes { libc::F_WRLCK } else { libc::F_RDLCK };
            let len = if held.end == i64::MAX as u64 { 0 } else { held.end - held.start };
            let by = match held.owner {
                Owner::Process(id) => id,
                Owner::Description(_) => u32::MAX,
            };
            let told = Bytes::default().half(kind as u16).half(0).int(0).word(held.start);
            copy_out(process, address, &told.word(len).int(by).0)?;
            return Ok(DONE);
        }
        // Of what is no file there is nothing to lock.
        let Some(lock) = lock else { return Ok(DONE) };
        let description = self.state.table.get(descriptor)?;
        let may = if lock.writes { description.writes() } else { description.reads() };
        if !frees && !may {
            return Err(Errno::BADF.into());
        }
        let waits = command == libc::F_SETLKW || command == libc::F_OFD_SETLKW;
        self.lock(lock, frees, waits)
    }

    /// `flock`.
    pub(super) fn lock_whole(&mut self, descriptor: u64, operation: u64) -> Served {
        let operation = operation as i32;
        let owner = Owner::Description(self.state.table.id(descriptor)?);
        let (writes, frees) = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => (false, false),
            libc::LOCK_EX => (true, false),
            libc::LOCK_UN => (false, true),
            _ => return Err(Errno::INVAL.into()),
        };
        let Some(node) = self.file_of(descriptor) else { return Ok(DONE) };
        let lock = Lock { node, owner, start: 0, end: u64::MAX, writes, whole: true };
        self.lock(lock, frees, operation & libc::LOCK_NB == 0)
    }

    fn lock(&mut self, lock: Lock, frees: bool, waits: bool) -> Served {
        if frees {
            if !self.state.locks.0.is_empty() {
                self.change().locks.release(&lock);
            }
            return Ok(DONE);
        }
        if let Some(held) = self.state.locks.against(&lock) {
            if !waits {
                return Err(Errno::AGAIN.into());
            }
            if self.waits_for_us(held.owner, &lock) {
                return Err(Errno::DEADLK.into());
            }
            return Ok(Outcome::Wait(Wait::new(On::Lock(lock), None)));
        }
        let locks = &mut self.change().locks;
        locks.release(&lock);
        if locks.0.len() >= LOCKS {
            return Err(Errno::NOLCK.into());
        }
        locks.0.push(lock);
        Ok(DONE)
    }

    /// Whether the process that `owner` is waits, over others or not, for a lock of the one that wants `lock`.
    fn waits_for_us(&self, owner: Owner, lock: &Lock) -> bool {
        let (mut next, mut seen) = (vec![owner], Vec::new());
        while let Some(owner) = next.pop() {
            let Owner::Process(id) = owner else { continue };
            if seen.contains(&id) {
                continue;
            }
            seen.push(id);
            for wanted in self.state.family.wanted_locks(id) {
                let held = self.state.locks.0.iter().filter(|held| held.excludes(wanted));
                for held in held {
                    if held.owner == lock.owner {
                        return true;
                    }
                    next.push(held.owner);
                }
            }
        }
        false
    }
}
