//! `keyctl(2)`: one function an operation.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::keys::{
    Key, KeyContents, KeyKind, LINK, MAX_DESCRIPTION, OF_NAMED_SESSION, PERMISSIONS,
    ProcessKeyrings, READ, SEARCH, SET_ATTRIBUTES, VIEW, WRITE,
};
use crate::sentry::kernel::users::FOR_FILES;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::key::{FoundKey, text_in, type_in};

/// Capabilities of keyrings here (`KEYCTL_CAPABILITIES`): big keys, invalidation and moves.
const CAPABILITIES: [u8; 2] = [0x10 | 0x20 | 0x80, 0];
/// The last setting of the default keyring for requests, and the one that is refused.
const LAST_SETTING: i32 = 7;
const GROUP_SETTING: i32 = 6;
const NANOS: u64 = 1_000_000_000;

/// Copies as much of `bytes` as there is room for, and returns the length of all.
fn copy_part(process: &mut Process, to: u64, room: u64, bytes: &[u8]) -> SyscallResult {
    let len = bytes.len().min(room as usize);
    if to != 0 && len > 0 {
        copy_out(process, to, &bytes[..len])?;
    }
    Ok(SyscallControl::Value(bytes.len() as u64))
}

impl Sentry {
    /// `keyctl(2)`: operations for programs that answer requests are `EPERM`, and those of
    /// asymmetric keys, persistent keyrings, restrictions and watches `EOPNOTSUPP`.
    pub(in crate::sentry) fn sys_keyctl(
        &mut self,
        process: &mut Process,
        &[operation, a, b, c, d, _]: &[u64; 6],
    ) -> SyscallResult {
        match operation as i32 {
            0 => {
                let found = self.usable_key(a, b as i32 != 0, SEARCH)?;
                Ok(SyscallControl::Value(found.id as u64))
            }
            1 => self.join_session_keyring(process, a),
            2 => self.update_key(process, a, b, c),
            3 => {
                let found = self.usable_key(a, false, 0)?;
                let writes = self.check_key(found, WRITE);
                writes.or_else(|_| self.check_key(found, SET_ATTRIBUTES))?;
                self.edit_key(found.id, |key| key.revoked = true);
                self.forget_links(found.id);
                Ok(ZERO)
            }
            4 => self.chown_key(a, b as u32, c as u32),
            5 => self.set_key_permissions(a, b),
            6 => self.describe_key(process, a, b, c),
            7 => {
                let found = self.usable_key(a, true, WRITE)?;
                self.change().keys.clear(found.id)?;
                Ok(ZERO)
            }
            8 => {
                let ring = self.usable_key(b, true, WRITE)?;
                let found = self.usable_key(a, true, LINK)?;
                self.change().keys.link(ring.id, found.id)?;
                Ok(ZERO)
            }
            9 => {
                let ring = self.usable_key(b, false, WRITE)?;
                let found = self.named_key(a, false)?;
                self.change().keys.unlink(ring.id, found.id)?;
                Ok(ZERO)
            }
            10 => self.search_keyring(process, a, b, c, d),
            11 => self.read_key(process, a, b, c),
            // There is no authority over a request.
            12 | 13 | 19 | 20 => Err(Errno::PERM.into()),
            14 => self.set_request_keyring(a as i32),
            15 => {
                let found = self.named_key(a, true)?;
                self.check_key(found, SET_ATTRIBUTES)?;
                let seconds = u64::from(b as u32);
                let until = self.now().saturating_add(seconds * NANOS);
                self.edit_key(found.id, |key| key.expires = (seconds > 0).then_some(until));
                Ok(ZERO)
            }
            16 if a as i32 == 0 => Ok(ZERO),
            16 if (a as i32) < 0 => Err(Errno::INVAL.into()),
            16 => Err(Errno::NOKEY.into()),
            17 => {
                let found = self.named_key(a, false)?;
                self.check_key(found, VIEW)?;
                copy_part(process, b, c, &[0])
            }
            18 => Err(Errno::PERM.into()),
            21 => {
                let found = self.usable_key(a, false, SEARCH)?;
                self.change().keys.invalidate(found.id);
                Ok(ZERO)
            }
            30 => self.move_key(a, (b, c), d),
            31 => copy_part(process, a, b, &CAPABILITIES),
            _ => Err(Errno::OPNOTSUPP.into()),
        }
    }

