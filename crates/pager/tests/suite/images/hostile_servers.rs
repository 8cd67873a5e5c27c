//! Servers that answer something else than the image.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use afresh_memory::{Memfd, SealedImageFile, SealedMemfd};
use afresh_pager::images::{ImageAnswer, ImageClientError};
use afresh_store::Pages;
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::socket;

use super::*;

/// A server that passes each connection to `answer`.
fn hostile(path: &Path, answer: impl Fn(&mut UnixStream) + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        // The thread ends with the process.
        while let Ok((mut stream, _)) = listener.accept() {
            let mut request = [0; 72];
            let mut fds = Vec::new();
            // A client that has ended gets no answer.
            if socket::receive(&stream, &mut request, &mut fds).is_ok() {
                answer(&mut stream);
            }
        }
    });
}

/// Sends an answer with a file of `pages` pages.
fn send_file(stream: &UnixStream, bytes: usize, file: &OwnedFd) {
    let answer = ImageAnswer::Image { bytes: bytes as u64 }.encode();
    // The client may have ended.
    let _ = socket::send(stream, &answer, &[file.as_fd()]);
}

fn memfd(bytes: usize) -> Memfd {
    let file = Memfd::new(c"hostile").unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn owned(file: &Memfd) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

fn sealed(bytes: usize) -> OwnedFd {
    SealedMemfd::new(memfd(bytes)).unwrap().reopen().unwrap()
}

/// A kind of error that a client may return.
type ErrorMatch = fn(&ImageClientError) -> bool;
/// The answer of a server to a connection, given the length of the right file.
type Behaviour = fn(&mut UnixStream, usize);

const BEHAVIOURS: [(&str, Behaviour, ErrorMatch); 9] = [
    (
        "an unsealed file",
        |stream, bytes| send_file(stream, bytes, &owned(&memfd(bytes))),
        |error| matches!(error, ImageClientError::File(_)),
    ),
    (
        "a sealed file that is too short",
        |stream, bytes| send_file(stream, bytes, &sealed(bytes - PAGE_SIZE)),
        |error| matches!(error, ImageClientError::File(_)),
    ),
    (
        "a sealed file that is too long",
        |stream, bytes| send_file(stream, bytes, &sealed(bytes + PAGE_SIZE)),
        |error| matches!(error, ImageClientError::File(_)),
    ),
    (
        "another length",
        |stream, bytes| send_file(stream, bytes - 1, &sealed(bytes)),
        |error| matches!(error, ImageClientError::Answer),
    ),
    (
        "a file of a disk",
        |stream, bytes| send_file(stream, bytes, &std::fs::File::open("/dev/zero").unwrap().into()),
        |error| matches!(error, ImageClientError::File(_)),
    ),
    (
        "an answer without its file",
        |stream, bytes| {
            let _ = stream.write_all(&ImageAnswer::Image { bytes: bytes as u64 }.encode());
        },
        |error| matches!(error, ImageClientError::Answer),
    ),
    (
        "an end in the middle",
        |stream, bytes| {
            let _ = stream.write_all(&ImageAnswer::Image { bytes: bytes as u64 }.encode()[..9]);
        },
        |error| matches!(error, ImageClientError::Closed),
    ),
    (
        "other bytes",
        |stream, _| {
            let _ = stream.write_all(&[b'x'; 24]);
        },
        |error| matches!(error, ImageClientError::Answer),
    ),
    (
        "silence",
        |_, _| std::thread::park_timeout(TEST_TIMEOUT),
        |error| matches!(error, ImageClientError::Server(_)),
    ),
];

#[test]
fn a_process_makes_its_own_image_whatever_a_server_answers() {
    for (name, behaviour, expected) in BEHAVIOURS {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = save(&dir.path().join("store"), "a", 7, Encoding::Raw);
        let layout = SealedImageFile::new(snapshot.pages(), &Pages::occupied(&snapshot)).unwrap();
        let bytes = layout.file_pages() * PAGE_SIZE;
        let socket = dir.path().join("images.sock");
        hostile(&socket, move |stream| behaviour(stream, bytes));
        let (client, reports) = client(&socket);
        let end = Instant::now() + TEST_TIMEOUT;
        loop {
            match client.fetch(&snapshot) {
                Ok(_) => panic!("{name}: it was accepted"),
                Err(error) if expected(&error) => break,
                // A busy host can be late with any answer.
                Err(ImageClientError::Server(_)) if Instant::now() < end => {}
                Err(error) => panic!("{name}: {error}"),
            }
        }
        for _ in 0..2 {
            assert!(has_content(open(&snapshot, &client).pages(), 7), "{name}");
        }
        // On a busy host late answers are another kind.
        assert!((1..=2).contains(&reports.load(Ordering::Relaxed)), "{name}");
    }
}

#[test]
fn a_planted_lack_of_a_check_is_caught() {
    let test = "images::hostile_servers::a_process_makes_its_own_image_whatever_a_server_answers";
    must_be_caught(&[Bug::Unsealed], &[test]);
}
