//! Registries that ask who we are: by password, and by token.

use afresh_store::Encoding;
use afresh_store::remote::{Remote, RemoteError};

use super::local;
use super::servers::{Kind, Server, retry};
use super::stub::{Stub, answer};
use crate::support::bytes;

const USER: &str = "me";
const PASSWORD: &str = "secret-word";
/// `me:secret-word`, hashed by bcrypt.
const HTPASSWD: &str = "me:$2y$05$abcdefghijklmnopqrstuuUOabO4v2PoT/v47Y.znQK.9MsMDnesq\n";
/// `me:secret-word` in base64.
const PAIR: &str = "bWU6c2VjcmV0LXdvcmQ=";

const CHILD: &str = "AFRESH_TEST_LOGIN";

fn with_password(dir: &std::path::Path) -> Option<Server> {
    let file = dir.join("htpasswd");
    std::fs::write(&file, HTPASSWD).unwrap();
    let more = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", file.display());
    Server::start_with(Kind::Registry, &more)
}

fn open(server: &Server, password: &str) -> Remote {
    let url = format!("oci://{}/team/guest", server.address);
    Remote::open_with(&url, retry(), &[("user", USER), ("password", password)]).unwrap()
}

#[test]
fn a_registry_with_a_password_admits_only_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let Some(server) = with_password(dir.path()) else { return };
    let (here, snapshot, whole) = local(&dir.path().join("here"), 1, 300);
    let right = open(&server, PASSWORD);
    right.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
    assert!(bytes(&right.load("a").unwrap()) == whole);
    let wrong = open(&server, "guess");
    let error = wrong.load("a").unwrap_err();
    assert!(matches!(error, RemoteError::Refused { status: 401, .. }), "{error}");
    assert!(error.to_string().contains("AFRESH_REGISTRY_USER"), "{error}");
    assert!(!error.to_string().contains("guess"), "{error}");
    let error = wrong.push(&here, &snapshot, "b", Encoding::Raw, &mut |_| {}).unwrap_err();
    assert!(matches!(error, RemoteError::Refused { status: 401, .. }), "{error}");
    let error = server.remote(server.address, retry()).load("a").unwrap_err();
    assert!(matches!(error, RemoteError::Refused { status: 401, .. }), "{error}");
}

/// The child of [`dockers_configuration_is_used`].
#[test]
fn a_process_with_dockers_configuration() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let remote = Remote::open(&url, retry()).unwrap();
    assert_eq!(remote.name(), Some("a"));
    assert_eq!(remote.load("a").unwrap().state(), 1u32.to_le_bytes());
    println!("loaded");
}

#[test]
fn dockers_configuration_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let Some(server) = with_password(dir.path()) else { return };
    let (here, snapshot, _) = local(&dir.path().join("here"), 1, 30);
    open(&server, PASSWORD).push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
    let config = format!(r#"{{"auths": {{"{}": {{"auth": "{PAIR}"}}}}}}"#, server.address);
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let output =
        afresh_sys::test_command("remote_servers::login::a_process_with_dockers_configuration")
            .env(CHILD, format!("oci://{}/team/guest:a", server.address))
            .env("DOCKER_CONFIG", dir.path())
            .env_remove("AFRESH_REGISTRY_USER")
            .output()
            .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("loaded"), "{text}");
}

#[test]
fn a_registry_with_tokens_gets_one_for_each_scope() {
    // Gives a token to each client with the password.
    let tokens = Stub::new(|request| {
        if request.to_lowercase().contains("authorization: basic ") && request.contains(PAIR) {
            answer("200 OK", "", br#"{"token":"abc","expires_in":60}"#)
        } else {
            answer("403 No", "", b"{}")
        }
    });
    let address = tokens.address;
    // Takes any token.
    let more = format!("auth:\n  silly:\n    realm: http://{address}/token\n    service: here\n");
    let Some(server) = Server::start_with(Kind::Registry, &more) else { return };
    let dir = tempfile::tempdir().unwrap();
    let (here, snapshot, whole) = local(dir.path(), 1, 300);
    let right = open(&server, PASSWORD);
    right.push(&here, &snapshot, "a", Encoding::Raw, &mut |_| {}).unwrap();
    let pushed = tokens.requests();
    assert!(bytes(&open(&server, PASSWORD).load("a").unwrap()) == whole);
    let loaded = tokens.requests();
    // One token each, asked for once.
    assert_eq!((pushed.len(), loaded.len()), (1, 1), "{pushed:?} {loaded:?}");
    for word in ["service=here", "team%2Fguest", "push"] {
        assert!(pushed[0].contains(word), "{pushed:?}");
    }
    assert!(!loaded[0].contains("push"), "{loaded:?}");
    let error = open(&server, "guess").load("a").unwrap_err();
    assert!(matches!(error, RemoteError::Refused { status: 403, .. }), "{error}");
}