    fn edit_key(&mut self, id: i32, edit: impl FnOnce(&mut Key)) {
        if let Some(key) = self.change().keys.get_mut(id) {
            edit(key);
        }
    }

    /// A keyring that is revoked links nothing any more.
    fn forget_links(&mut self, id: i32) {
        // Any other key has none.
        let _ = self.change().keys.clear(id);
    }

    fn join_session_keyring(&mut self, process: &Process, name: u64) -> SyscallResult {
        if name == 0 {
            return Ok(SyscallControl::Value(self.new_session_keyring()? as u64));
        }
        let name = text_in(process, name, MAX_DESCRIPTION)?;
        if name.first() == Some(&b'.') {
            return Err(Errno::PERM.into());
        }
        let own = self.state.processes.current_id();
        let now = self.now();
        let mut named = self.state.keys.iter().filter(|(_, key)| {
            key.kind == KeyKind::Keyring && key.description == name && key.validate(now).is_ok()
        });
        let may_join = |id: i32| self.check_key(FoundKey { id, possessed: false }, SEARCH).is_ok();
        let found = named.find_map(|(id, _)| may_join(id).then_some(id));
        drop(named);
        let owner = self.key_owner();
        let keys = &mut self.change().keys;
        let id = match found {
            Some(id) => id,
            None if name.is_empty() => return Err(Errno::INVAL.into()),
            None => keys.add_keyring(&name, owner, OF_NAMED_SESSION)?,
        };
        let rings = keys.of_process(own);
        keys.set_of_process(own, ProcessKeyrings { session: Some(id), ..rings });
        Ok(SyscallControl::Value(id as u64))
    }

    fn update_key(&mut self, process: &Process, key: u64, from: u64, len: u64) -> SyscallResult {
        if len > PAGE {
            return Err(Errno::INVAL.into());
        }
        let payload = copy_in(process, from, len as usize)?;
        let found = self.named_key(key, false)?;
        self.check_key(found, WRITE)?;
        let now = self.now();
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        key.validate(now)?;
        if key.kind == KeyKind::Keyring {
            return Err(Errno::OPNOTSUPP.into());
        }
        key.kind.check(&key.description, &payload)?;
        self.change().keys.update(found.id, KeyContents::Bytes(payload.into()))?;
        Ok(ZERO)
    }

    /// A process without capabilities gives its keys only groups that it is in.
    fn chown_key(&mut self, key: u64, user: u32, group: u32) -> SyscallResult {
        let found = self.named_key(key, true)?;
        self.check_key(found, SET_ATTRIBUTES)?;
        let ids = self.state.ids();
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        let keeps = user == u32::MAX || user == key.user;
        let joins = group == u32::MAX || group == key.group || ids.is_in_group(group);
        if !keeps || !joins {
            return Err(Errno::ACCESS.into());
        }
        if group != u32::MAX {
            self.edit_key(found.id, |key| key.group = group);
        }
        Ok(ZERO)
    }

    fn set_key_permissions(&mut self, key: u64, permissions: u64) -> SyscallResult {
        let permissions = permissions as u32;
        if permissions & !PERMISSIONS != 0 {
            return Err(Errno::INVAL.into());
        }
        let found = self.named_key(key, true)?;
        self.check_key(found, SET_ATTRIBUTES)?;
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        if key.user != self.state.ids().user[FOR_FILES] {
            return Err(Errno::ACCESS.into());
        }
        self.edit_key(found.id, |key| key.permissions = permissions);
        Ok(ZERO)
    }

