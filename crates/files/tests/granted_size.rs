//! The limit of files that this process has, in granted directories. Alone in its process, whose
//! limit it changes.

use afresh_files::{Access, HostHandle, HostOpening, Refused};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: u64 = 1 << 20;

#[test]
fn a_guest_that_extends_a_file_beyond_the_limit_gets_an_error_and_no_signal() {
    let directory = tempfile::tempdir().unwrap();
    let handle = HostHandle::grant(directory.path(), true).unwrap();
    let open = |access| {
        let how = HostOpening { access, create: true, ..HostOpening::default() };
        handle.open(b"file", how).unwrap()
    };
    let mut file = open(Access::both());
    let mut end = open(Access { append: true, ..Access::both() });
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum }).unwrap();
    for at in [LIMIT, LIMIT + 9, i64::MAX as u64 - 9] {
        assert_eq!(file.write_at(at, b"a"), Err(Refused::TooLarge));
        assert_eq!(file.set_size(at + 1), Err(Refused::TooLarge));
        assert_eq!(file.allocate(at, 1), Err(Refused::TooLarge));
        assert_eq!(file.write_at(at, b""), Ok(0));
    }
    assert_eq!(file.write_at(LIMIT - 2, b"abc"), Ok(2));
    assert_eq!(end.write(b"d"), Err(Refused::TooLarge));
    file.set_size(LIMIT - 1).unwrap();
    assert_eq!((end.write(b"de"), end.write(b"f")), (Ok(1), Err(Refused::TooLarge)));
    let mut bytes = [0; 4];
    assert_eq!((file.read_at(LIMIT - 2, &mut bytes), &bytes[..2]), (Ok(2), &b"ad"[..]));
    assert_eq!((file.allocate(0, LIMIT), file.set_size(LIMIT)), (Ok(()), Ok(())));
    assert_eq!(file.write(b"first"), Ok(5));
}
