//! Output: text for people, one JSON object per line for programs.

use std::io::Write;

use afresh_bench::Row;
use clap::ValueEnum;

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
    ($($text:tt)*) => { crate::output::print_line(format_args!($($text)*)) };
}
pub(crate) use say;

/// Prints a line to standard output.
pub(crate) fn print_line(text: std::fmt::Arguments<'_>) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{text}")
}

/// Prints one row as text, with a heading when the case changes.
fn print_text(out: &mut dyn Write, last: &mut String, row: &Row) -> std::io::Result<()> {
    if *last != row.case {
        last.clone_from(&row.case);
        writeln!(
            out,
            "\n{:<18} {:<28} {:>3} {:>13} {:>13} {:>13}",
            row.case, "strategy", "thr", "median", "min", "p99"
        )?;
    }
    let Row { strategy, threads, median, min, p99, unit, .. } = row;
    writeln!(
        out,
        "{:<18} {strategy:<28} {threads:>3} {median:>13.3} {min:>13.3} {p99:>13.3} {unit}",
        "",
    )
}

/// Prints rows as they arrive.
pub(crate) fn row_printer(format: Format) -> impl FnMut(&Row) {
    let mut last = String::new();
    move |row| {
        let mut out = std::io::stdout().lock();
        // An error means that the reader has left, so it is not reported.
        let _ = match format {
            Format::Json => writeln!(out, "{}", row.json()),
            Format::Text => print_text(&mut out, &mut last, row),
        };
    }
}
