//! Keys of the kernel (`keyrings(7)`): plain data. Keyrings link keys; processes, threads and users
//! hold keyrings.
//!
//! A key exists while a keyring links it, or a process, thread or user holds it. Nothing answers
//! requests for keys (`/sbin/request-key`): a requested key that is not found is *negative*, which
//! keeps further requests for a minute.
//!
//! Promises: a user has at most [`MAX_USER_KEYS`] keys of [`MAX_USER_BYTES`] bytes, and all users
//! together [`MAX_KEYS`] of [`MAX_BYTES`]. No keyring links itself through others. May break it: a
//! link that is made without [`Keys::link`].

mod links;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::kernel::users::UNMAPPED;

/// Maximum keys and bytes of a user, as in Linux.
pub(in crate::sentry) const MAX_USER_KEYS: usize = 200;
pub(in crate::sentry) const MAX_USER_BYTES: usize = 20_000;
/// Maximum keys, bytes, and users of a guest.
const MAX_KEYS: usize = 1000;
const MAX_BYTES: usize = 4 << 20;
const MAX_USERS: usize = 64;
/// Bytes of a link, and of a big key, that count for a user.
const LINK_BYTES: usize = 4;
const BIG_KEY_BYTES: usize = 16;
/// Maximum bytes of a description, with its end.
pub(in crate::sentry) const MAX_DESCRIPTION: usize = 4096;
/// Maximum bytes of a payload.
pub(in crate::sentry) const MAX_PAYLOAD: usize = (1 << 20) - 1;
const MAX_USER_PAYLOAD: usize = 32767;
/// The number of the first key.
const FIRST_KEY: i32 = 0x1000_0000;

// Permissions of a possessor; those of the user, the group and others are in lower bytes.
pub(in crate::sentry) const VIEW: u32 = 1;
pub(in crate::sentry) const READ: u32 = 2;
pub(in crate::sentry) const WRITE: u32 = 4;
pub(in crate::sentry) const SEARCH: u32 = 8;
pub(in crate::sentry) const LINK: u32 = 0x10;
pub(in crate::sentry) const SET_ATTRIBUTES: u32 = 0x20;
const ALL: u32 = 0x3f;
/// All bits of permissions.
pub(in crate::sentry) const PERMISSIONS: u32 = 0x3f3f_3f3f;
/// Those of keyrings: of a process or thread, of a session, of one with a name, and of a user.
pub(in crate::sentry) const OF_PROCESS: u32 = ALL << 24 | VIEW << 16;
pub(in crate::sentry) const OF_SESSION: u32 = ALL << 24 | (VIEW | READ) << 16;
pub(in crate::sentry) const OF_NAMED_SESSION: u32 = ALL << 24 | (VIEW | READ | LINK) << 16;
const OF_USER: u32 = (ALL & !SET_ATTRIBUTES) << 24 | ALL << 16;

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) enum KeyKind {
    Keyring,
    User,
    /// As [`Self::User`], but no process reads it.
    Logon,
    Big,
}

impl KeyKind {
    pub(in crate::sentry) fn of(name: &[u8]) -> Option<Self> {
        [Self::Keyring, Self::User, Self::Logon, Self::Big]
            .into_iter()
            .find(|kind| kind.name().as_bytes() == name)
    }

    pub(in crate::sentry) fn name(self) -> &'static str {
        match self {
            Self::Keyring => "keyring",
            Self::User => "user",
            Self::Logon => "logon",
            Self::Big => "big_key",
        }
    }

    /// The permissions of a new key.
    fn permissions(self) -> u32 {
        let read = if self == Self::Logon { 0 } else { READ };
        (VIEW | SEARCH | LINK | SET_ATTRIBUTES | WRITE | read) << 24 | VIEW << 16
    }

    /// Refuses a payload or a description that a key cannot have.
    pub(in crate::sentry) fn check(self, description: &[u8], payload: &[u8]) -> Result<(), Errno> {
        let colon = description.iter().position(|byte| *byte == b':');
        let fits = match self {
            Self::Keyring => payload.is_empty(),
            Self::User => (1..=MAX_USER_PAYLOAD).contains(&payload.len()),
            Self::Logon => {
                colon.is_some_and(|at| at > 0) && (1..=MAX_USER_PAYLOAD).contains(&payload.len())
            }
            Self::Big => (1..=MAX_PAYLOAD).contains(&payload.len()),
        };
        if fits && !description.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
    }
}