    fn describe_key(
        &mut self,
        process: &mut Process,
        key: u64,
        to: u64,
        room: u64,
    ) -> SyscallResult {
        let found = self.named_key(key, false)?;
        self.check_key(found, VIEW)?;
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        let [user, group] = self.state.seen_owner(Some([key.user, key.group]));
        let (kind, permissions) = (key.kind.name(), key.permissions);
        let mut bytes = format!("{kind};{user};{group};{permissions:08x};").into_bytes();
        bytes.extend(&key.description);
        bytes.push(0);
        copy_part(process, to, room, &bytes)
    }

    fn search_keyring(
        &mut self,
        process: &Process,
        keyring: u64,
        kind: u64,
        description: u64,
        target: u64,
    ) -> SyscallResult {
        let kind = type_in(process, kind)?;
        let description = text_in(process, description, MAX_DESCRIPTION)?;
        let ring = self.usable_key(keyring, false, SEARCH)?;
        let target = match target as i32 {
            0 => None,
            _ => Some(self.usable_key(target, true, WRITE)?),
        };
        let kind = KeyKind::of(&kind).ok_or(Errno::NOKEY)?;
        self.state.keys.get(ring.id).ok_or(Errno::NOKEY)?.links()?;
        let found = self.keys_within(ring, kind, &description);
        let id = self.first_usable(found, ring.possessed)?.ok_or(Errno::NOKEY)?;
        if let Some(target) = target {
            self.check_key(FoundKey { id, possessed: ring.possessed }, LINK)?;
            self.change().keys.link(target.id, id)?;
        }
        Ok(SyscallControl::Value(id as u64))
    }

    fn read_key(&mut self, process: &mut Process, key: u64, to: u64, room: u64) -> SyscallResult {
        let found = self.named_key(key, false)?;
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        key.positive()?;
        let read = self.check_key(found, READ);
        // A possessor reads what it may search.
        if read.is_err() && !(found.possessed && self.check_key(found, SEARCH).is_ok()) {
            return Err(Errno::ACCESS.into());
        }
        if key.kind == KeyKind::Logon {
            return Err(Errno::OPNOTSUPP.into());
        }
        key.validate(self.now())?;
        let bytes = match &key.contents {
            KeyContents::Bytes(bytes) => bytes.to_vec(),
            KeyContents::Links(links) => links.iter().flat_map(|link| link.to_ne_bytes()).collect(),
            KeyContents::Negative(_) => Vec::new(),
        };
        copy_part(process, to, room, &bytes)
    }

    fn set_request_keyring(&mut self, setting: i32) -> SyscallResult {
        let own = self.state.processes.current_id();
        let old = self.state.keys.of_process(own).requests;
        match setting {
            -1 => return Ok(SyscallControl::Value(old.into())),
            1 => drop(self.thread_keyring()?),
            2 => drop(self.process_keyring()?),
            GROUP_SETTING => return Err(Errno::INVAL.into()),
            0..=LAST_SETTING => {}
            _ => return Err(Errno::INVAL.into()),
        }
        let keys = &mut self.change().keys;
        let rings = keys.of_process(own);
        keys.set_of_process(own, ProcessKeyrings { requests: setting as u8, ..rings });
        Ok(SyscallControl::Value(old.into()))
    }

    fn move_key(&mut self, key: u64, (from, to): (u64, u64), flags: u64) -> SyscallResult {
        if flags & !1 != 0 {
            return Err(Errno::INVAL.into());
        }
        let found = self.usable_key(key, true, LINK)?;
        let from = self.usable_key(from, false, WRITE)?;
        let to = self.usable_key(to, true, WRITE)?;
        let key = self.state.keys.get(found.id).ok_or(Errno::NOKEY)?;
        let (kind, description) = (key.kind, key.description.clone());
        let links = self.state.keys.get(from.id).ok_or(Errno::NOKEY)?.links()?;
        if !links.contains(&found.id) {
            return Err(Errno::NOENT.into());
        }
        if from.id == to.id {
            return Ok(ZERO);
        }
        let known = self.state.keys.linked(to.id, kind, &description)?;
        if flags == 1 && known.is_some() {
            return Err(Errno::EXIST.into());
        }
        let keys = &mut self.change().keys;
        keys.link(to.id, found.id)?;
        keys.unlink(from.id, found.id)?;
        Ok(ZERO)
    }
}
