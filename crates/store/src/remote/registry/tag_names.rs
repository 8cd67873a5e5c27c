//! The names in a registry's list of tags, which comes in pages.
//!
//! Promises: the names of all pages take memory within the limits here, whatever a registry sends.
//! A name is counted before it is kept. May break it: nothing outside.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::address;

/// Maximum number of tags: reading what they mean takes a request for each.
const MAX_TAGS: usize = 1 << 16;
/// Maximum bytes of their names together.
const MAX_BYTES: usize = 4 << 20;

/// Different names of tags, in order.
#[derive(Debug, Default)]
pub(super) struct TagNames {
    names: BTreeSet<String>,
    bytes: usize,
    is_full: bool,
}

impl TagNames {
    /// Adds the names in a page of the list. Words that are no tags are skipped.
    pub(super) fn read_page(&mut self, page: &[u8]) -> Result<(), String> {
        let mut json = serde_json::Deserializer::from_slice(page);
        let read = Page(self).deserialize(&mut json).and_then(|()| json.end());
        match read {
            Err(_) if self.is_full => Err(format!(
                "it has more than {MAX_TAGS} tags, or {MAX_BYTES} bytes of names; keep snapshots in \
                 a repository with fewer tags"
            )),
            read => read.map_err(|error| error.to_string()),
        }
    }

    /// Adds a name; `false` where there is no room for it.
    fn add(&mut self, name: &str) -> bool {
        if !address::is_tag(name) || self.names.contains(name) {
            return true;
        }
        self.bytes += name.len();
        self.is_full = self.names.len() == MAX_TAGS || self.bytes > MAX_BYTES;
        if !self.is_full {
            self.names.insert(name.to_owned());
        }
        !self.is_full
    }

    pub(super) fn into_names(self) -> Vec<String> {
        self.names.into_iter().collect()
    }
}

/// An answer, whose field `tags` has names or is null.
struct Page<'a>(&'a mut TagNames);

impl<'de> DeserializeSeed<'de> for Page<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Page<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of tags")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(field) = map.next_key::<Cow<'_, str>>()? {
            match &*field {
                "tags" => map.next_value_seed(Names(self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct Names<'a>(&'a mut TagNames);

impl<'de> DeserializeSeed<'de> for Names<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Names<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the names of tags")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<(), S::Error> {
        while let Some(name) = list.next_element::<Cow<'_, str>>()? {
            if !self.0.add(&name) {
                return Err(S::Error::custom("too many tags"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use afresh_budget::meter::peak;

    use super::*;

    fn page(names: impl Iterator<Item = String>) -> Vec<u8> {
        let names: Vec<_> = names.map(|name| format!("{name:?}")).collect();
        format!(r#"{{"name":"a","tags":[{}],"more":[{{}}]}}"#, names.join(",")).into_bytes()
    }

    #[test]
    fn pages_add_up_to_an_ordered_list_without_doubles() {
        let mut names = TagNames::default();
        names.read_page(br#"{"tags":["b","\u0061",".bad","b"]}"#).unwrap();
        names.read_page(br#"{"tags":null}"#).unwrap();
        names.read_page(br"{}").unwrap();
        names.read_page(br#"{"tags":["c","a"]}"#).unwrap();
        for wrong in [&b"[]"[..], br#"{"tags":{}}"#, br#"{"tags":[1]}"#, br#"{"tags":["d"]"#] {
            names.read_page(wrong).unwrap_err();
        }
        assert_eq!(names.into_names(), ["a", "b", "c", "d"]);
    }

    #[test]
    fn names_of_all_pages_are_counted_before_they_are_kept() {
        let refused = |names: &mut TagNames, page: Vec<u8>| {
            let (read, most) = peak(|| names.read_page(&page));
            assert!(read.unwrap_err().contains("fewer tags"));
            assert!(most < 64 << 10, "{most} bytes for a page that has no room");
            assert!(names.names.len() <= MAX_TAGS);
        };
        let number = |at: usize| format!("{at}");
        let mut names = TagNames::default();
        names.read_page(&page((0..MAX_TAGS).map(number))).unwrap();
        // The same again takes no room.
        names.read_page(&page((0..MAX_TAGS).map(number))).unwrap();
        refused(&mut names, page((MAX_TAGS..2 * MAX_TAGS).map(number)));

        let long = |at: usize| format!("{at:0>128}");
        let mut names = TagNames::default();
        names.read_page(&page((0..MAX_BYTES / 128).map(long))).unwrap();
        refused(&mut names, page((MAX_BYTES..2 * MAX_BYTES).step_by(1 << 10).map(long)));
    }

    #[test]
    fn a_page_of_empty_names_takes_no_memory() {
        let text = format!(r#"{{"tags":[{}""]}}"#, r#""","#.repeat(1 << 20));
        let (read, most) = peak(|| TagNames::default().read_page(text.as_bytes()));
        read.unwrap();
        assert!(most < 64 << 10, "{most} bytes");
    }
}
