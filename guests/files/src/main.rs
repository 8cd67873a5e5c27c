//! A command that uses files in every way that Rust's library has, and panics where one is not as
//! it should be. Its results are the same each time, and must not exist when it begins.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::time::{Duration, UNIX_EPOCH};

fn main() {
    assert!(!fs::exists("/left").expect("the root can be asked"), "a run before left something");
    fs::create_dir_all("/left/a/b").expect("directories");
    let error = fs::create_dir("/left/a").expect_err("it is there");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);

    let path = "/left/a/b/file";
    fs::write(path, b"hello world").expect("a new file");
    let mut file = OpenOptions::new().read(true).write(true).open(path).expect("opens again");
    file.seek(SeekFrom::Start(6)).expect("seeks");
    file.write_all(b"there").expect("writes");
    file.seek(SeekFrom::End(10_000)).expect("seeks beyond the end");
    file.write_all(b"!").expect("leaves a hole");
    let mut bytes = Vec::new();
    file.rewind().expect("goes back");
    file.read_to_end(&mut bytes).expect("reads all of it");
    assert_eq!(bytes.len(), 10_012);
    assert_eq!(&bytes[..11], b"hello there");
    assert!(bytes[11..10_011].iter().all(|byte| *byte == 0), "a hole is zeros");
    file.set_len(5).expect("cuts it");
    file.set_times(fs::FileTimes::new().set_modified(UNIX_EPOCH + Duration::from_secs(77)))
        .expect("sets times");
    let meta = file.metadata().expect("tells");
    assert_eq!((meta.len(), meta.is_file()), (5, true));
    assert_eq!(meta.modified().expect("has a time"), UNIX_EPOCH + Duration::from_secs(77));
    drop(file);

    let mut log = OpenOptions::new().append(true).create(true).open("/left/log").expect("a log");
    for line in 0..3 {
        writeln!(log, "line {line}").expect("appends");
    }
    assert_eq!(fs::read_to_string("/left/log").expect("reads"), "line 0\nline 1\nline 2\n");

    fs::rename(path, "/left/moved").expect("moves");
    assert_eq!(File::open(path).expect_err("is gone").kind(), ErrorKind::NotFound);
    fs::hard_link("/left/moved", "/left/twin").expect("links");
    fs::copy("/left/twin", "/left/copy").expect("copies");
    let open = File::open("/left/twin").expect("opens");
    fs::remove_file("/left/twin").expect("removes");
    let mut bytes = String::new();
    (&open).read_to_string(&mut bytes).expect("what is open stays");
    assert_eq!(bytes, "hello");

    fs::remove_dir("/left/a").expect_err("it is not empty");
    fs::remove_dir_all("/left/a").expect("removes all of it");
    let mut names: Vec<String> = fs::read_dir("/left")
        .expect("lists")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["copy", "log", "moved"]);
    for outside in ["/../etc/passwd", "/left/../../etc/passwd"] {
        fs::read(outside).expect_err("nothing leads out of the tree");
    }
    println!("files are as they should be");
}
