//! `/proc/keys` and `/proc/key-users`.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::sentry::Sentry;
use crate::sentry::kernel::keys::{Key, KeyContents, KeyKind, MAX_USER_BYTES, MAX_USER_KEYS, VIEW};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::syscalls::key::FoundKey;

const SECOND: u64 = 1_000_000_000;

/// The time that a key has left, as `/proc/keys` shows it.
fn time_left(key: &Key, now: MonotonicTime) -> String {
    let Some(until) = key.expires else { return "perm".to_owned() };
    match until.saturating_sub(now).div_ceil(SECOND) {
        0 => "expd".to_owned(),
        seconds @ ..60 => format!("{seconds}s"),
        seconds @ ..3600 => format!("{}m", seconds / 60),
        seconds @ ..86400 => format!("{}h", seconds / 3600),
        seconds @ ..604_800 => format!("{}d", seconds / 86400),
        seconds => format!("{}w", seconds / 604_800),
    }
}

/// The state of a key behind its description.
fn summary(key: &Key) -> String {
    match &key.contents {
        KeyContents::Links(links) if links.is_empty() => "empty".to_owned(),
        KeyContents::Links(links) => links.len().to_string(),
        KeyContents::Bytes(bytes) if key.kind == KeyKind::Big => format!("{} [buff]", bytes.len()),
        KeyContents::Bytes(bytes) => bytes.len().to_string(),
        KeyContents::Negative(_) => "neg".to_owned(),
    }
}

impl Sentry {
    /// `/proc/keys`: the keys that the current process may view.
    pub(in crate::sentry) fn keys_text(&mut self) -> String {
        let (mut text, now) = (String::new(), self.now());
        let all: Vec<i32> = self.state.keys.iter().map(|(id, _)| id).collect();
        if all.is_empty() {
            return text;
        }
        // One search for all: each keyring may link all keys.
        let possessed = self.possessed_numbers();
        for id in all {
            let found = FoundKey { id, possessed: possessed.contains(&id) };
            if self.check_key(found, VIEW).is_err() {
                continue;
            }
            let Some(key) = self.state.keys.get(id) else { continue };
            let [user, group] = self.state.seen_owner(Some([key.user, key.group]));
            let flag = |set: bool, letter: char| if set { letter } else { '-' };
            let negative = matches!(key.contents, KeyContents::Negative(_));
            let flags: String = [
                flag(true, 'I'),
                flag(key.revoked, 'R'),
                '-',
                flag(!key.is_users, 'Q'),
                '-',
                flag(negative, 'N'),
                flag(key.invalid, 'i'),
            ]
            .iter()
            .collect();
            let description = String::from_utf8_lossy(&key.description);
            let (left, kind) = (time_left(key, now), key.kind.name());
            let _ = writeln!(
                text,
                "{id:08x} {flags} {:5} {left:>4} {:08x} {user:5} {group:5} {kind:9.9} {description}: {}",
                1,
                key.permissions,
                summary(key)
            );
        }
        text
    }
}

impl Kernel {
    /// `/proc/key-users`: the keys of each user, and how many it may have.
    pub(in crate::sentry) fn key_users(&self) -> String {
        let users: BTreeSet<u32> = self.keys.iter().map(|(_, key)| key.user).collect();
        let line = |user: u32| {
            let [count, bytes] = self.keys.used_by(user);
            let [shown, _] = self.seen_owner(Some([user, 0]));
            format!(
                "{shown:5}: {count:5} {count}/{count} {count}/{MAX_USER_KEYS} {bytes}/{MAX_USER_BYTES}\n"
            )
        };
        users.into_iter().map(line).collect()
    }
}
