//! The limit of descriptors that granted directories take. Alone in its process, whose limit it
//! changes.

use afresh_files::{Access, HostHandle, HostOpening, Refused};

#[test]
fn descriptors_of_guests_leave_half_to_the_process() {
    let directory = tempfile::tempdir().unwrap();
    let handle = HostHandle::grant(directory.path(), true).unwrap();
    let before = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit { current: Some(400), ..before };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let how = HostOpening { access: Access::both(), create: true, ..HostOpening::default() };
    let mut open = Vec::new();
    let refused = loop {
        match handle.open(b"file", how) {
            Ok(file) => open.push(file),
            Err(error) => break error,
        }
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, before).unwrap();
    assert_eq!(refused, Refused::Host(rustix::io::Errno::MFILE));
    assert!((100..=200).contains(&open.len()), "{}", open.len());
}
