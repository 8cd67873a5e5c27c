//! Calls that add keys and request them, and the keys that the numbers of callers name.
//!
//! A process has the permissions of a *possessor* for keys that it finds through its own keyrings.

use std::collections::BTreeSet;

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::keys::{
    Key, KeyContents, KeyKind, LINK, MAX_DESCRIPTION, MAX_PAYLOAD, OF_PROCESS, OF_SESSION,
    ProcessKeyrings, SEARCH, WRITE,
};
use crate::sentry::kernel::users::{FOR_FILES, ProcessIds};
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_in, string_in};
use crate::sentry::result::{SyscallControl, SyscallResult};

/// Numbers of keyrings that each process has.
pub(in crate::sentry) const OF_THREAD: i32 = -1;
const OF_OWN_PROCESS: i32 = -2;
const OF_OWN_SESSION: i32 = -3;
const OF_OWN_USER: i32 = -4;
const OF_USER_SESSIONS: i32 = -5;
const OF_GROUP: i32 = -6;
const LAST_SPECIAL: i32 = -8;
/// Bytes of the name of a type, with its end.
const MAX_TYPE: usize = 32;
/// Time that a negative key lasts, in nanoseconds.
const NEGATIVE_TIME: u64 = 60_000_000_000;

/// A key, as its finder has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) struct FoundKey {
    pub(in crate::sentry) id: i32,
    pub(in crate::sentry) possessed: bool,
}

/// Whether a process with these numbers has all `needed` permissions for a key.
fn allows(key: &Key, possessed: bool, ids: &ProcessIds, needed: u32) -> bool {
    let shift = match () {
        () if key.user == ids.user[FOR_FILES] => 16,
        () if ids.is_in_group(key.group) && key.permissions & 0x3f00 != 0 => 8,
        () => 0,
    };
    let mut held = key.permissions >> shift;
    if possessed {
        held |= key.permissions >> 24;
    }
    held & needed == needed
}

/// A text about a key: a string shorter than `limit`. A longer one is `EINVAL`.
pub(in crate::sentry) fn text_in(
    process: &Process,
    address: u64,
    limit: usize,
) -> SyscallResult<Vec<u8>> {
    Ok(string_in(process, address, limit)?.ok_or(Errno::INVAL)?)
}

/// The name of a type of keys.
pub(in crate::sentry) fn type_in(process: &Process, address: u64) -> SyscallResult<Vec<u8>> {
    let name = text_in(process, address, MAX_TYPE)?;
    match name.first() {
        None => Err(Errno::INVAL.into()),
        Some(b'.') => Err(Errno::PERM.into()),
        Some(_) => Ok(name),
    }
}

impl Sentry {
    /// The owner of keys that the current process makes.
    pub(in crate::sentry) fn key_owner(&self) -> [u32; 2] {
        let ids = self.state.ids();
        [ids.user[FOR_FILES], ids.group[FOR_FILES]]
    }

    fn own_keyrings(&self) -> ProcessKeyrings {
        self.state.keys.of_process(self.state.processes.current_id())
    }

    /// The keyrings that searches begin with, in their order.
    fn searched_keyrings(&mut self) -> Result<Vec<i32>, Errno> {
        let thread = self.state.current().threads.current_id();
        let own = self.own_keyrings();
        let session = match own.session {
            Some(session) => session,
            None => {
                let user = self.key_owner()[0];
                self.change().keys.of_user(user)?[1]
            }
        };
        let thread = self.state.keys.of_thread(thread);
        Ok([thread, own.process, Some(session)].into_iter().flatten().collect())
    }

