//! Lists of names in errors: the first few, shortened, and the number of the others.
//!
//! A module may have a hundred thousand exports, and worlds of components import hundreds of
//! functions; both come from strangers, and errors go into logs and answers.

/// Maximum names in an error.
const MAX_NAMES: usize = 8;
/// Characters of each.
const MAX_NAME_CHARS: usize = 200;

/// The first few of `names`, for an error; the others are counted.
///
/// ```
/// assert_eq!(afresh_rewrite::name_list(&["run".into(), "stop".into()]), "run, stop");
/// ```
#[must_use]
pub fn name_list(names: &[String]) -> String {
    let shown = |name: &String| printable(&shorten(name));
    let few: Vec<String> = names.iter().take(MAX_NAMES).map(shown).collect();
    match names.len().saturating_sub(MAX_NAMES) {
        0 => few.join(", "),
        more => format!("{}, and {more} more", few.join(", ")),
    }
}

/// The beginning of a name, followed by `...` where the name is longer.
pub(crate) fn shorten(name: &str) -> String {
    match name.char_indices().nth(MAX_NAME_CHARS) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// A name from a module as a message may hold it: characters that end a line, move the cursor or
/// reorder text are escaped.
fn printable(name: &str) -> String {
    let reorders = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_control() || reorders(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_are_counted_and_long_ones_cut() {
        let names: Vec<String> = (0..100_000).map(|n| format!("f{n}")).collect();
        assert_eq!(name_list(&names[..8]), "f0, f1, f2, f3, f4, f5, f6, f7");
        assert_eq!(name_list(&names), "f0, f1, f2, f3, f4, f5, f6, f7, and 99992 more");
        assert_eq!(name_list(&["é".repeat(1000)]), format!("{}...", "é".repeat(MAX_NAME_CHARS)));
        assert_eq!(name_list(&[]), "");
        let forged = "run\n2026-01-01 INFO \u{1b}[2Kpaid \u{202e}é".to_owned();
        assert_eq!(name_list(&[forged]), "run\\n2026-01-01 INFO \\u{1b}[2Kpaid \\u{202e}é");
    }
}
