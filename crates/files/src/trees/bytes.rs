//! The bytes of a file as they were, to find out later where it has others.
//!
//! Promises: no place is left out; shared parts are skipped, so that the cost is proportional to
//! the differences. May break it: a host file that changes under a layer.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Refused;
use crate::layers::stack::Layers;
use crate::nodes::content::{Content, PAGE};
use crate::nodes::inode::Body;
use crate::nodes::node::Node;
use crate::trees::tree::Tree;

/// The bytes of a file as they were. Later changes do not show.
#[derive(Clone, Debug)]
pub struct FileBytes(Content);

impl FileBytes {
    /// Bytes of memory that it keeps: those of layers and holes are not.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.0.paid
    }
}

/// A file as it was, to be read without its tree. Of the tree only this file is kept.
#[derive(Clone, Debug)]
pub struct FileReader {
    content: Content,
    layers: Layers,
}

impl FileReader {
    /// Reads bytes from `offset`, and returns how many there are before the end of the file.
    ///
    /// # Errors
    /// [`Refused::Layer`].
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, Refused> {
        self.content.read(&self.layers, offset, out)
    }

    /// Bytes of memory that it keeps: those of layers and holes are not.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.content.paid
    }
}

impl Tree {
    /// A file as it is, to be read later.
    ///
    /// # Errors
    /// As [`Tree::bytes_of`].
    pub fn reader(&self, node: Node) -> Result<FileReader, Refused> {
        let FileBytes(content) = self.bytes_of(node)?;
        Ok(FileReader { content, layers: self.lower.layers.clone() })
    }

    /// The present bytes of a file.
    ///
    /// # Errors
    /// [`Refused::Missing`] for an unknown number, [`Refused::Invalid`] for a node that is not a
    /// file.
    pub fn bytes_of(&self, node: Node) -> Result<FileBytes, Refused> {
        match &self.inode(node)?.body {
            Body::File(content) => Ok(FileBytes(content.clone())),
            _ => Err(Refused::Invalid),
        }
    }

    /// Where a file may have other bytes than it had `then`, in order, in whole pages.
    ///
    /// # Errors
    /// As [`Tree::bytes_of`].
    pub fn changed_since(&self, node: Node, then: &FileBytes) -> Result<Vec<Range<u64>>, Refused> {
        let inode = self.inode(node)?;
        let Body::File(now) = &inode.body else { return Err(Refused::Invalid) };
        Ok(now.changed_since(&then.0))
    }

    /// Where a file has stored bytes, in order, in whole pages. All other bytes are zero.
    ///
    /// # Errors
    /// As [`Tree::bytes_of`].
    pub fn stored_ranges(&self, node: Node) -> Result<Vec<Range<u64>>, Refused> {
        let inode = self.inode(node)?;
        let Body::File(content) = &inode.body else { return Err(Refused::Invalid) };
        let mut parts: Vec<Range<u64>> = Vec::new();
        for run in content.runs().filter(|run| !run.is_empty()) {
            let part = run.start * PAGE as u64..run.end * PAGE as u64;
            match parts.last_mut() {
                Some(last) if last.end >= part.start => last.end = part.end,
                _ => parts.push(part),
            }
        }
        Ok(parts)
    }
}

impl Content {
    fn changed_since(&self, then: &Self) -> Vec<Range<u64>> {
        const STEP: u64 = PAGE as u64;
        let below = |content: &Self| content.under.as_ref().map_or(0, |under| under.len);
        let page = |number: u64| number * STEP..(number + 1) * STEP;
        let mut parts: Vec<Range<u64>> = Vec::new();
        for (number, ..) in then.pages.differing(&self.pages, Arc::ptr_eq) {
            parts.push(page(*number));
        }
        if then.under != self.under {
            // A file that was cut has the bytes before the cut as before.
            let source = |content: &Self| content.under.as_ref().map(|under| under.source);
            let same = source(then) == source(self);
            let start = if same { below(then).min(below(self)) / STEP * STEP } else { 0 };
            parts.push(start..below(then).max(below(self)).next_multiple_of(STEP));
        }
        if then.size != self.size {
            let end = then.size.max(self.size).div_ceil(STEP).saturating_mul(STEP);
            parts.push(then.size.min(self.size) / STEP * STEP..end);
        }
        parts.sort_unstable_by_key(|part| part.start);
        parts.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, Time};

    #[test]
    fn a_reader_keeps_its_file_as_it_was_and_no_other() {
        let now = Time::default();
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/a", &[7; 2 * PAGE], now).unwrap();
        tree.set_size(node, 1 << 30, now).unwrap();
        let reader = tree.reader(node).unwrap();
        assert_eq!(reader.memory(), 2 * PAGE as u64);
        tree.write_path("/a", b"later", now).unwrap();
        let mut read = vec![1; 3 * PAGE];
        assert_eq!(reader.read(PAGE as u64, &mut read).unwrap(), 3 * PAGE);
        assert!(read[..PAGE].iter().all(|byte| *byte == 7) && read[PAGE..].iter().all(|b| *b == 0));
        assert!(tree.reader(Tree::ROOT).is_err());
    }

    /// Random writes and cuts: every position where two bytes differ is listed.
    #[test]
    fn every_changed_place_is_reported() {
        let now = Time::default();
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/a", &[7; 20 * PAGE], now).unwrap();
        let mut random = 11u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for round in 0..300 {
            let then = tree.bytes_of(node).unwrap();
            let before = tree.read_path("/a", u64::MAX).unwrap();
            assert!(tree.changed_since(node, &then).unwrap().is_empty());
            for _ in 0..next(4) {
                match next(4) {
                    0 => tree.set_size(node, next(30 * PAGE as u64), now).unwrap(),
                    _ => {
                        let bytes = vec![next(3) as u8; next(2 * PAGE as u64) as usize + 1];
                        tree.write(node, next(25 * PAGE as u64), &bytes, now).unwrap();
                    }
                }
            }
            let after = tree.read_path("/a", u64::MAX).unwrap();
            let told = tree.changed_since(node, &then).unwrap();
            let stored = tree.stored_ranges(node).unwrap();
            assert!(stored.windows(2).all(|pair| pair[0].end < pair[1].start), "{stored:?}");
            for (at, byte) in after.iter().enumerate().filter(|(_, byte)| **byte != 0) {
                let is_stored = stored.iter().any(|part| part.contains(&(at as u64)));
                assert!(is_stored, "round {round}: {at} is {byte}");
            }
            assert!(told.windows(2).all(|pair| pair[0].end < pair[1].start), "{told:?}");
            for at in 0..before.len().max(after.len()) {
                let is_told = told.iter().any(|part| part.contains(&(at as u64)));
                assert!(is_told || before.get(at) == after.get(at), "round {round}: {at}");
            }
        }
    }
}
