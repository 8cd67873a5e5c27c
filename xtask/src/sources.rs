//! The texts of the repository: sources, manifests and documents.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::host::repository;

/// Extensions of files with prose.
const KINDS: [&str; 11] = ["rs", "md", "py", "pyi", "c", "h", "toml", "js", "mjs", "ts", "mts"];
/// Folders of built and fetched files.
const OTHERS: [&str; 3] = ["target", "node_modules", "corpus"];

/// The folder of the lists of words.
pub(crate) fn folder() -> PathBuf {
    repository().join("xtask/prose")
}

/// Sources and documents of the repository, with their texts, sorted by path.
pub(crate) fn files() -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for path in paths()? {
        let is_prose = path.extension().is_some_and(|kind| KINDS.iter().any(|k| kind == *k));
        // STYLE.md quotes bad sentences.
        if is_prose && !path.ends_with("STYLE.md") {
            let text = std::fs::read_to_string(repository().join(&path))
                .with_context(|| path.display().to_string())?;
            files.push((path.display().to_string(), text));
        }
    }
    Ok(files)
}

/// The files of the repository by their paths in it, sorted. Built and fetched files are omitted.
pub(crate) fn paths() -> Result<Vec<PathBuf>> {
    let root = repository();
    let mut paths = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_hidden = name.starts_with('.') && name != ".github";
            if kind.is_dir() && !is_hidden && !OTHERS.contains(&name.as_str()) {
                folders.push(path);
            } else if kind.is_file() {
                paths.push(path.strip_prefix(&root)?.to_owned());
            }
        }
    }
    paths.sort();
    Ok(paths)
}
