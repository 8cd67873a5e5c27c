//! Limits on snapshots from strangers.
//!
//! Every number in a file is a claim. A few bytes can name terabytes: a page at the far end of an
//! index space, an extent that points a thousand times at the same stored pages, a program of
//! zeros. So claims are held against these limits when a snapshot is opened, before anything is
//! reserved, read or digested for them.
//!
//! May break it: limits that are raised for a snapshot that does not deserve it.

use super::index::GROUP_PAGES;
use crate::OpenError;

const GIB: u64 = 1 << 30;

/// Content that any snapshot may have, whatever its size.
const MIN_CONTENT: u64 = GIB / 4;

/// Bytes of sealed layers for each byte of content.
#[cfg(feature = "remote")]
const MAX_SEALED: u64 = 4;

/// Limits on a snapshot, in bytes. The defaults suit a host that opens snapshots of strangers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Length of the memory, including zero pages. Default: 64 GiB.
    pub memory: u64,
    /// Pages that are not zero, which are read and take memory. Default: 16 GiB.
    pub content: u64,
    /// Content for each byte of blobs, beyond the first 256 MiB. Equal pages are stored once and
    /// compressed ones are short, but a small file with a large memory is more often an attack than
    /// a guest. Default: 512.
    pub expansion: u64,
    /// Indexes of all layers together, which are held in memory. Default: 256 MiB.
    pub index: u64,
    /// The program of a guest: its module or executable. Default: 1 GiB.
    pub program: u64,
    /// Turns after a session's snapshot: the bytes of all their states, of all their programs and
    /// of all patches, and the work to apply them, each separately. Default: 1 GiB, which writers
    /// observe.
    pub turns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: 64 * GIB,
            content: 16 * GIB,
            expansion: 512,
            index: GIB / 4,
            program: GIB,
            turns: Self::DEFAULT_TURNS,
        }
    }
}

impl Limits {
    /// The default of `turns`.
    pub(crate) const DEFAULT_TURNS: u64 = GIB;

    /// Only the limits of the format, for trusted snapshots, or those that are copied and not run.
    pub const NONE: Limits = Limits {
        memory: u64::MAX,
        content: u64::MAX,
        expansion: u64::MAX,
        index: u64::MAX,
        program: u64::MAX,
        turns: u64::MAX,
    };

    /// The limits by name, as options of commands spell them.
    pub const NAMES: [&str; 6] = ["memory", "content", "expansion", "index", "program", "turns"];

    /// Sets a limit from text of the form `NAME=SIZE`. SIZE is in bytes, or has the unit KiB, MiB,
    /// GiB or TiB.
    ///
    /// # Errors
    /// [`BadLimit`] for another name, or an invalid size.
    pub fn set(&mut self, text: &str) -> Result<(), BadLimit> {
        let bad = || BadLimit(text.chars().take(80).collect());
        let (name, size) = text.split_once('=').ok_or_else(bad)?;
        let limit = match name.trim() {
            "memory" => &mut self.memory,
            "content" => &mut self.content,
            "expansion" => &mut self.expansion,
            "index" => &mut self.index,
            "program" => &mut self.program,
            "turns" => &mut self.turns,
            _ => return Err(bad()),
        };
        *limit = size_of(size.trim()).ok_or_else(bad)?;
        Ok(())
    }

    /// Refuses a memory of `bytes` bytes.
    ///
    /// # Errors
    /// [`OpenError::Limit`].
    pub fn check_memory(&self, bytes: u64) -> Result<(), OpenError> {
        within("memory", "the memory", bytes, self.memory)
    }

    /// Refuses indexes of `bytes` bytes in all.
    pub(crate) fn check_index(&self, bytes: u64) -> Result<(), OpenError> {
        within("index", "the indexes of the layers", bytes, self.index)
    }

