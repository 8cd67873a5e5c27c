//! Operations on files of a sandbox in the shape of the E2B agent, by Connect with JSON.
//! `file_transfer` has whole files.
//!
//! Promises: a relative path starts in the home directory; no path leads out of the sandbox tree; a
//! file that does not fit leaves the tree unchanged.

use std::sync::Arc;

use afresh::files::{DirEntry, Kind, Refused, Rename, Time, Tree, Walk};
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::sandbox::agent::connect::{self};
use crate::sandbox::agent::watch_requests;
use crate::sandbox::http::authorization::AuthorizedSandbox;
use crate::sandbox::http::response::{answer, json};
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::request_body::requests::FilesystemRequest;
use crate::sandbox::transfer::file_entry::{absolute, entry, meaning};

type All = State<Arc<Sandboxes>>;

/// Maximum bytes of the paths and metadata in one listing.
const MAX_LISTING_BYTES: usize = 4 << 20;
/// Maximum levels of directories in one listing.
const MAX_DEPTH: u32 = 32;
/// Maximum entries of one listing.
const MAX_ENTRIES: usize = 10_000;

/// The sandbox is there.
pub(crate) async fn health(_: AuthorizedSandbox) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The entries below a directory, up to a depth; those of a directory follow it.
fn listing(tree: &Tree, path: &str, depth: u32) -> Result<Vec<Value>, Refused> {
    let mut found = Vec::new();
    let mut room = ListingBudget { entries: MAX_ENTRIES, bytes: MAX_LISTING_BYTES };
    let path = path.trim_end_matches('/').to_owned();
    // The entries that are left, the next one last.
    let mut left = children(tree, &path, depth.clamp(1, MAX_DEPTH), &mut room)?;
    while let Some((path, kind, depth)) = left.pop() {
        let entry = entry(tree, &path)?;
        room.take(0, metadata_bytes(&entry))?;
        found.push(entry);
        if kind == Kind::Directory && depth > 1 {
            left.extend(children(tree, &path, depth - 1, &mut room)?);
        }
    }
    Ok(found)
}

fn metadata_bytes(entry: &Value) -> usize {
    let metadata = entry["metadata"].as_object().into_iter().flatten();
    metadata.map(|(name, value)| name.len() + value.as_str().map_or(0, str::len)).sum()
}

/// The entries that a listing may still have, and the bytes of their paths and metadata.
struct ListingBudget {
    entries: usize,
    bytes: usize,
}

impl ListingBudget {
    /// Takes room for entries before their paths are made.
    fn take(&mut self, entries: usize, bytes: usize) -> Result<(), Refused> {
        let left = self.entries.checked_sub(entries).zip(self.bytes.checked_sub(bytes));
        (self.entries, self.bytes) = left.ok_or(Refused::TooLarge)?;
        Ok(())
    }
}

/// The entries of a directory, the first one last, with the levels from there on.
fn children(
    tree: &Tree,
    path: &str,
    depth: u32,
    room: &mut ListingBudget,
) -> Result<Vec<(String, Kind, u32)>, Refused> {
    let listed = tree.list_path(if path.is_empty() { "/" } else { path })?;
    let bytes = listed.iter().map(|one| path.len() + 1 + one.name.len()).sum();
    room.take(listed.len(), bytes)?;
    let below = |one: &DirEntry| format!("{path}/{}", String::from_utf8_lossy(&one.name));
    Ok(listed.iter().rev().map(|one| (below(one), one.kind, depth)).collect())
}

/// Performs a file operation for the agent. One that fails leaves the tree as it was.
fn operate(
    tree: &mut Tree,
    user: User,
    method: &str,
    asked: &FilesystemRequest,
) -> Result<Value, Refused> {
    let mut changed = tree.clone();
    let said = operate_on(&mut changed, user, method, asked)?;
    *tree = changed;
    Ok(said)
}

