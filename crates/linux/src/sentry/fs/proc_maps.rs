//! `/proc/<process>/maps` and `smaps`: a text with a line, or a paragraph, for each mapping.
//!
//! Promises: it takes a bounded amount of memory of this process, and a call that makes it ends at
//! its deadline. Each piece goes to a file in the file tree and counts there before the next one is
//! made. A mapping of a file whose path no call takes has no name.

use std::fmt::Write;
use std::ops::Range;

use afresh_files::Node;

use crate::sentry::fs::directory_paths::DirectoryPaths;
use crate::sentry::fs::machine_files::sizes;
use crate::sentry::fs::mounts::FileSystem;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::Mapping;

/// Bytes that complete a piece.
const PIECE_SIZE: usize = 64 << 10;
/// Searches for paths of directories that complete a piece, however short its text is.
const PIECE_SEARCHES: usize = 64;

/// One of the files: the memory that it lists, and whether with sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) struct ProcMaps {
    pub(in crate::sentry) memory: u32,
    sized: bool,
}

impl Kernel {
    /// The file of a process.
    pub(in crate::sentry) fn maps_of(&self, id: u32, sized: bool) -> Option<ProcMaps> {
        let memory = self.processes.info(id)?.memory;
        self.layout_of(memory).map(|_| ProcMaps { memory, sized })
    }

    /// The text of the mappings from `from` on, as far as a piece goes, and where the next piece
    /// begins; `None` after the last mapping. All pieces have `paths` in common.
    pub(in crate::sentry) fn maps_piece(
        &self,
        maps: ProcMaps,
        from: u64,
        paths: &mut DirectoryPaths,
    ) -> Option<(String, u64)> {
        let (mut text, mut next, searches) = (String::new(), None, paths.searches());
        for (range, mapping) in self.layout_of(maps.memory)?.all_from(from) {
            let name = self.mapping_name(maps.memory, (&range, mapping), paths);
            self.describe_mapping(&mut text, (&range, mapping), &name, maps.sized);
            next = Some(range.end);
            if text.len() >= PIECE_SIZE || paths.searches() - searches >= PIECE_SEARCHES {
                break;
            }
        }
        next.map(|next| (text, next))
    }

    /// The path or the name of a mapping; nothing for one without.
    pub(in crate::sentry) fn mapping_name(
        &self,
        memory: u32,
        (range, mapping): (&Range<u64>, &Mapping),
        paths: &mut DirectoryPaths,
    ) -> String {
        match mapping.share.or(mapping.origin) {
            Some(file) => self.mapped_path(file.node, paths),
            None => {
                let layout = self.layout_of(memory);
                layout.and_then(|layout| layout.name(range)).unwrap_or_default().to_owned()
            }
        }
    }

    /// The rights of a mapping, as its process asked for them.
    pub(in crate::sentry) fn asked_protection(mapping: &Mapping) -> u64 {
        let hidden = if mapping.traits.unreadable { libc::PROT_READ as u64 } else { 0 };
        mapping.protection & !hidden
    }

    /// Device, inode number and offset of a mapping; zeros for memory without a file.
    pub(in crate::sentry) fn mapped_file(&self, start: u64, mapping: &Mapping) -> (u32, u64, u64) {
        mapping.share.or(mapping.origin).map_or((0, 0, 0), |file| {
            let device = FileSystem::of(&self.tree, file.node).device();
            (device, self.tree.inode_number(file.node), file.offset(start))
        })
    }

    /// Notes that a file lists the mappings of a memory.
    pub(in crate::sentry) fn note_map_file(&mut self, node: Node, memory: u32) {
        // Closed ones are forgotten when there are twice as many.
        if self.map_files.len().is_power_of_two() {
            let tree = &self.tree;
            self.map_files.retain(|node, _| tree.stat(*node).is_ok());
        }
        self.map_files.insert(node, memory);
    }

    /// Adds a mapping to a text.
    fn describe_mapping(
        &self,
        text: &mut String,
        (range, mapping): (&Range<u64>, &Mapping),
        name: &str,
        sized: bool,
    ) {
        let protection = Self::asked_protection(mapping);
        let letter = |bit: i32, letter| if protection & bit as u64 == 0 { '-' } else { letter };
        let (r, w) = (letter(libc::PROT_READ, 'r'), letter(libc::PROT_WRITE, 'w'));
        let x = letter(libc::PROT_EXEC, 'x');
        let shared = if mapping.share.is_some() { 's' } else { 'p' };
        let (device, inode, offset) = self.mapped_file(range.start, mapping);
        let (start, end) = (range.start, range.end);
        let line =
            format!("{start:08x}-{end:08x} {r}{w}{x}{shared} {offset:08x} 00:{device:02x} {inode}");
        // Names are in one column. Writing to a string does not fail.
        let _ = match name.is_empty() {
            true => writeln!(text, "{line}"),
            false => writeln!(text, "{line:<72} {name}"),
        };
        if sized {
            let resident = if mapping.reserved { 0 } else { end - start };
            let flags = [
                (r == 'r', " rd"),
                (w == 'w', " wr"),
                (x == 'x', " ex"),
                (shared == 's', " sh"),
                (mapping.locked, " lo"),
            ];
            let flags: String =
                flags.iter().filter(|(has, _)| *has).map(|(_, flag)| *flag).collect();
            let flags = format!("THPeligible:           0\nVmFlags:{flags} mr mw me \n");
            let locked = if mapping.locked { resident } else { 0 };
            *text += &sizes(end - start, resident, locked, shared == 's', &flags);
        }
    }

    /// The path of a mapped file.
    fn mapped_path(&self, node: Node, paths: &mut DirectoryPaths) -> String {
        let path = paths.path_of_file(&self.tree, node);
        // As the kernel writes it.
        let path = path.map(|path| String::from_utf8_lossy(&path).replace('\n', "\\012"));
        let is_there = || self.tree.stat(node).is_ok_and(|stat| stat.links > 0);
        path.unwrap_or_else(|| match is_there() {
            true => String::new(),
            false => "/ (deleted)".to_owned(),
        })
    }
}
