//! The gate of conditional compilation: the crate `afresh` has few lines with `cfg(`.
//!
//! A kind of guest that a build lacks has a file of stand-ins (`…_absent.rs`), so that the other
//! files need no conditions. May break it: conditions that a macro writes. They are not seen.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::host::repository;
use crate::sources;

/// Maximum lines with conditions in the sources of `afresh`.
const MAX_LINES: usize = 60;

/// Refuses more conditions than [`MAX_LINES`].
pub(crate) fn check() -> Result<()> {
    let mut counts = Vec::new();
    for path in sources::paths()? {
        if path.starts_with("crates/afresh/src") && path.extension().is_some_and(|it| it == "rs") {
            let text = std::fs::read_to_string(repository().join(&path))
                .with_context(|| path.display().to_string())?;
            counts.push((count(&text), path));
        }
    }
    let lines: usize = counts.iter().map(|(count, _)| count).sum();
    if lines > MAX_LINES {
        counts.sort();
        let most = counts.last().map_or(Path::new(""), |(_, path)| path);
        bail!(
            "crates/afresh/src has {lines} lines with `cfg(`, and {MAX_LINES} are the limit; {} has \
             the most: move them into a file of stand-ins",
            most.display()
        );
    }
    Ok(())
}

/// The lines with conditions in a text.
fn count(text: &str) -> usize {
    text.lines().filter(|line| line.contains("cfg(") && !line.trim().starts_with("//")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_counted_by_line_and_comments_are_not() {
        let text = "#[cfg(feature = \"a\")]\nmod a;\n#![cfg_attr(x, y)]\nif cfg!(b) {}\n\
            #[cfg(all(not(a), b))]\n    // cfg(c)\n//! # #[cfg(d)]\n";
        assert_eq!(count(text), 2);
        check().expect("the crate is within its limit");
    }
}
