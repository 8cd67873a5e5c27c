//! Text for lines of a log and for terminals.
//!
//! Promises: text of strangers neither ends a line nor controls a terminal.

use std::borrow::Cow;

/// Text in which all that ends a line or controls a terminal is escaped.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_unsafe = |c: char| c != '\t' && (c.is_control() || is_format(c));
    if !text.contains(is_unsafe) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match is_unsafe(c) {
            true => escaped.extend(c.escape_unicode()),
            false => escaped.push(c),
        }
    }
    escaped.into()
}

/// Line and paragraph separators, and characters that change the direction of text.
fn is_format(c: char) -> bool {
    matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{61c}')
}
