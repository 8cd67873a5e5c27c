//! A map of the pages in a snapshot: a character for each group of pages.

use std::fmt::Write;

use afresh::memory::{PAGE_SIZE, PageRange};
use afresh::store::{PageKind, Snapshot};
use console::Term;
use indicatif::BinaryBytes;

/// Maximum lines of a map.
const LINES: usize = 8;
/// Columns without a terminal.
const COLUMNS: usize = 80;

/// The character of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Palette {
    Ascii,
    Blocks,
}

impl Palette {
    fn glyph(self, kind: PageKind) -> char {
        match (self, kind) {
            (Self::Ascii, PageKind::Zero) => '.',
            (Self::Ascii, PageKind::Stored) => '+',
            (Self::Ascii, PageKind::Shared) => '=',
            (Self::Ascii, PageKind::Hot) => '#',
            (Self::Blocks, PageKind::Zero) => '·',
            (Self::Blocks, PageKind::Stored) => '▒',
            (Self::Blocks, PageKind::Shared) => '░',
            (Self::Blocks, PageKind::Hot) => '█',
        }
    }
}

/// The palette and columns for standard output. Blocks need a terminal and an unset `NO_COLOR`.
pub(super) fn screen() -> (Palette, usize) {
    let terminal = Term::stdout();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || std::env::var_os("TERM").is_some_and(|name| name == "dumb");
    if !terminal.is_term() {
        return (Palette::Ascii, COLUMNS);
    }
    let columns = terminal.size_checked().map_or(COLUMNS, |(_, columns)| columns.into());
    (if plain { Palette::Ascii } else { Palette::Blocks }, columns.max(1))
}

/// Draws the pages of `snapshot`, in order, and a legend.
pub(super) fn draw(snapshot: &Snapshot, palette: Palette, columns: usize) -> String {
    let cells = snapshot.page_summary(columns * LINES);
    lay_out(&cells, palette, columns)
}

fn lay_out(cells: &[(PageRange, PageKind)], palette: Palette, columns: usize) -> String {
    let mut text = String::new();
    for line in cells.chunks(columns) {
        text.extend(line.iter().map(|(_, kind)| palette.glyph(*kind)));
        text.push('\n');
    }
    let per_cell = cells.first().map_or(0, |(pages, _)| pages.len);
    let kinds = [
        (PageKind::Zero, "zero"),
        (PageKind::Stored, "stored"),
        (PageKind::Shared, "duplicate, stored once"),
        (PageKind::Hot, "in the working set"),
    ];
    for (kind, what) in kinds {
        // Writing to a string cannot fail.
        let _ = write!(text, "{} {what}  ", palette.glyph(kind));
    }
    let bytes = BinaryBytes((per_cell * PAGE_SIZE) as u64);
    let _ = match per_cell {
        1 => write!(text, "\none page each"),
        _ => write!(
            text,
            "\n{per_cell} pages ({bytes}) each, drawn as the last of these kinds that occurs among them"
        ),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_shows_each_kind_of_page_at_its_position() {
        let kinds = [PageKind::Zero, PageKind::Stored, PageKind::Shared, PageKind::Hot];
        let cells: Vec<_> =
            kinds.iter().enumerate().map(|(n, kind)| (PageRange::new(2 * n, 2), *kind)).collect();
        let text = lay_out(&cells, Palette::Ascii, 3);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], [".+=", "#"]);
        assert!(lines[2].contains("# in the working set"), "{text}");
        assert!(lines[3].starts_with("2 pages (8.00 KiB) each"), "{text}");
        assert!(text.is_ascii());
        assert!(lay_out(&cells, Palette::Blocks, 4).starts_with("·▒░█\n"));
        assert!(lay_out(&[], Palette::Ascii, 4).starts_with(". zero"));
    }
}
