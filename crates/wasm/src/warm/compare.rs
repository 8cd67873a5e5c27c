//! Compares an instance with the warm state.

use std::collections::BTreeMap;
use std::fmt::Display;

/// The differences between an instance and the warm state.
///
/// Compared are, byte by byte and one by one: memories and their sizes, mutable globals, tables
/// that can be written and their sizes, dropped segments, the pending exception, the size of the
/// collected heap, and the host state. [`Comparison::unseen`] lists the parts that are not
/// compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// Bytes of memory that differ, plus the differences in size.
    pub bytes: usize,
    /// Everything else that differs, by name.
    pub items: Vec<String>,
    /// Parts that were not compared, each with the reason; empty in reset mode.
    pub unseen: Vec<&'static str>,
}

impl Comparison {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.bytes == 0 && self.items.is_empty()
    }

    /// Notes every key whose value differs, or that only one of the two has.
    pub(crate) fn maps<K: Ord + Display, V: PartialEq>(
        &mut self,
        what: &str,
        warm: &BTreeMap<K, V>,
        now: &BTreeMap<K, V>,
    ) {
        let changed = warm.iter().filter(|(key, value)| now.get(key) != Some(value));
        let added = now.iter().filter(|(key, _)| !warm.contains_key(key));
        self.items.extend(changed.chain(added).map(|(key, _)| format!("{what} {key}")));
    }

    /// Notes an item if it `differs`.
    pub(crate) fn item(&mut self, differs: bool, what: &str) {
        if differs {
            self.items.push(what.to_owned());
        }
    }

    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.bytes, self.items.len())
    }
}
