//! The directory that a program starts in.

use std::path::PathBuf;

use afresh_files::{Node, Time, Tree};

use super::Program;
use crate::error::WarmError;
use crate::sentry;

impl Program {
    /// As [`Program::directory`], but makes a missing directory, which is empty except for granted
    /// files below it.
    #[must_use]
    pub fn make_directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.makes_directory = true;
        self.directory(path)
    }

    /// As [`Program::make_directory`], but the program starts in `/` if the directory cannot be
    /// made.
    #[must_use]
    pub fn prefer_directory(mut self, path: impl Into<PathBuf>) -> Self {
        self.prefers_directory = true;
        self.make_directory(path)
    }

    /// Finds or makes the directory that the program starts in.
    pub(super) fn start_directory(
        &self,
        tree: &mut Tree,
        is_made: bool,
    ) -> Result<Node, WarmError> {
        let path = sentry::bytes(&self.directory);
        let found = match is_made || self.makes_directory {
            true => tree.make_directories(path, Time::default()),
            false => tree.find(path),
        };
        let found = if self.prefers_directory { found.or_else(|_| tree.find("/")) } else { found };
        found.map_err(|error| WarmError::File { path: self.directory.clone(), error })
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::Budget;

    use super::*;

    #[test]
    fn a_program_starts_in_the_root_where_its_directory_cannot_be_made() {
        let mut tree = Tree::new(Budget::default());
        tree.write_path("/file", b"", Time::default()).unwrap();
        let root = tree.find("/").unwrap();
        let program = Program::new("/bin/true");
        let preferred = program.clone().prefer_directory("/file/sub");
        assert_eq!(preferred.start_directory(&mut tree, false).unwrap(), root);
        let preferred = program.clone().prefer_directory("/made/sub");
        let made = preferred.start_directory(&mut tree, false).unwrap();
        assert_eq!(made, tree.find("/made/sub").unwrap());
        assert!(program.make_directory("/file/sub").start_directory(&mut tree, false).is_err());
    }
}