/// The contents of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) enum KeyContents {
    Bytes(#[serde(with = "crate::packed_bytes")] Arc<[u8]>),
    /// The keys of a keyring, in the order of their links.
    Links(Vec<i32>),
    /// It has none, and requests for it have this error.
    Negative(i32),
}

/// A key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct Key {
    pub(in crate::sentry) kind: KeyKind,
    #[serde(with = "crate::packed_bytes")]
    pub(in crate::sentry) description: Vec<u8>,
    pub(in crate::sentry) user: u32,
    pub(in crate::sentry) group: u32,
    pub(in crate::sentry) permissions: u32,
    pub(in crate::sentry) contents: KeyContents,
    pub(in crate::sentry) expires: Option<MonotonicTime>,
    pub(in crate::sentry) revoked: bool,
    pub(in crate::sentry) invalid: bool,
    /// Whether it is a user's own keyring.
    pub(in crate::sentry) is_users: bool,
}

impl Key {
    /// Bytes that count for its user, and bytes of memory.
    fn bytes(&self) -> [usize; 2] {
        let own = self.description.len() + 1;
        let (counted, stored) = match &self.contents {
            KeyContents::Bytes(bytes) if self.kind == KeyKind::Big => (BIG_KEY_BYTES, bytes.len()),
            KeyContents::Bytes(bytes) => (bytes.len(), bytes.len()),
            KeyContents::Links(links) => (links.len() * LINK_BYTES, links.len() * LINK_BYTES),
            KeyContents::Negative(_) => (0, 0),
        };
        [own + counted, own + stored]
    }

    /// Refuses a key that is not to be used any more.
    pub(in crate::sentry) fn validate(&self, now: MonotonicTime) -> Result<(), Errno> {
        if self.invalid {
            return Err(Errno::NOKEY);
        }
        if self.revoked {
            return Err(Errno::KEYREVOKED);
        }
        if self.expires.is_some_and(|at| at <= now) {
            return Err(Errno::KEYEXPIRED);
        }
        Ok(())
    }

    /// The error of a negative key.
    pub(in crate::sentry) fn positive(&self) -> Result<(), Errno> {
        match self.contents {
            KeyContents::Negative(error) => Err(Errno::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }

    pub(in crate::sentry) fn links(&self) -> Result<&[i32], Errno> {
        match &self.contents {
            KeyContents::Links(links) => Ok(links),
            _ => Err(Errno::NOTDIR),
        }
    }
}

/// The keyrings of a process, and where keys go that it requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct ProcessKeyrings {
    pub(in crate::sentry) process: Option<i32>,
    pub(in crate::sentry) session: Option<i32>,
    /// The default keyring of requests (`KEYCTL_SET_REQKEY_KEYRING`).
    pub(in crate::sentry) requests: u8,
}

/// All keys of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Keys {
    list: BTreeMap<i32, Key>,
    next: i32,
    processes: BTreeMap<u32, ProcessKeyrings>,
    threads: BTreeMap<u32, i32>,
    /// The keyring and the session keyring of each user.
    users: BTreeMap<u32, [i32; 2]>,
}

impl Default for Keys {
    fn default() -> Self {
        let (list, processes) = (BTreeMap::new(), BTreeMap::new());
        let (threads, users) = (BTreeMap::new(), BTreeMap::new());
        Self { list, next: FIRST_KEY, processes, threads, users }
    }
}

impl Keys {
    pub(in crate::sentry) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(in crate::sentry) fn get(&self, id: i32) -> Option<&Key> {
        self.list.get(&id)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: i32) -> Option<&mut Key> {
        self.list.get_mut(&id)
    }