    /// Keys of each of the current process's keyrings, nearest first.
    fn possessed_keys(
        &mut self,
        meant: impl Fn(i32, &Key) -> bool,
    ) -> Result<Vec<Vec<i32>>, Errno> {
        let ids = self.state.ids();
        let roots = self.searched_keyrings()?;
        let keys = &self.state.keys;
        let enters = |key: &Key| allows(key, true, &ids, SEARCH) && !key.revoked && !key.invalid;
        let mut all = Vec::new();
        for root in roots {
            let Some(key) = keys.get(root) else { continue };
            let mut found = Vec::new();
            if meant(root, key) {
                found.push(root);
            }
            if enters(key) {
                found.extend(keys.find_all(root, &meant, enters));
            }
            all.push(found);
        }
        Ok(all)
    }

    /// The numbers of all keys that the current process possesses.
    pub(in crate::sentry) fn possessed_numbers(&mut self) -> BTreeSet<i32> {
        let ids = self.state.ids();
        let found = self.possessed_keys(|_, key| allows(key, true, &ids, SEARCH) && !key.invalid);
        found.unwrap_or_default().into_iter().flatten().collect()
    }

    /// The keyring of the thread, or a new one.
    pub(in crate::sentry) fn thread_keyring(&mut self) -> Result<i32, Errno> {
        let thread = self.state.current().threads.current_id();
        if let Some(id) = self.state.keys.of_thread(thread) {
            return Ok(id);
        }
        let owner = self.key_owner();
        let keys = &mut self.change().keys;
        let id = keys.add_keyring(b"_tid", owner, OF_PROCESS)?;
        keys.set_of_thread(thread, id);
        Ok(id)
    }

    /// The keyring of the process, or a new one.
    pub(in crate::sentry) fn process_keyring(&mut self) -> Result<i32, Errno> {
        let own = self.own_keyrings();
        if let Some(id) = own.process {
            return Ok(id);
        }
        let (owner, process) = (self.key_owner(), self.state.processes.current_id());
        let keys = &mut self.change().keys;
        let id = keys.add_keyring(b"_pid", owner, OF_PROCESS)?;
        keys.set_of_process(process, ProcessKeyrings { process: Some(id), ..own });
        Ok(id)
    }

    /// A new session keyring without a name.
    pub(in crate::sentry) fn new_session_keyring(&mut self) -> Result<i32, Errno> {
        let own = self.own_keyrings();
        let (owner, process) = (self.key_owner(), self.state.processes.current_id());
        let keys = &mut self.change().keys;
        let id = keys.add_keyring(b"_ses", owner, OF_SESSION)?;
        keys.set_of_process(process, ProcessKeyrings { session: Some(id), ..own });
        Ok(id)
    }

    /// The session keyring. A process without one gets a new one if it `creates`, and else that of
    /// its user.
    fn session_keyring(&mut self, creates: bool) -> Result<i32, Errno> {
        let own = self.own_keyrings();
        let is_users = |id| self.state.keys.get(id).is_some_and(|key: &Key| key.is_users);
        match own.session {
            Some(id) if !(creates && is_users(id)) => Ok(id),
            _ if creates => self.new_session_keyring(),
            _ => {
                let (user, process) = (self.key_owner()[0], self.state.processes.current_id());
                let keys = &mut self.change().keys;
                let [_, id] = keys.of_user(user)?;
                keys.set_of_process(process, ProcessKeyrings { session: Some(id), ..own });
                Ok(id)
            }
        }
    }