fn operate_on(
    tree: &mut Tree,
    user: User,
    method: &str,
    asked: &FilesystemRequest,
) -> Result<Value, Refused> {
    let absolute = |path: &str| absolute(path, user);
    let path = absolute(&asked.path);
    match method {
        "Stat" => Ok(json!({ "entry": entry(tree, &path)? })),
        "ListDir" => {
            if tree.stat_path(&path)?.kind != Kind::Directory {
                return Err(Refused::NotDirectory);
            }
            Ok(json!({ "entries": listing(tree, &path, asked.depth)? }))
        }
        "MakeDir" => {
            if tree.find(&path).is_ok() {
                return Err(Refused::Exists);
            }
            tree.make_directories(&path, Time::now())?;
            Ok(json!({ "entry": entry(tree, &path)? }))
        }
        "Move" => {
            let (from, to) = (absolute(&asked.source), absolute(&asked.destination));
            if let Some((above, _)) = to.trim_end_matches('/').rsplit_once('/') {
                tree.make_directories(above, Time::now())?;
            }
            let walk =
                |tree: &Tree, path: &str| tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).name());
            let places = (walk(tree, &from)?, walk(tree, &to)?);
            tree.rename_at(&places.0, &places.1, Rename::default(), Time::now())?;
            Ok(json!({ "entry": entry(tree, &to)? }))
        }
        // `Remove`, the last there is. To remove nothing is no error for the agent.
        _ => match tree.remove_path(&path, Time::now()) {
            Err(Refused::Missing) if tree.find(&path).is_err() => Ok(json!({})),
            removed => removed.map(|()| json!({})),
        },
    }
}

/// The agent's operations on files.
pub(crate) async fn filesystem(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Path(method): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let user = match User::of_request(&headers) {
        Ok(user) => user.unwrap_or(User::of(sandbox.settings.root)),
        Err(refused) => return refused.into_response(),
    };
    if watch_requests::METHODS.contains(&method.as_str()) {
        let watching = watch_requests::answer(&all, &sandbox, user, &method, &headers, &body);
        return watching.await.unwrap_or_else(|failed| match method.as_str() {
            "WatchDir" => failed.into_stream(),
            _ => failed.into_response(),
        });
    }
    operate_once(&all, &sandbox, user, method, &body).await
}

