//! Output: text for people, one JSON object per line for programs, a spinner for long operations.
//!
//! Promises: text of strangers in a line, as that of the author of a snapshot or of an error of a
//! guest, does not control the terminal. May break it: answers of guests, which are written as they
//! are.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Prints a line, as `println!` does, but returns errors: a closed pipe, a full disk.
macro_rules! say {
    ($($text:tt)*) => { crate::output::line(format_args!($($text)*)) };
}
pub(crate) use say;

/// Prints a line to standard error, as `eprintln!` does, but ignores errors: of a pipe that its
/// reader has closed, for example.
macro_rules! message {
    ($($text:tt)*) => { crate::output::message_line(format_args!($($text)*)) };
}
pub(crate) use message;

/// Prints a line to standard error.
pub(crate) fn message_line(text: std::fmt::Arguments<'_>) {
    // There is no other place to report the error.
    let _ = writeln!(std::io::stderr(), "{}", printable(&text.to_string()));
}

/// Prints a line to standard output.
pub(crate) fn line(text: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{}", printable(&text.to_string()))
}

/// Text in which characters that control a terminal or change the direction of text are escaped as
/// in JSON, so that a line of JSON keeps its meaning. Ends of lines and tabs stay.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| !"\n\t".contains(c) && is_control(c))
}

/// A value of a stranger within a line: ends of lines are escaped as well.
pub(crate) fn one_line(text: &str) -> Cow<'_, str> {
    escape(text, is_control)
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match is_escaped(c) {
            // Writing to a string cannot fail.
            true => drop(write!(escaped, "\\u{:04x}", u32::from(c))),
            false => escaped.push(c),
        }
    }
    escaped.into()
}

/// Whether a character controls a terminal, separates lines or changes the direction of text.
fn is_control(c: char) -> bool {
    let is_format = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    c.is_control() || is_format
}

/// A path as a word of a shell.
#[cfg(linux_guests)]
pub(crate) fn quoted(path: &std::path::Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    match path.chars().all(is_plain) && !path.is_empty() {
        true => path,
        false => format!("'{}'", path.replace('\'', r"'\''")),
    }
}

/// A number of things: `1 layer`, `2 layers`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Prints the duration of calls in microseconds to standard error. Prints nothing without calls.
pub(crate) fn times(mut times: Vec<f64>) {
    let Some(first) = times.first().copied() else { return };
    times.sort_by(f64::total_cmp);
    message!(
        "{}, each from the warm state: first {first:.2} us, median {:.2} us, fastest {:.2} us, slowest {:.2} us",
        counted(times.len() as u64, "call"),
        times[times.len() / 2],
        times[0],
        times[times.len() - 1],
    );
}

/// Shows a spinner with the text `what` on standard error, if that is a terminal.
pub(crate) fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Shows the progress and rate of `total` bytes.
pub(crate) fn bytes(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template(
        "{msg} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    ) {
        bar.set_style(style);
    }
    bar
}

/// Shows the progress and rate of `total` steps.
pub(crate) fn steps(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_strangers_controls_no_terminal_and_json_keeps_its_meaning() {
        let hostile = "a\u{1b}]0;x\u{7}\u{9b}2J\u{202e}b\r\tc\nd";
        let escaped = printable(hostile);
        assert_eq!(escaped, "a\\u001b]0;x\\u0007\\u009b2J\\u202eb\\u000d\tc\nd");
        assert_eq!(one_line("a\nb \u{e9}"), "a\\u000ab \u{e9}");
        let json = serde_json::json!({ "text": hostile });
        let line = json.to_string();
        assert!(!printable(&line).contains(is_control));
        let read: serde_json::Value = serde_json::from_str(&printable(&line)).unwrap();
        assert_eq!(read, json);
    }

    #[cfg(linux_guests)]
    #[test]
    fn a_path_is_one_word_of_a_shell() {
        for (path, word) in [
            ("a/b-1.py", "a/b-1.py"),
            ("My Files/x", "'My Files/x'"),
            ("it's", r"'it'\''s'"),
            ("$(x)", "'$(x)'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(std::path::Path::new(path)), word);
        }
    }
}