    /// The key that a number names, whatever its state is.
    pub(in crate::sentry) fn named_key(
        &mut self,
        number: u64,
        creates: bool,
    ) -> Result<FoundKey, Errno> {
        let number = number as i32;
        let thread = self.state.current().threads.current_id();
        let id = match number {
            OF_THREAD if creates => self.thread_keyring()?,
            OF_THREAD => self.state.keys.of_thread(thread).ok_or(Errno::NOKEY)?,
            OF_OWN_PROCESS if creates => self.process_keyring()?,
            OF_OWN_PROCESS => self.own_keyrings().process.ok_or(Errno::NOKEY)?,
            OF_OWN_SESSION => self.session_keyring(creates)?,
            OF_OWN_USER | OF_USER_SESSIONS => {
                let user = self.key_owner()[0];
                let own = self.change().keys.of_user(user)?;
                own[usize::from(number == OF_USER_SESSIONS)]
            }
            OF_GROUP => return Err(Errno::INVAL),
            LAST_SPECIAL..OF_GROUP => return Err(Errno::NOKEY),
            ..=0 => return Err(Errno::INVAL),
            id => {
                let key = self.state.keys.get(id).filter(|key| !key.invalid);
                key.ok_or(Errno::NOKEY)?;
                let ids = self.state.ids();
                let found = self
                    .possessed_keys(|other, key| other == id && allows(key, true, &ids, SEARCH))?;
                return Ok(FoundKey { id, possessed: found.iter().any(|keys| !keys.is_empty()) });
            }
        };
        Ok(FoundKey { id, possessed: true })
    }

