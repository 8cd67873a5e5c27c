//! Attributes of the next files of a directory, which calls read inside the process.
//!
//! `git status` and `find` look up one name of a directory after the other. After two lookups in
//! order, the sentry shows the process the attributes of the files behind the second one. A lookup
//! of a name in that order is answered there, if its directory and its path are the expected ones.
//! The number of files grows with the lookups that were answered, and a list that answered none
//! makes the next one rarer.
//!
//! Promises: a list is valid until the next event of the process, so it is as one read at the last
//! event. It holds only files whose attributes the same calls of the sentry report: no directories
//! and devices, and nothing that a path of `/proc` or `/dev` means. May break it: an event that is
//! served before [`Sentry::take_over`].

use afresh_files::{Kind, Node, ResolvedName};

use crate::platform::{ATTRIBUTE_PATH_LEN, AttributeAnswer, MAX_ATTRIBUTES};
use crate::sentry::Sentry;
use crate::sentry::abi::{self, FileStatus};
use crate::sentry::result::SyscallResult;

/// Files of the first list, and of the smallest.
const MIN_FILES: usize = 8;
/// Lookups between two lists after one that has answered none, doubled with each.
const PAUSE: u32 = 8;
/// Lists without an answer that make the pause longer.
const MAX_FRUITLESS: u32 = 8;

/// A lookup that follows no link and has found a file of the tree.
#[derive(Debug)]
pub(in crate::sentry) struct FileLookup {
    /// The descriptor that the path starts from.
    from: i32,
    path: Vec<u8>,
    directory: Node,
}

impl FileLookup {
    /// A lookup that has found `place`. `None` if its path does not end with the name there.
    pub(in crate::sentry) fn new(from: i32, path: Vec<u8>, place: &ResolvedName) -> Option<Self> {
        let lookup = Self { from, path, directory: place.directory };
        let (_, name) = lookup.parts();
        let is_name = name == &place.name[..] && !matches!(name, b"" | b"." | b"..");
        is_name.then_some(lookup)
    }

    /// The path up to the last name, and that name.
    fn parts(&self) -> (&[u8], &[u8]) {
        let above = self.path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        self.path.split_at(above)
    }
}

/// The lookups of a process so far.
#[derive(Debug, Default)]
pub(in crate::sentry) struct AttributePrefetch {
    /// The directory and the name of the last one.
    last: Option<(Node, Vec<u8>)>,
    /// Files of the last list.
    given: usize,
    /// Those that were looked up.
    pub(in crate::sentry) taken: usize,
    fruitless: u32,
    /// Lookups until the next list.
    pause: u32,
}

impl AttributePrefetch {
    /// Number of files of the next list, after a lookup of `name`.
    fn plan(&mut self, directory: Node, name: &[u8]) -> usize {
        let follows = self
            .last
            .as_ref()
            .is_some_and(|(above, last)| *above == directory && last.as_slice() < name);
        self.last = Some((directory, name.to_vec()));
        let (given, taken) = (std::mem::take(&mut self.given), std::mem::take(&mut self.taken));
        if given > 0 && taken > 0 {
            self.fruitless = 0;
            return (2 * taken).clamp(MIN_FILES, MAX_ATTRIBUTES);
        }
        if given > 0 {
            self.pause = PAUSE << self.fruitless;
            self.fruitless = (self.fruitless + 1).min(MAX_FRUITLESS);
        }
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        if follows { MIN_FILES } else { 0 }
    }

    /// Number of files that the process was given.
    pub(in crate::sentry) fn count(&self) -> usize {
        self.given
    }
}

impl Sentry {
    /// The attributes of the files that follow a lookup.
    pub(in crate::sentry) fn attributes_behind(
        &self,
        lookup: &FileLookup,
        prefetch: &mut AttributePrefetch,
    ) -> Vec<AttributeAnswer> {
        let (above, name) = lookup.parts();
        let most = prefetch.plan(lookup.directory, name);
        if most == 0 || self.state.meant(lookup.from as u64, above).is_some() {
            return Vec::new();
        }
        let tree = &self.state.tree;
        let Ok(entries) = tree.list_after(lookup.directory, name, most) else { return Vec::new() };
        let answers = entries.into_iter().filter_map(|entry| {
            let is_plain = matches!(entry.kind, Kind::File | Kind::Link);
            let path = [above, &entry.name].concat();
            let fits = path.len() < ATTRIBUTE_PATH_LEN;
            if !is_plain || !fits || self.state.shares.contains(&entry.node) {
                return None;
            }
            self.state.meant(lookup.from as u64, &path).is_none().then_some(())?;
            let stat = self.encoded_attributes(entry.node, lookup.directory).ok()?;
            Some(AttributeAnswer { from: lookup.from, path, stat: stat.try_into().ok()? })
        });
        let answers: Vec<_> = answers.collect();
        prefetch.given = answers.len();
        answers
    }

    fn encoded_attributes(&self, node: Node, above: Node) -> SyscallResult<Vec<u8>> {
        let attributes = FileStatus::of_entry(&self.state.tree, node, above)?;
        Ok(abi::stat(&attributes, self.state.seen_owner(attributes.owner)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_grow_while_they_answer_and_become_rare_if_not() {
        let (mut prefetch, here) = (AttributePrefetch::default(), Node(7));
        let mut plan = |name: &str, taken: Option<usize>| {
            if let Some(taken) = taken {
                (prefetch.given, prefetch.taken) = (MIN_FILES, taken);
            }
            prefetch.plan(here, name.as_bytes())
        };
        assert_eq!(plan("a", None), 0, "a single lookup");
        assert_eq!(plan("b", None), MIN_FILES);
        assert_eq!(plan("k", Some(8)), 16);
        assert_eq!(plan("z", Some(MAX_ATTRIBUTES)), MAX_ATTRIBUTES);
        assert_eq!(plan("zz", Some(0)), 0, "the list was in vain");
        let paused = (0..PAUSE * 2).take_while(|at| plan(&format!("zz{at:05}"), None) == 0).count();
        assert_eq!(paused as u32, PAUSE - 1);
        assert_eq!(plan("zzz", Some(0)), 0);
        let paused =
            (0..PAUSE * 4).take_while(|at| plan(&format!("zzzz{at:05}"), None) == 0).count();
        assert_eq!(paused as u32, PAUSE * 2 - 1);
        assert_eq!(plan("a", None), 0, "out of order");
    }
}
