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
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::Mapping;

/// Bytes that complete a piece.
const PIECE_SIZE: usize = 64 << 10;
/// Searches for paths of directories that complete a piece, however short its text is.
const PIECE_SEARCHES: usize = 64;

/// One of the files: the memory that it lists, and whether with sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) struct ProcMaps {
    memory: u32,
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
            let path = mapping.share.or(mapping.origin);
            let path = path.map(|file| self.mapped_path(file.node, paths));
            let name = match &path {
                Some(path) => path.as_str(),
                None => self.layout_of(maps.memory)?.name(&range).unwrap_or_default(),
            };
            self.describe_mapping(&mut text, (&range, mapping), name, maps.sized);
            next = Some(range.end);
            if text.len() >= PIECE_SIZE || paths.searches() - searches >= PIECE_SEARCHES {
                break;
            }
        }
        next.map(|next| (text, next))
    }

    /// Adds a mapping to a text.
    fn describe_mapping(
        &self,
        text: &mut String,
        (range, mapping): (&Range<u64>, &Mapping),
        name: &str,
        sized: bool,
    ) {
        let protection = mapping.protection;
        let letter = |bit: i32, letter| if protection & bit as u64 == 0 { '-' } else { letter };
        let (r, w) = (letter(libc::PROT_READ, 'r'), letter(libc::PROT_WRITE, 'w'));
        let x = letter(libc::PROT_EXEC, 'x');
        let shared = if mapping.share.is_some() { 's' } else { 'p' };
        let file = mapping.share.or(mapping.origin);
        let (offset, inode) = file
            .map_or((0, 0), |file| (file.offset(range.start), self.tree.inode_number(file.node)));
        let (start, end) = (range.start, range.end);
        let line = format!("{start:08x}-{end:08x} {r}{w}{x}{shared} {offset:08x} 00:00 {inode}");
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