    /// Refuses `bytes` bytes of pages that are not zero.
    pub(crate) fn check_content(&self, bytes: u64) -> Result<(), OpenError> {
        within("content", "the content of the memory", bytes, self.content)
    }

    /// Refuses sealed layers of `bytes` bytes, which are fetched before their key can check them.
    /// Layers that replace pages of one another have a multiple of the content.
    #[cfg(feature = "remote")]
    pub(crate) fn check_sealed(&self, bytes: u64) -> Result<(), OpenError> {
        let limit = self.content.saturating_mul(MAX_SEALED).saturating_add(self.index);
        within("content", "the sealed layers", bytes, limit)
    }

    /// Refuses `bytes` bytes of pages out of blobs of `blobs` bytes.
    pub(crate) fn check_expansion(&self, bytes: u64, blobs: u64) -> Result<(), OpenError> {
        let limit = blobs.saturating_mul(self.expansion).saturating_add(MIN_CONTENT);
        within("expansion", "the expanded blobs of the snapshot", bytes, limit)
    }

    /// Refuses `bytes` bytes of compressed groups that readers decompress, out of blobs of `blobs`
    /// bytes. A page costs its whole group, which has 16 pages in layers of this crate: these pass
    /// wherever their content does.
    pub(crate) fn check_groups(&self, bytes: u64, blobs: u64) -> Result<(), OpenError> {
        let content = blobs.saturating_mul(self.expansion).saturating_add(MIN_CONTENT);
        let limit = content.saturating_mul(GROUP_PAGES.into());
        within("expansion", "the groups of pages that are decompressed", bytes, limit)
    }

    /// Refuses turns that take `bytes` bytes of `what`.
    pub(crate) fn check_turns(&self, what: &'static str, bytes: u64) -> Result<(), OpenError> {
        within("turns", what, bytes, self.turns)
    }

    /// Refuses a program of `bytes` bytes.
    ///
    /// # Errors
    /// [`OpenError::Limit`].
    pub fn check_program(&self, bytes: u64) -> Result<(), OpenError> {
        within("program", "the program of the guest", bytes, self.program)
    }
}

/// Text that changes no limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a limit: NAME=SIZE, with a name among {names} and a size such as 4096 or 64GiB",
    names = Limits::NAMES.join(", ")
)]
pub struct BadLimit(String);

fn size_of(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn within(name: &'static str, what: &'static str, bytes: u64, limit: u64) -> Result<(), OpenError> {
    if bytes > limit { Err(OpenError::Limit { what, bytes, limit, name }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_its_name_and_says_how_it_is_raised() {
        let mut limits = Limits::default();
        for name in Limits::NAMES {
            limits.set(&format!("{name}=1")).unwrap();
        }
        let refused = [
            limits.check_memory(2),
            limits.check_content(2),
            limits.check_expansion(MIN_CONTENT + 3, 2),
            limits.check_index(2),
            limits.check_program(2),
            limits.check_turns("turns", 2),
        ];
        for (name, refused) in Limits::NAMES.iter().zip(refused) {
            let said = refused.unwrap_err().to_string();
            assert!(said.contains(&format!("`{name}`")), "{name}: {said}");
        }
        limits.check_expansion(MIN_CONTENT + 2, 2).unwrap();
        Limits::NONE.check_expansion(u64::MAX, u64::MAX).unwrap();
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        let mut limits = Limits::default();
        limits.set("memory=3TiB").unwrap();
        limits.set("content = 5 MiB").unwrap();
        assert_eq!((limits.memory, limits.content), (3 << 40, 5 << 20));
        for bad in ["", "memory", "memory=", "memory=x", "memory=1TB", "patience=1", "index=-1"] {
            let error = limits.set(bad).unwrap_err().to_string();
            assert!(error.contains("memory, content"), "{bad}: {error}");
        }
        limits.set("memory=99999999999999999999").unwrap_err();
        limits.set("memory=99999999TiB").unwrap_err();
    }
}