async fn operate_once(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    user: User,
    method: String,
    body: &[u8],
) -> Response {
    if !["Stat", "ListDir", "MakeDir", "Move", "Remove"].contains(&method.as_str()) {
        let message = format!("this sandbox has no {method}");
        return connect::refused(StatusCode::NOT_IMPLEMENTED, "unimplemented", &message);
    }
    let asked: FilesystemRequest = match json(body) {
        Ok(asked) => asked,
        Err(refusal) => {
            return connect::refused(refusal.status, "invalid_argument", &refusal.message);
        }
    };
    let reads = ["Stat", "ListDir"].contains(&method.as_str());
    let operate = move |tree: &mut Tree| {
        Ok(operate(tree, user, &method, &asked).map_err(|error| {
            let path = if asked.path.is_empty() { &asked.source } else { &asked.path };
            let (status, code) = meaning(&error);
            (status, code, format!("{path}: {error}"))
        }))
    };
    let done = match reads {
        true => all.tree(sandbox, move |tree| operate(&mut tree.clone())).await,
        false => all.files(sandbox, operate).await,
    };
    match done {
        Ok(Ok(said)) => answer(StatusCode::OK, &said),
        Ok(Err((status, code, message))) => connect::refused(status, code, &message),
        Err(refusal) => refusal.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use afresh::files::Budget;

    use super::*;

    fn ask(tree: &mut Tree, method: &str, asked: Value) -> Result<Value, Refused> {
        operate(tree, User::User, method, &serde_json::from_value(asked).unwrap())
    }

    #[test]
    fn the_agents_operations_do_what_its_clients_expect() {
        let mut tree = Tree::new(Budget::default());
        let made = ask(&mut tree, "MakeDir", json!({"path": "dir/deep"})).unwrap();
        assert_eq!(made["entry"]["path"], "/home/user/dir/deep");
        assert_eq!(made["entry"]["permissions"], "drwxr-xr-x");
        assert_eq!(ask(&mut tree, "MakeDir", json!({"path": "dir"})), Err(Refused::Exists));
        tree.write_path("/home/user/dir/a.txt", b"12345", Time::now()).unwrap();
        let stat = ask(&mut tree, "Stat", json!({"path": "~/dir/a.txt"})).unwrap();
        assert_eq!(
            (&stat["entry"]["size"], &stat["entry"]["name"]),
            (&json!("5"), &json!("a.txt"))
        );
        assert_eq!(stat["entry"]["type"], "FILE_TYPE_FILE");
        let names = |listed: Value| -> Vec<String> {
            let entries = listed["entries"].as_array().unwrap().clone();
            entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
        };
        let one = ask(&mut tree, "ListDir", json!({"path": "/home/user", "depth": 1})).unwrap();
        assert_eq!(names(one), ["dir"]);
        let two = ask(&mut tree, "ListDir", json!({"path": "/home/user", "depth": 2})).unwrap();
        assert_eq!(names(two), ["dir", "a.txt", "deep"]);
        let long = vec![b'x'; 4000];
        for number in 0..1100 {
            let file = tree.write_path(format!("/many/{number}"), b"", Time::now()).unwrap();
            tree.set_attribute(file, b"user.e2b.long", Some(&long), Time::now()).unwrap();
        }
        let many = ask(&mut tree, "ListDir", json!({"path": "/many", "depth": 1}));
        assert_eq!(many, Err(Refused::TooLarge));
        let moved = json!({"source": "dir/a.txt", "destination": "/new/b.txt"});
        assert_eq!(ask(&mut tree, "Move", moved).unwrap()["entry"]["path"], "/new/b.txt");
        assert_eq!(tree.read_path("/new/b.txt", 10).unwrap(), b"12345");
        let before = tree.clone();
        for (method, asked, refusal) in [
            ("Move", json!({"source": "nothing", "destination": "/fresh/x"}), Refused::Missing),
            ("Move", json!({"source": "dir", "destination": "dir/fresh/x"}), Refused::Invalid),
            (
                "MakeDir",
                json!({"path": format!("/fresh/{}", "x".repeat(300))}),
                Refused::NameTooLong,
            ),
        ] {
            assert_eq!(ask(&mut tree, method, asked), Err(refusal), "{method}");
            assert!(tree == before, "{method} left something");
        }
        for (method, asked) in [
            ("Stat", json!({"path": "dir/a.txt"})),
            ("Move", json!({"source": "nothing", "destination": "x"})),
            ("ListDir", json!({"path": "nothing"})),
        ] {
            assert_eq!(ask(&mut tree, method, asked), Err(Refused::Missing), "{method}");
        }
        assert_eq!(
            ask(&mut tree, "ListDir", json!({"path": "/new/b.txt"})),
            Err(Refused::NotDirectory)
        );
        for _ in 0..2 {
            ask(&mut tree, "Remove", json!({"path": "dir"})).unwrap();
        }
        assert_eq!(names(ask(&mut tree, "ListDir", json!({"path": "."})).unwrap()), [""; 0]);
    }

    /// The paths of ten thousand entries far below the root would be forty megabytes.
    #[test]
    fn a_listing_is_refused_before_its_paths_are_made() {
        let mut tree = Tree::new(Budget::default());
        let deep = format!("/{}", "x".repeat(250)).repeat(14);
        let bytes = deep.len() + 5;
        let fit = MAX_LISTING_BYTES / bytes;
        for number in 0..fit {
            tree.write_path(format!("{deep}/{number:04}"), b"", Time::now()).unwrap();
        }
        let mut room = ListingBudget { entries: MAX_ENTRIES, bytes: MAX_LISTING_BYTES };
        assert_eq!(children(&tree, &deep, 1, &mut room).unwrap().len(), fit);
        assert_eq!(
            (room.entries, room.bytes),
            (MAX_ENTRIES - fit, MAX_LISTING_BYTES - fit * bytes)
        );
        assert_eq!(listing(&tree, &deep, 1).unwrap().len(), fit);
        tree.write_path(format!("{deep}/more"), b"", Time::now()).unwrap();
        assert_eq!(listing(&tree, &deep, 1), Err(Refused::TooLarge));
        // Entries of directories that follow count as well.
        assert_eq!(listing(&tree, "/", MAX_DEPTH), Err(Refused::TooLarge));
    }

    #[test]
    fn nothing_leads_out_of_the_tree() {
        let mut tree = Tree::new(Budget::default());
        let path = absolute("../../../../etc/passwd", User::User);
        assert_eq!(tree.read_path(&path, 10), Err(Refused::Missing));
        tree.write_path("/a", b"", Time::now()).unwrap();
        for path in ["/", "//", "/.."] {
            assert!(ask(&mut tree, "Remove", json!({ "path": path })).is_err(), "{path}");
        }
    }
}
