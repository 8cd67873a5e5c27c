//! The change between two images as a turn, and a turn's image out of the one before.
//!
//! Promises: a turn describes the difference of every page, and costs time in proportion to the
//! difference and to the number of stored pieces. Applied to an equal image it gives an equal one.

use afresh_memory::{Image, ImageBuilder, ImageError, PageOrigin};
use afresh_store::{Turn, TurnBuilder, TurnPiece};
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::SaveMemoryError;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The turn that makes `image` and `state` out of an earlier image and state, whose digest is
/// `parent`.
///
/// # Errors
/// [`SaveMemoryError`] when pages are not there, or are more than a turn holds.
pub fn turn_since(
    before: (&Image, &[u8]),
    image: &Image,
    state: &[u8],
    parent: [u8; 32],
) -> Result<Turn, SaveMemoryError> {
    let (earlier, state_before) = before;
    let mut turn = TurnBuilder::new(earlier.pages());
    for run in image.page_origins(earlier) {
        match run {
            PageOrigin::Same { from, len } => turn.copy(from, len),
            PageOrigin::Zero { len } => turn.zero(len),
            PageOrigin::New { pages, predecessor } => {
                image.resolve(pages)?;
                for (n, page) in (pages.start..pages.end()).enumerate() {
                    let now = image.page(page).unwrap_or(&ZEROS);
                    let before =
                        predecessor.map(|first| first + n).filter(|at| *at < earlier.pages());
                    if let Some(at) = before {
                        earlier.resolve(PageRange::new(at, 1))?;
                    }
                    turn.page(before.map(|at| (at, earlier.page(at).unwrap_or(&ZEROS))), now);
                }
            }
        }
    }
    Ok(turn.finish(state_before, state, parent)?)
}

/// The image that `turn` makes of `before`, with which it shares every page that the turn takes
/// over.
///
/// # Errors
/// [`ImageError`] when pages are not there or memory runs out. A turn of another image is for the
/// caller to refuse.
pub fn turn_applied(turn: &Turn, before: &Image) -> Result<Image, ImageError> {
    /// A run of the new image.
    enum Part {
        Old(PageRange),
        Zero(usize),
        New(PageRange),
    }
    let mut parts = Vec::new();
    let mut made: Vec<[u8; PAGE_SIZE]> = Vec::new();
    turn.pieces(|piece| {
        let from = made.len();
        match piece {
            TurnPiece::Copy { from, len } => {
                parts.push(Part::Old(PageRange::new(from, len)));
                return Ok(());
            }
            TurnPiece::Zero { len } => {
                parts.push(Part::Zero(len));
                return Ok(());
            }
            TurnPiece::Patch { from, patch } => {
                before.resolve(PageRange::new(from, 1))?;
                let mut page = *before.page(from).unwrap_or(&ZEROS);
                patch.apply(&mut page);
                made.push(page);
            }
            TurnPiece::Whole(bytes) => made.extend_from_slice(bytes.as_chunks().0),
        }
        parts.push(Part::New(PageRange::new(from, made.len() - from)));
        Ok::<_, ImageError>(())
    })?;
    let mut builder = ImageBuilder::new(made.len());
    for (index, page) in made.iter().enumerate() {
        builder.segment(index * PAGE_SIZE, page)?;
    }
    let made = builder.build()?;
    let images: Vec<Image> = parts
        .into_iter()
        .map(|part| match part {
            Part::Old(range) => before.slice(range),
            Part::Zero(len) => Image::zero(len),
            Part::New(range) => made.slice(range),
        })
        .collect();
    Ok(Image::join(&images))
}
