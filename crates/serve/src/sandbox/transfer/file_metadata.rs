//! Metadata of files: names and values that a client stores with a file, in extended attributes as
//! E2B's agent does. Programs of Linux guests read and set them too.
//!
//! Promises: they follow the file when it is renamed, and the state of the sandbox in forks,
//! rollbacks and pauses. They count in its files.

use std::collections::BTreeMap;

use afresh::files::{Node, Refused, Time, Tree};
use hyper::{HeaderMap, StatusCode};

use crate::error_response::ErrorResponse;

/// The beginning of the names of attributes that are metadata, as in E2B.
const ATTRIBUTES: &[u8] = b"user.e2b.";
/// The headers of an upload that carry them.
const PREFIX: &str = "x-metadata-";
/// Maximum bytes of the names and values of a file.
const MAX_BYTES: usize = 4 << 10;

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

/// The metadata of a file. Attributes beyond the bytes that an upload may have are left out.
pub(crate) fn of(tree: &Tree, node: Node) -> FileMetadata {
    let mut found = FileMetadata::new();
    let mut bytes = 0;
    for name in tree.attribute_names(node).unwrap_or_default() {
        let Some(short) = name.strip_prefix(ATTRIBUTES) else { continue };
        let Ok(Some(value)) = tree.attribute(node, &name) else { continue };
        bytes += short.len() + value.len();
        if bytes > MAX_BYTES {
            break;
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        found.insert(text(short), text(&value));
    }
    found
}

/// Sets the metadata of a file, in place of those before.
pub(crate) fn set(tree: &mut Tree, node: Node, metadata: &FileMetadata) -> Result<(), Refused> {
    let now = Time::now();
    for name in tree.attribute_names(node)? {
        if name.starts_with(ATTRIBUTES) {
            tree.set_attribute(node, &name, None, now)?;
        }
    }
    for (name, value) in metadata {
        let name = [ATTRIBUTES, name.as_bytes()].concat();
        tree.set_attribute(node, &name, Some(value.as_bytes()), now)?;
    }
    Ok(())
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
        let own = tree.attribute(node, b"user.e2b.author").unwrap();
        assert_eq!(own.as_deref(), Some(&b"me"[..]));
        tree.set_attribute(node, b"user.other", Some(b"not"), Time::now()).unwrap();
        set(&mut tree, node, &FileMetadata::new()).unwrap();
        assert!(of(&tree, node).is_empty());
        assert!(tree.attribute(node, b"user.other").unwrap().is_some());
        // A program can set longer ones than an upload.
        tree.set_attribute(node, b"user.e2b.a", Some(b"\xff"), Time::now()).unwrap();
        let long = vec![b'x'; MAX_BYTES];
        tree.set_attribute(node, b"user.e2b.b", Some(&long), Time::now()).unwrap();
        assert_eq!(of(&tree, node), [("a".to_owned(), "\u{fffd}".to_owned())].into());
        headers.insert("x-metadata-long", "x".repeat(MAX_BYTES).parse().unwrap());
        assert!(read(&headers).is_err());
    }
}