    /// Refuses a key without the permissions that are `needed`.
    pub(in crate::sentry) fn check_key(&self, found: FoundKey, needed: u32) -> Result<(), Errno> {
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        let allowed = allows(key, found.possessed, &self.state.ids(), needed);
        if allowed { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// The key that a number names, if it can be used and the caller has the permissions that are
    /// `needed`.
    pub(in crate::sentry) fn usable_key(
        &mut self,
        number: u64,
        creates: bool,
        needed: u32,
    ) -> Result<FoundKey, Errno> {
        let found = self.named_key(number, creates)?;
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        key.positive()?;
        key.validate(self.now())?;
        self.check_key(found, needed)?;
        Ok(found)
    }

    /// The first of `found` that the caller may use, if any.
    pub(in crate::sentry) fn first_usable(
        &self,
        found: Vec<i32>,
        possessed: bool,
    ) -> Result<Option<i32>, Errno> {
        let mut error = None;
        for id in found {
            let Some(key) = self.state.keys.get(id) else { continue };
            let usable = match key.validate(self.now()) {
                // As in Linux, one that is invalid counts as revoked.
                Err(Errno::NOKEY) => Err(Errno::KEYREVOKED),
                valid => valid.and_then(|()| key.positive()),
            };
            match usable.and_then(|()| self.check_key(FoundKey { id, possessed }, SEARCH)) {
                Ok(()) => return Ok(Some(id)),
                Err(errno) => error = error.or(Some(errno)),
            }
        }
        error.map_or(Ok(None), Err)
    }

    /// The key that a request finds. As in Linux, a keyring without such a key hides the errors of
    /// keys in others, except that of a negative key.
    fn first_requested(&self, keyrings: Vec<Vec<i32>>) -> Result<Option<i32>, Errno> {
        let (mut error, mut misses, mut negative) = (None, false, false);
        for found in keyrings {
            match self.first_usable(found, true) {
                Ok(Some(id)) => return Ok(Some(id)),
                Err(Errno::NOKEY) => negative = true,
                Ok(None) => misses = true,
                Err(errno) => error = Some(errno),
            }
        }
        let error = if negative { Some(Errno::NOKEY) } else { error.filter(|_| !misses) };
        error.map_or(Ok(None), Err)
    }

    /// Keys within a keyring, nearest first.
    pub(in crate::sentry) fn keys_within(
        &self,
        keyring: FoundKey,
        kind: KeyKind,
        description: &[u8],
    ) -> Vec<i32> {
        let ids = self.state.ids();
        let enters = |key: &Key| allows(key, keyring.possessed, &ids, SEARCH) && !key.revoked;
        let meant = |_, key: &Key| key.kind == kind && key.description == description;
        self.state.keys.find_all(keyring.id, meant, enters)
    }

    /// `add_key(2)`: the types are `user`, `logon`, `big_key` and `keyring`.
    pub(in crate::sentry) fn sys_add_key(
        &mut self,
        process: &Process,
        &[kind, description, payload, len, keyring, _]: &[u64; 6],
    ) -> SyscallResult {
        if len > MAX_PAYLOAD as u64 {
            return Err(Errno::INVAL.into());
        }
        let kind = type_in(process, kind)?;
        let description = match description {
            0 => Vec::new(),
            at => text_in(process, at, MAX_DESCRIPTION)?,
        };
        if description.first() == Some(&b'.') && kind == b"keyring" {
            return Err(Errno::PERM.into());
        }
        let payload = copy_in(process, payload, len as usize)?;
        let ring = self.usable_key(keyring, true, WRITE)?;
        let kind = KeyKind::of(&kind).ok_or(Errno::NODEV)?;
        self.state.keys.get(ring.id).ok_or(Errno::NOKEY)?.links()?;
        kind.check(&description, &payload)?;
        let contents = match kind {
            KeyKind::Keyring => KeyContents::Links(Vec::new()),
            _ => KeyContents::Bytes(payload.into()),
        };
        let known = match kind {
            KeyKind::Keyring => None,
            _ => self.state.keys.linked(ring.id, kind, &description)?,
        };
        if let Some(id) = known {
            self.check_key(FoundKey { id, possessed: ring.possessed }, WRITE)?;
            self.change().keys.update(id, contents)?;
            return Ok(SyscallControl::Value(id as u64));
        }
        let owner = self.key_owner();
        let id = self.change().keys.add_linked(ring.id, kind, description, owner, contents)?;
        Ok(SyscallControl::Value(id as u64))
    }

    /// `request_key(2)`: nothing answers requests. One with information for a program is `ENOKEY`,
    /// and so are further ones within a minute.
    pub(in crate::sentry) fn sys_request_key(
        &mut self,
        process: &Process,
        kind: u64,
        description: u64,
        information: u64,
        keyring: u64,
    ) -> SyscallResult {
        let kind = type_in(process, kind)?;
        let description = text_in(process, description, MAX_DESCRIPTION)?;
        if information != 0 {
            text_in(process, information, PAGE as usize)?;
        }
        let target = match keyring as i32 {
            0 => None,
            _ => Some(self.usable_key(keyring, true, WRITE)?),
        };
        let kind = KeyKind::of(&kind).ok_or(Errno::NOKEY)?;
        let found =
            self.possessed_keys(|_, key| key.kind == kind && key.description == description)?;
        if let Some(id) = self.first_requested(found)? {
            if let Some(target) = target {
                self.check_key(FoundKey { id, possessed: true }, LINK)?;
                self.change().keys.link(target.id, id)?;
            }
            return Ok(SyscallControl::Value(id as u64));
        }
        if information == 0 {
            return Err(Errno::NOKEY.into());
        }
        if kind == KeyKind::Keyring {
            return Err(Errno::PERM.into());
        }
        let target = match target {
            Some(target) => target,
            None => self.default_keyring()?,
        };
        let until = self.now().saturating_add(NEGATIVE_TIME);
        let owner = self.key_owner();
        let keys = &mut self.change().keys;
        let contents = KeyContents::Negative(libc::ENOKEY);
        let id = keys.add_linked(target.id, kind, description, owner, contents)?;
        if let Some(key) = keys.get_mut(id) {
            key.expires = Some(until);
        }
        Err(Errno::NOKEY.into())
    }

    /// The keyring for requested keys, which the caller may write.
    fn default_keyring(&mut self) -> Result<FoundKey, Errno> {
        let thread = self.state.current().threads.current_id();
        let own = self.own_keyrings();
        let thread = self.state.keys.of_thread(thread);
        let user = self.key_owner()[0];
        let [users, sessions] = self.change().keys.of_user(user)?;
        let session = own.session.unwrap_or(sessions);
        let id = match own.requests {
            0 | 1 => thread.or(own.process).unwrap_or(session),
            2 => own.process.unwrap_or(session),
            4 => users,
            5 => sessions,
            _ => session,
        };
        let found = FoundKey { id, possessed: true };
        self.check_key(found, WRITE)?;
        Ok(found)
    }
}
