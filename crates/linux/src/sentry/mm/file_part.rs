//! A part of a file that becomes private memory.
//!
//! Promises: copying it takes one piece of memory of this process, and work for the bytes that the
//! file stores. Holes are skipped, since new memory is zero.

use std::ops::Range;

use afresh_files::{Kind, Node, Refused, Tree};

/// Bytes that are copied at a time.
const PIECE_SIZE: u64 = 256 << 10;
/// Bytes from which on a part is copied in pieces, and the call ends at its deadline meanwhile.
pub(crate) const MAX_WHOLE: u64 = 4 << 20;

/// A part of a file as it is now.
#[derive(Clone)]
pub(crate) struct FilePart {
    tree: Tree,
    node: Node,
    range: Range<u64>,
}

impl std::fmt::Debug for FilePart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FilePart").field("node", &self.node).field("range", &self.range).finish()
    }
}

impl FilePart {
    /// The part at `range`, as far as the file goes.
    pub(crate) fn new(tree: &Tree, node: Node, range: Range<u64>) -> Result<Self, Refused> {
        let stat = tree.stat(node)?;
        if stat.kind != Kind::File {
            return Err(Refused::Invalid);
        }
        let range = range.start..range.end.min(stat.size).max(range.start);
        Ok(Self { tree: tree.clone(), node, range })
    }

    /// Its length.
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The pieces that the file stores: offsets in the part, in order.
    pub(crate) fn pieces(&self) -> Result<impl Iterator<Item = Range<u64>>, Refused> {
        let Range { start, end } = self.range;
        let stored = self.tree.stored_ranges(self.node)?.into_iter();
        let stored = stored.map(move |part| part.start.max(start)..part.end.min(end));
        Ok(stored.filter(|part| part.start < part.end).flat_map(move |part| {
            let end = part.end;
            let starts = part.step_by(PIECE_SIZE as usize);
            starts.map(move |at| at - start..end.min(at + PIECE_SIZE) - start)
        }))
    }

    /// Reads a piece. It replaces the content of `bytes`.
    pub(crate) fn read(&self, piece: &Range<u64>, bytes: &mut Vec<u8>) -> Result<(), Refused> {
        bytes.resize((piece.end - piece.start) as usize, 0);
        let read = self.tree.read(self.node, self.range.start + piece.start, bytes)?;
        bytes.truncate(read);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time};

    use super::*;

    #[test]
    fn a_sparse_file_has_the_pieces_that_it_stores() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/a", &[1; 5000], Time::default()).unwrap();
        let end = 100 * PIECE_SIZE;
        tree.write(node, end, &vec![2; 3 * PIECE_SIZE as usize], Time::default()).unwrap();
        tree.set_size(node, 1 << 40, Time::default()).unwrap();
        let pieces = |range| {
            let part = FilePart::new(&tree, node, range).unwrap();
            part.pieces().unwrap().collect::<Vec<_>>()
        };
        let tail = |n: u64| n * PIECE_SIZE..(n + 1) * PIECE_SIZE;
        assert_eq!(pieces(0..1 << 50), [0..8192, tail(100), tail(101), tail(102)]);
        let middle = 4096..end + PIECE_SIZE + 5;
        let part = FilePart::new(&tree, node, middle).unwrap();
        let expected =
            [0..4096, end - 4096..end + PIECE_SIZE - 4096, end + PIECE_SIZE - 4096..part.len()];
        assert_eq!(part.pieces().unwrap().collect::<Vec<_>>(), expected);
        let mut bytes = vec![9];
        part.read(&expected[0], &mut bytes).unwrap();
        assert_eq!(bytes, [&[1; 904][..], &[0; 3192]].concat());
        part.read(&expected[2], &mut bytes).unwrap();
        assert_eq!(bytes, [2; 5]);
        assert!(FilePart::new(&tree, Tree::ROOT, 0..1).is_err());
    }
}
