//! Where a process shows contents of mapped files.
//!
//! Promises: contents that are mapped anywhere are kept while they are noted here. May break it:
//! removing a place before its mapping is removed.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::file_cache::MappedRange;

/// Where a process shows contents.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileMappings {
    /// Start to end, and the mapped range from the start on; no two overlap.
    map: BTreeMap<u64, (u64, MappedRange)>,
}

impl FileMappings {
    pub(crate) fn insert(&mut self, range: Range<u64>, shown: MappedRange) {
        self.remove(range.clone());
        self.map.insert(range.start, (range.end, shown));
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        while let Some((&start, (end, _))) = self.map.range(..range.end).next_back() {
            if *end <= range.start {
                break;
            }
            let Some((end, shown)) = self.map.remove(&start) else { break };
            if end > range.end {
                self.map.insert(range.end, (end, shown.from(range.end - start)));
            }
            if start < range.start {
                self.map.insert(start, (range.start, shown));
            }
        }
    }

    /// The parts of `range` that show contents, in order.
    pub(crate) fn within(&self, range: Range<u64>) -> Vec<(Range<u64>, MappedRange)> {
        let parts = self.map.range(..range.end).rev();
        let parts = parts.take_while(|(_, (end, _))| *end > range.start);
        let mut parts: Vec<_> = parts
            .map(|(&start, (end, shown))| {
                let part = start.max(range.start)..(*end).min(range.end);
                let shown = shown.from(part.start - start);
                (part, shown)
            })
            .collect();
        parts.reverse();
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_cache::FileCache;
    use crate::sentry::PAGE;
    use afresh_files::{Budget, Time, Tree};

    #[test]
    fn where_contents_show_is_what_was_put_in() {
        let mut tree = Tree::new(Budget::default());
        tree.write_path("/a", &[1; 8 * PAGE as usize], Time::default()).unwrap();
        let node = tree.find("/a").unwrap();
        let mut contents = FileCache::default();
        let (shown, _) = contents.show(&tree, node, (0, 8 * PAGE, 1), u64::MAX).unwrap().unwrap();
        let mut showing = FileMappings::default();
        showing.insert(10 * PAGE..18 * PAGE, shown.clone());
        showing.remove(12 * PAGE..14 * PAGE);
        showing.insert(16 * PAGE..17 * PAGE, shown.clone());
        let wanted = [(11, 12, 1), (14, 16, 4), (16, 17, 0), (17, 18, 7)]
            .map(|(start, end, from)| (start * PAGE..end * PAGE, shown.from(from * PAGE)));
        assert_eq!(showing.within(11 * PAGE..18 * PAGE), wanted);
    }
}
