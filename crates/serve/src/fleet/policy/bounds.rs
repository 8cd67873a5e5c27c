//! Bounds of the texts that hosts learn from each other.
//!
//! Promises: a heartbeat or status is refused or cut before anything of it is remembered, so that
//! a host remembers at most [`MAX_HELD_BYTES`] and some short texts of another one.

use super::members::{Heartbeat, NodeStatus};

/// Maximum bytes of a life: the number of a host, and the number of its life.
const MAX_LIFE: usize = 64;
/// Maximum bytes of the name of a host.
pub const MAX_HOST_NAME: usize = 255;
/// Digits of the digest of a set.
const SET_DIGITS: usize = 16;
/// Maximum things that a host holds.
pub(super) const MAX_HELD: usize = 128;
/// Maximum bytes of the names of these things.
const MAX_HELD_BYTES: usize = 16 << 10;

/// Whether this can be the life of a host. It is also a part of subjects and keys.
#[must_use]
pub fn is_life(text: &str) -> bool {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=MAX_LIFE).contains(&text.len()) && text.bytes().all(sane)
}

/// Cuts a list of held things. Requests that need the rest may go to hosts without it.
pub fn bound_held(held: &mut Vec<String>) {
    let mut bytes = 0_usize;
    let fits = |held: &&String| {
        bytes = bytes.saturating_add(held.len());
        bytes <= MAX_HELD_BYTES
    };
    let count = held.iter().take(MAX_HELD).take_while(fits).count();
    held.truncate(count);
    held.shrink_to_fit();
}

/// Whether the life and the name in a heartbeat or status have lengths that hosts send.
#[must_use]
pub fn is_bounded(host: &str, name: &str) -> bool {
    is_life(host) && name.len() <= MAX_HOST_NAME
}

impl Heartbeat {
    /// The heartbeat with its list cut; `None` if no host sends such a one.
    #[must_use]
    pub fn bounded(mut self) -> Option<Self> {
        let is_set =
            self.set.len() == SET_DIGITS && self.set.bytes().all(|b| b.is_ascii_hexdigit());
        bound_held(&mut self.held);
        (is_set && is_bounded(&self.host, &self.name)).then_some(self)
    }
}

impl NodeStatus {
    /// As [`Heartbeat::bounded`], with the whole list: its digest is that of the set.
    #[must_use]
    pub fn bounded(self) -> Option<Self> {
        is_bounded(&self.host, &self.name).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::set_digest;
    use super::*;

    fn beat(host: &str, name: &str, set: &str, held: Vec<String>) -> Heartbeat {
        let (host, name, set) = (host.to_owned(), name.to_owned(), set.to_owned());
        Heartbeat { host, name, set, held, ..Heartbeat::default() }
    }

    #[test]
    fn texts_of_strangers_are_refused_or_cut_before_they_are_remembered() {
        let set = set_digest(&["a".to_owned()]);
        let long = "a".repeat(1 << 20);
        assert!(beat("0a1b2c3d4e5f-1", "one", &set, Vec::new()).bounded().is_some());
        for (host, name, set) in [
            (&*long, "one", &*set),
            ("", "one", &set),
            ("a.b-1", "one", &set),
            ("a-1", &long, &set),
            ("a-1", "one", &long),
            ("a-1", "one", "no digest of it!"),
        ] {
            assert!(beat(host, name, set, Vec::new()).bounded().is_none());
            let status =
                NodeStatus { host: host.into(), name: name.into(), ..NodeStatus::default() };
            assert_eq!(status.bounded().is_some(), host == "a-1" && name == "one");
        }
        let cut = beat("a-1", "one", &set, vec!["x".into(), long, "y".into()]).bounded().unwrap();
        assert_eq!(cut.held, ["x"]);
        let cut = beat("a-1", "one", &set, vec![String::new(); 100_000]).bounded().unwrap();
        assert_eq!((cut.held.len(), cut.held.capacity()), (MAX_HELD, MAX_HELD));
    }
}
