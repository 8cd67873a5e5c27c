//! Processes of other users at both ends of the socket. The tests need the rights of root.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};

use afresh_pager::images::ImageClientError;
use afresh_sys::{child_passes, socket};

use super::*;

const USER: u32 = 12345;

/// Whether this process can become another user.
fn is_root() -> bool {
    let root = socket::own_user() == 0;
    if !root {
        println!("SKIPPED: no rights of root");
    }
    root
}

/// Makes this process one of `user`.
fn become_user(user: u32) -> bool {
    // SAFETY: a system call without pointers, in a forked child with one thread.
    unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) == 0 }
}

/// A directory that all users can read.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn a_server_answers_no_other_user() {
    if !is_root() {
        return;
    }
    let dir = directory();
    let server = Server::start(dir.path(), BUDGET);
    let connects = || {
        child_passes(|| {
            if !become_user(USER) {
                return false;
            }
            let Ok(mut stream) = UnixStream::connect(&server.socket) else { return false };
            stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            std::io::Read::read(&mut stream, &mut [0]).is_ok_and(|received| received == 0)
        })
    };
    assert!(!connects(), "the mode of the socket");
    std::fs::set_permissions(&server.socket, PermissionsExt::from_mode(0o666)).unwrap();
    assert!(connects());
    assert_eq!(lock(&server.events).other_users, [USER]);
}

#[test]
fn a_client_takes_no_image_from_another_user() {
    if !is_root() {
        return;
    }
    let dir = directory();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let (socket, ready) = (dir.path().join("images.sock"), dir.path().join("ready"));
    chown(dir.path(), Some(USER), None).unwrap();
    let listening = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            child_passes(|| {
                if !become_user(USER) {
                    return false;
                }
                let listener = UnixListener::bind(&socket).unwrap();
                std::fs::write(&ready, []).unwrap();
                listener.accept().is_ok()
            })
        });
        while !ready.exists() {
            assert!(!server.is_finished());
            std::thread::sleep(Duration::from_millis(5));
        }
        // The directory is that of another user.
        let (client, _) = client(&socket);
        assert!(matches!(client.fetch(&snapshot), Err(ImageClientError::Unprotected)));
        chown(dir.path(), Some(0), None).unwrap();
        let error = client.fetch(&snapshot).unwrap_err();
        assert!(matches!(error, ImageClientError::User(USER)), "{error}");
        server.join().unwrap()
    });
    assert!(listening);
}

#[test]
fn a_socket_that_others_can_replace_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
    let server = Server::start(dir.path(), BUDGET);
    let (client, reports) = client(&server.socket);
    assert!(has_content(&shared(&client, &snapshot), 7));
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    assert!(matches!(client.fetch(&snapshot), Err(ImageClientError::Unprotected)));
    for _ in 0..2 {
        assert!(has_content(open(&snapshot, &client).pages(), 7));
    }
    assert_eq!(reports.load(Ordering::Relaxed), 1);
}
