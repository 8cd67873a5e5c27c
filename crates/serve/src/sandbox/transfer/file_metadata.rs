//! Metadata of files: names and values that a client stores with a file, as E2B's agent does in
//! extended attributes.
//!
//! Promises: they follow the file when it is renamed, and the state of the sandbox in forks,
//! rollbacks and pauses. They count in its files. May break it: a program that changes the folder
//! `DIRECTORY`, which harms its own sandbox.

use std::collections::BTreeMap;

use afresh::files::{Node, Refused, Time, Tree};
use hyper::{HeaderMap, StatusCode};

use crate::error_response::ErrorResponse;

/// The folder with a file for each that has metadata, under the number of its node, which no other
/// file gets.
const DIRECTORY: &str = "/var/lib/afresh/metadata";
/// The headers of an upload that carry them.
const PREFIX: &str = "x-metadata-";
/// Maximum bytes of the names and values of a file.
const MAX_BYTES: usize = 4 << 10;
/// The same in JSON, whose escapes take up to six bytes for one.
const MAX_STORED: u64 = 8 * MAX_BYTES as u64;

pub(crate) type FileMetadata = BTreeMap<String, String>;

/// The metadata that an upload carries.
pub(crate) fn read(headers: &HeaderMap) -> Result<FileMetadata, ErrorResponse> {
    let mut found = FileMetadata::new();
    let mut bytes = 0;
    for (name, value) in headers {
        let Some(name) = name.as_str().strip_prefix(PREFIX) else { continue };
        let bad = |why: String| ErrorResponse::new(StatusCode::BAD_REQUEST, why);
        let value = value.to_str().map_err(|_| bad(format!("the metadata `{name}` is no text")))?;
        bytes += name.len() + value.len();
        if bytes > MAX_BYTES {
            return Err(bad(format!("the metadata of a file has at most {MAX_BYTES} bytes")));
        }
        found.insert(name.to_owned(), value.to_owned());
    }
    Ok(found)
}

fn place(node: Node) -> String {
    format!("{DIRECTORY}/{}", node.0)
}

/// The metadata of a file.
pub(crate) fn of(tree: &Tree, node: Node) -> FileMetadata {
    let stored = tree.read_path(place(node), MAX_STORED).unwrap_or_default();
    serde_json::from_slice(&stored).unwrap_or_default()
}

/// Sets the metadata of a file, in place of those before.
pub(crate) fn set(tree: &mut Tree, node: Node, metadata: &FileMetadata) -> Result<(), Refused> {
    let place = place(node);
    if !metadata.is_empty() {
        let text = serde_json::to_vec(metadata).unwrap_or_default();
        return tree.write_path(&place, &text, Time::now()).map(drop);
    }
    match tree.find(&place) {
        Ok(_) => tree.remove_path(&place, Time::now()),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use afresh::files::Budget;

    use super::*;

    #[test]
    fn metadata_belong_to_the_file_and_not_to_its_name() {
        let mut tree = Tree::new(Budget::default());
        let node = tree.write_path("/a", b"1", Time::now()).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("x-metadata-author", "me".parse().unwrap());
        headers.insert("x-other", "not".parse().unwrap());
        let metadata = read(&headers).unwrap();
        assert_eq!(metadata, [("author".to_owned(), "me".to_owned())].into());
        set(&mut tree, node, &metadata).unwrap();
        assert_eq!(of(&tree, node), metadata);
        let other = tree.write_path("/b", b"1", Time::now()).unwrap();
        assert!(of(&tree, other).is_empty());
        set(&mut tree, node, &FileMetadata::new()).unwrap();
        assert!(of(&tree, node).is_empty());
        headers.insert("x-metadata-long", "x".repeat(MAX_BYTES).parse().unwrap());
        assert!(read(&headers).is_err());
    }
}
