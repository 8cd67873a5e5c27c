//! A chunk: 2 MiB of an arena, what backs it, and what is mapped there.

use afresh_frames::{DirtyFrame, Order};

/// Pages in a chunk.
pub(crate) const CHUNK: usize = Order::HUGE.pages();

/// What backs a chunk.
#[derive(Debug, Default)]
pub(crate) enum Backing {
    /// Nothing: an access faults.
    #[default]
    Nothing,
    /// A frame of the pool.
    Frame(DirtyFrame),
    /// The kernel's anonymous memory, page by page at first touch.
    Kernel,
}

/// A mapping of the pool's file over a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First page in the file.
    pub(crate) file_page: usize,
    /// Pages mapped, from the start of the chunk.
    pub(crate) len: usize,
}

/// A chunk of an arena.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    /// What backs it.
    pub(crate) backing: Backing,
    /// The mapping of the pool's file that is there: accessible while a frame backs the chunk, and
    /// inaccessible when it is left over from one given back. To get the same frame again and make
    /// the mapping accessible costs far less than mapping anew: the page tables are there still.
    pub(crate) mapping: Option<Mapping>,
    /// The chunk has proved sparse: a 2 MiB frame would be wasted on it.
    pub(crate) sparse: bool,
    /// A frame backed it in the last cycle.
    pub(crate) expected: bool,
}

impl Chunk {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.backing, Backing::Nothing)
    }
}

/// The longest run of chunks at the start of `chunks` whose left-over mappings follow one another in
/// the file and can be asked for as one block, when the run's visible part has `visible` pages.
/// Returns the first page in the file and the order.
pub(crate) fn left_over(chunks: &[Chunk], visible: usize) -> Option<(usize, Order)> {
    let first = chunks.first()?.mapping?.file_page;
    let run = chunks
        .iter()
        .enumerate()
        .take_while(|(at, chunk)| {
            let needed = visible.saturating_sub(at * CHUNK).min(CHUNK);
            chunk.mapping.is_some_and(|m| m.file_page == first + at * CHUNK && m.len >= needed)
        })
        .count();
    let order = Order::fitting(run * CHUNK);
    (run > 0 && first.is_multiple_of(order.pages())).then_some((first, order))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(file_page: usize, len: usize) -> Chunk {
        Chunk { mapping: Some(Mapping { file_page, len }), ..Chunk::default() }
    }

    #[test]
    fn left_over_mappings_are_joined_while_they_follow_one_another() {
        let chunks = [chunk(1024, 512), chunk(1536, 512), chunk(0, 512), Chunk::default()];
        assert_eq!(left_over(&chunks, 4 * CHUNK), Some((1024, Order::new(10))));
        assert_eq!(left_over(&chunks[1..], CHUNK), Some((1536, Order::HUGE)));
        assert_eq!(left_over(&chunks[3..], CHUNK), None);
    }

    #[test]
    fn a_mapping_too_short_for_what_must_be_visible_is_not_used() {
        assert_eq!(left_over(&[chunk(512, 100)], 200), None);
        assert_eq!(left_over(&[chunk(512, 100)], 100), Some((512, Order::HUGE)));
    }

    #[test]
    fn a_run_that_is_not_aligned_to_its_length_is_not_one_block() {
        assert_eq!(left_over(&[chunk(512, 512), chunk(1024, 512)], 2 * CHUNK), None);
    }
}