    pub(in crate::sentry) fn iter(&self) -> impl Iterator<Item = (i32, &Key)> + '_ {
        self.list.iter().map(|(id, key)| (*id, key))
    }

    pub(in crate::sentry) fn of_process(&self, process: u32) -> ProcessKeyrings {
        self.processes.get(&process).copied().unwrap_or_default()
    }

    pub(in crate::sentry) fn set_of_process(&mut self, process: u32, keyrings: ProcessKeyrings) {
        self.processes.insert(process, keyrings);
        self.drop_unused();
    }

    pub(in crate::sentry) fn of_thread(&self, thread: u32) -> Option<i32> {
        self.threads.get(&thread).copied()
    }

    pub(in crate::sentry) fn set_of_thread(&mut self, thread: u32, keyring: i32) {
        self.threads.insert(thread, keyring);
    }

    /// The number of keys of a user, and their bytes.
    pub(in crate::sentry) fn used_by(&self, user: u32) -> [usize; 2] {
        let own = self.list.values().filter(|key| key.user == user);
        own.fold([0, 0], |[count, bytes], key| [count + 1, bytes + key.bytes()[0]])
    }

    /// Refuses more bytes of a key than its user may have.
    fn afford(&self, user: u32, keys: usize, counted: usize, stored: usize) -> Result<(), Errno> {
        let [count, bytes] = self.used_by(user);
        let all: usize = self.list.values().map(|key| key.bytes()[1]).sum();
        let fits = count + keys <= MAX_USER_KEYS
            && bytes + counted <= MAX_USER_BYTES
            && self.list.len() + keys <= MAX_KEYS
            && all + stored <= MAX_BYTES;
        if fits { Ok(()) } else { Err(Errno::DQUOT) }
    }

    /// Adds a key that a keyring links.
    pub(in crate::sentry) fn add_linked(
        &mut self,
        keyring: i32,
        kind: KeyKind,
        description: Vec<u8>,
        owner: [u32; 2],
        contents: KeyContents,
    ) -> Result<i32, Errno> {
        let id = self.add(kind, description, owner, contents)?;
        let linked = self.link(keyring, id);
        if linked.is_err() {
            self.drop_unused();
        }
        linked.map(|()| id)
    }

    /// Adds a key that nothing links yet. The caller links it, or calls [`Keys::drop_unused`].
    fn add(
        &mut self,
        kind: KeyKind,
        description: Vec<u8>,
        [user, group]: [u32; 2],
        contents: KeyContents,
    ) -> Result<i32, Errno> {
        let key = Key {
            kind,
            description,
            user,
            group,
            permissions: kind.permissions(),
            contents,
            expires: None,
            revoked: false,
            invalid: false,
            is_users: false,
        };
        let [counted, stored] = key.bytes();
        self.afford(user, 1, counted, stored)?;
        let id = self.next;
        self.next = self.next.checked_add(1).ok_or(Errno::DQUOT)?;
        self.list.insert(id, key);
        Ok(id)
    }

    /// A new keyring.
    pub(in crate::sentry) fn add_keyring(
        &mut self,
        description: &[u8],
        owner: [u32; 2],
        permissions: u32,
    ) -> Result<i32, Errno> {
        let links = KeyContents::Links(Vec::new());
        let id = self.add(KeyKind::Keyring, description.to_vec(), owner, links)?;
        if let Some(key) = self.list.get_mut(&id) {
            key.permissions = permissions;
        }
        Ok(id)
    }

    /// Gives a key other contents.
    pub(in crate::sentry) fn update(
        &mut self,
        id: i32,
        contents: KeyContents,
    ) -> Result<(), Errno> {
        let key = self.list.get(&id).ok_or(Errno::NOKEY)?;
        let changed = Key { contents, expires: None, ..key.clone() };
        let ([old, had], [new, has]) = (key.bytes(), changed.bytes());
        self.afford(key.user, 0, new.saturating_sub(old), has.saturating_sub(had))?;
        self.list.insert(id, changed);
        Ok(())
    }

    /// The keyring of a user and the one of its sessions.
    pub(in crate::sentry) fn of_user(&mut self, user: u32) -> Result<[i32; 2], Errno> {
        if let Some(own) = self.users.get(&user) {
            return Ok(*own);
        }
        if self.users.len() >= MAX_USERS {
            return Err(Errno::DQUOT);
        }
        // They belong to no group.
        let owner = [user, UNMAPPED];
        let own = self.add_keyring(format!("_uid.{user}").as_bytes(), owner, OF_USER)?;
        let sessions = format!("_uid_ses.{user}");
        let sessions = match self.add_keyring(sessions.as_bytes(), owner, OF_USER) {
            Ok(sessions) => sessions,
            Err(errno) => {
                self.drop_unused();
                return Err(errno);
            }
        };
        for id in [own, sessions] {
            if let Some(key) = self.list.get_mut(&id) {
                key.is_users = true;
            }
        }
        self.users.insert(user, [own, sessions]);
        self.link(sessions, own)?;
        Ok([own, sessions])
    }

    /// Gives a child the session of its parent.
    pub(in crate::sentry) fn fork(&mut self, parent: u32, child: u32) {
        let own = self.of_process(parent);
        let inherited = ProcessKeyrings { process: None, ..own };
        if inherited != ProcessKeyrings::default() {
            self.processes.insert(child, inherited);
        }
    }

    /// A process runs another program, with one thread.
    pub(in crate::sentry) fn exec(&mut self, process: u32, threads: impl Iterator<Item = u32>) {
        if self.list.is_empty() {
            return;
        }
        threads.for_each(|thread| {
            self.threads.remove(&thread);
        });
        if let Some(own) = self.processes.get_mut(&process) {
            own.process = None;
        }
        self.drop_unused();
    }

    /// Drops the keyrings of threads and processes that have ended.
    pub(in crate::sentry) fn keep(
        &mut self,
        lives: impl Fn(u32) -> bool,
        is_thread: impl Fn(u32) -> bool,
    ) {
        if self.list.is_empty() && self.processes.is_empty() {
            return;
        }
        self.processes.retain(|process, _| lives(*process));
        self.threads.retain(|thread, _| is_thread(*thread));
        self.drop_unused();
    }

    /// Drops the keys that nothing links or holds.
    pub(in crate::sentry) fn drop_unused(&mut self) {
        let held = self.processes.values().flat_map(|own| [own.process, own.session]).flatten();
        let held = held.chain(self.threads.values().copied());
        let used = self.reach(held.chain(self.users.values().flatten().copied()).collect());
        self.list.retain(|id, _| used.contains(id));
    }

    /// Whether a guest could have them.
    pub(in crate::sentry) fn is_sound(
        &self,
        lives: impl Fn(u32) -> bool,
        is_thread: impl Fn(u32) -> bool,
    ) -> bool {
        let is_keyring =
            |id: i32| self.list.get(&id).is_some_and(|key| key.kind == KeyKind::Keyring);
        let keys = self.list.iter().all(|(id, key)| {
            let fits = match &key.contents {
                KeyContents::Links(links) => {
                    key.kind == KeyKind::Keyring
                        && links.iter().all(|link| self.list.contains_key(link))
                        && links.len() <= MAX_USER_BYTES / LINK_BYTES
                }
                KeyContents::Bytes(bytes) => key.kind.check(&key.description, bytes).is_ok(),
                KeyContents::Negative(error) => {
                    key.kind != KeyKind::Keyring && (1..4096).contains(error)
                }
            };
            (FIRST_KEY..self.next).contains(id)
                && key.permissions & !PERMISSIONS == 0
                && key.description.len() < MAX_DESCRIPTION
                && fits
        });
        let all: usize = self.list.values().map(|key| key.bytes()[1]).sum();
        let users: BTreeSet<u32> = self.list.values().map(|key| key.user).collect();
        let paid = users.into_iter().all(|user| {
            let [count, bytes] = self.used_by(user);
            count <= MAX_USER_KEYS && bytes <= MAX_USER_BYTES
        });
        let processes = self.processes.iter().all(|(process, own)| {
            lives(*process)
                && own.requests < 8
                && [own.process, own.session].into_iter().flatten().all(is_keyring)
        });
        keys && self.list.len() <= MAX_KEYS
            && all <= MAX_BYTES
            && paid
            && processes
            && self.users.len() <= MAX_USERS
            && self.threads.iter().all(|(thread, id)| is_thread(*thread) && is_keyring(*id))
            && self.users.values().flatten().all(|id| is_keyring(*id))
            && self.are_acyclic()
    }
}
