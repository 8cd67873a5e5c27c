//! Files of a sandbox as the E2B agent describes them, and their paths.

use afresh::files::{Kind, Refused, Stat, Tree, Walk};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::connect::ConnectError;
use crate::sandbox::http::user::User;
use crate::sandbox::transfer::file_metadata;

/// Maximum bytes of a path in Linux, with the byte that ends it.
const MAX_PATH_BYTES: usize = 4096;

/// A path in the form of the sandbox. Relative ones start in the user's home.
pub(crate) fn absolute(path: &str, user: User) -> String {
    let path = path.strip_prefix("~/").unwrap_or(path);
    if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", user.home()) }
}

/// Refuses a path that no file can have, before it is copied or hashed.
pub(crate) fn check_path(path: &str) -> Result<(), ErrorResponse> {
    if path.len() < MAX_PATH_BYTES {
        return Ok(());
    }
    let message =
        format!("a path of {} bytes is too long; it has fewer than {MAX_PATH_BYTES}", path.len());
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

/// A refusal as a status of HTTP and a code of Connect.
pub(crate) fn meaning(refused: &Refused) -> (StatusCode, &'static str) {
    match refused {
        Refused::Missing => (StatusCode::NOT_FOUND, "not_found"),
        Refused::Exists => (StatusCode::CONFLICT, "already_exists"),
        Refused::Full | Refused::TooLarge => {
            (StatusCode::INSUFFICIENT_STORAGE, "resource_exhausted")
        }
        Refused::NotPermitted | Refused::Busy => (StatusCode::FORBIDDEN, "permission_denied"),
        Refused::Layer(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        _ => (StatusCode::BAD_REQUEST, "invalid_argument"),
    }
}

pub(crate) fn refused(path: &str, refused: &Refused) -> ErrorResponse {
    ErrorResponse::new(meaning(refused).0, format!("{path}: {refused}"))
}

/// A refusal as an error of Connect.
pub(crate) fn connect_error(path: &str, refused: &Refused) -> ConnectError {
    ConnectError::new(meaning(refused).1, format!("{path}: {refused}"))
}

/// The name at the end of a path.
pub(crate) fn name(path: &str) -> &str {
    path.rsplit('/').find(|name| !name.is_empty()).unwrap_or("/")
}

/// The entry at a path, in the agent's form: a link has the type of its target.
pub(crate) fn entry(tree: &Tree, path: &str) -> Result<Value, Refused> {
    let link = tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).follow(false))?.node()?;
    let itself = tree.stat(link)?;
    let target = match itself.kind {
        Kind::Link => Some(tree.read_link(link)?),
        _ => None,
    };
    let stat = match target {
        Some(_) => tree.walk(path.as_bytes(), Walk::new(Tree::ROOT)).and_then(|found| found.node()),
        None => Ok(link),
    };
    let stat = stat.and_then(|node| tree.stat(node)).unwrap_or(itself);
    let mut entry = entry_info(path, &stat);
    let metadata = file_metadata::of(tree, stat.node);
    if !metadata.is_empty() {
        entry["metadata"] = json!(metadata);
    }
    if let Some(target) = target {
        entry["symlinkTarget"] = json!(resolved(path, &String::from_utf8_lossy(&target)));
        entry["isSymlink"] = json!(true);
    }
    Ok(entry)
}

/// The target of a link as an absolute path.
fn resolved(link: &str, target: &str) -> String {
    let (folder, _) = link.rsplit_once('/').unwrap_or_default();
    let whole =
        if target.starts_with('/') { target.to_owned() } else { format!("{folder}/{target}") };
    let mut names = Vec::new();
    for name in whole.split('/') {
        match name {
            "" | "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    format!("/{}", names.join("/"))
}

fn entry_info(path: &str, stat: &Stat) -> Value {
    let kind = match stat.kind {
        Kind::Directory => "FILE_TYPE_DIRECTORY",
        Kind::Link => "FILE_TYPE_SYMLINK",
        _ => "FILE_TYPE_FILE",
    };
    let nanos = stat.times.modified.nanos();
    let modified = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(nanos);
    json!({
        "name": name(path),
        "type": kind,
        "path": path,
        // Numbers of 64 bits are text in the JSON of protocol buffers.
        "size": stat.size.to_string(),
        "mode": stat.mode,
        "permissions": permissions(stat),
        "owner": "user",
        "group": "user",
        "modifiedTime": humantime::format_rfc3339_millis(modified).to_string(),
    })
}

/// A mode as `ls` writes it.
fn permissions(stat: &Stat) -> String {
    let first = match stat.kind {
        Kind::Directory => 'd',
        Kind::Link => 'l',
        _ => '-',
    };
    let bits = (0..9).map(|bit| match stat.mode >> (8 - bit) & 1 {
        1 => ['r', 'w', 'x'][bit % 3],
        _ => '-',
    });
    std::iter::once(first).chain(bits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_links_are_absolute() {
        assert_eq!(resolved("/home/user/link", "../x/./y"), "/home/x/y");
        assert_eq!(resolved("/link", "/a//b"), "/a/b");
    }
}
