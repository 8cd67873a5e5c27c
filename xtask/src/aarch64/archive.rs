//! The root of the machine: an archive that the kernel unpacks into memory (cpio, format `newc`).

use std::io::{self, Write};

/// Modes: what an entry is, and its permissions.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// Writes an archive.
pub(crate) struct Archive<W> {
    to: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, entries: 0 }
    }

    /// Adds a folder; its parents must be there.
    pub(crate) fn folder(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, FOLDER, b"")
    }

    /// Adds a file that may be executed.
    pub(crate) fn program(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.entry(path, PROGRAM, content)
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, to: &str) -> io::Result<()> {
        self.entry(path, LINK, to.as_bytes())
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.entry("TRAILER!!!", 0, b"")?;
        self.to.flush()
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let too_large = |_| io::Error::other(format!("{path} is too large for the archive"));
        let bytes = u32::try_from(content.len()).map_err(too_large)?;
        let name = u32::try_from(path.len() + 1).map_err(too_large)?;
        let mut head = String::from("070701");
        // Inode, mode, owner, group, links, time, bytes, device, its number (two each), name,
        // checksum.
        for field in [self.entries, mode, 0, 0, 1, 0, bytes, 0, 0, 0, 0, name, 0] {
            head.push_str(&format!("{field:08x}"));
        }
        head.push_str(path);
        // Name and content end at a multiple of four.
        let name_end = head.len() + 1;
        self.to.write_all(head.as_bytes())?;
        self.to.write_all(&[0; 4][..1 + name_end.next_multiple_of(4) - name_end])?;
        self.to.write_all(content)?;
        self.to.write_all(&[0; 4][..content.len().next_multiple_of(4) - content.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_begin_at_multiples_of_four_and_carry_their_lengths() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.folder("bin").expect("memory");
        archive.program("bin/init", b"12345").expect("memory");
        archive.link("bin/sh", "init").expect("memory");
        archive.finish().expect("memory");
        let text = String::from_utf8_lossy(&bytes);
        let heads: Vec<_> = text.match_indices("070701").map(|(at, _)| at).collect();
        assert_eq!(heads.len(), 4);
        assert!(heads.iter().all(|at| at % 4 == 0), "{heads:?}");
        assert!(text.contains("bin/init\0") && text.ends_with("TRAILER!!!\0\0\0\0"), "{text:?}");
        assert_eq!(&text[heads[1] + 54..heads[1] + 62], "00000005");
    }
}
