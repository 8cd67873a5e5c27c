//! A memory limit of the host is an error of the pool, not the end of the process.
#![cfg(not(miri))]

use std::path::{Path, PathBuf};
use std::process::Command;

use afresh_frames::{Order, Pool, PoolOptions, TakeError};

const NAME: &str = "a_control_groups_limit_is_an_error_and_not_a_signal";

/// A control group of 96 MiB, removed when dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let roots =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        for (root, limit) in roots {
            let group = Path::new(root).join(format!("afresh-test-{}", std::process::id()));
            if !Path::new(root).exists() || std::fs::create_dir(&group).is_err() {
                continue;
            }
            let group = Group(group);
            if std::fs::write(group.0.join(limit), "100663296").is_ok() {
                return Ok(group);
            }
        }
        Err("no memory control group can be made here".to_owned())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// In the child: takes memory until an error comes, touching all of it.
fn exhaust() {
    let pool = Pool::new(PoolOptions::new(131_072)).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match pool.take(Order::HUGE) {
            Ok(frame) => {
                let frame = frame.used();
                // SAFETY: the frame is owned.
                unsafe { pool.address(&frame).write_bytes(1, frame.pages() * 4096) };
                held.push(frame);
            }
            Err(error) => break error,
        }
        assert!(held.len() < 64, "128 MiB were taken from a group of 96");
    };
    assert!(matches!(error, TakeError::Headroom { .. } | TakeError::System(_)), "{error}");
    assert!(held.len() > 16, "only {} frames before: {error}", held.len());
    pool.give_all(held);
    assert!(pool.trim(0) > 0);
    assert!(pool.take(Order::HUGE).is_ok());
}

#[test]
fn a_control_groups_limit_is_an_error_and_not_a_signal() {
    if std::env::var_os("AFRESH_TEST_EXHAUST").is_some() {
        return exhaust();
    }
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let procs = group.0.join("cgroup.procs");
    let test = afresh_sys::test_command(NAME);
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(r#"echo $$ > "$0" && exec "$@""#)
        .arg(&procs)
        .arg(test.get_program())
        .args(test.get_args())
        .env("AFRESH_TEST_EXHAUST", "1")
        .spawn()
        .unwrap();
    let status = child.wait().unwrap();
    assert!(status.success(), "the child ended with {status}");
}
