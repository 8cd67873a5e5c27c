//! What `/proc` tells of the guest's processes: made when a file there is opened, and as it was then.
//!
//! Only opening and reading: these files are in no list of a directory.

use std::fmt::Write;

use super::clock_calls::now_moment;
use super::{State, USER};

impl State {
    /// The content of `path`, if it is one of these files.
    pub(super) fn told(&self, path: &[u8]) -> Option<Vec<u8>> {
        let path = std::str::from_utf8(path.strip_prefix(b"/proc/")?).ok()?;
        if path == "uptime" {
            let seconds = now_moment() as f64 / 1e9;
            return Some(format!("{seconds:.2} {seconds:.2}\n").into_bytes());
        }
        let (id, mut file) = path.split_once('/')?;
        let id = if id == "self" { self.family.own.id } else { id.parse().ok()? };
        let mut thread = id;
        if let Some(rest) = file.strip_prefix("task/") {
            let (of, rest) = rest.split_once('/')?;
            (thread, file) = (of.parse().ok()?, rest);
        }
        match file {
            "stat" => self.stat_line(id, thread),
            "status" => self.status(id, thread),
            "comm" => Some(self.thread_name(id, thread)? + "\n"),
            "maps" if id == self.family.own.id => Some(self.maps()),
            _ => None,
        }
        .map(String::into_bytes)
    }

    fn thread_name(&self, id: u32, thread: u32) -> Option<String> {
        let name = self.threads_of(id)?.get(thread)?.name;
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(name).into_owned())
    }

    /// Whether a thread runs (or could), sleeps, or has ended, as a letter.
    fn letter(&self, id: u32, thread: u32) -> Option<char> {
        match self.threads_of(id) {
            Some(_) if self.family.kin(id).is_some_and(|kin| kin.stopped.is_some()) => Some('T'),
            Some(threads) => Some(if threads.get(thread)?.wait.is_some() { 'S' } else { 'R' }),
            None => self.family.is_ended(id).then_some('Z'),
        }
    }

    /// Parent, group and session.
    fn relations(&self, id: u32) -> (u32, u32, u32) {
        let kin = self.family.kin(id);
        kin.map_or((self.family.own.id, id, id), |kin| (kin.parent, kin.group, kin.session))
    }

    fn stat_line(&self, id: u32, thread: u32) -> Option<String> {
        let letter = self.letter(id, thread)?;
        let name = self.thread_name(id, thread).unwrap_or_default();
        let (parent, group, session) = self.relations(id);
        let threads = self.threads_of(id).map_or(1, super::Threads::len);
        let memory = self.layout.bytes();
        let zeros = " 0".repeat(29);
        Some(format!(
            "{thread} ({name}) {letter} {parent} {group} {session} 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 0 {memory}{zeros}\n"
        ))
    }

    fn status(&self, id: u32, thread: u32) -> Option<String> {
        let letter = self.letter(id, thread)?;
        let name = self.thread_name(id, thread).unwrap_or_default();
        let word = match letter {
            'S' => "sleeping",
            'Z' => "zombie",
            'T' => "stopped",
            _ => "running",
        };
        let (parent, ..) = self.relations(id);
        let threads = self.threads_of(id).map_or(1, super::Threads::len);
        let (umask, kib) = (self.umask, self.layout.bytes() >> 10);
        Some(format!(
            "Name:\t{name}\nUmask:\t{umask:04o}\nState:\t{letter} ({word})\nTgid:\t{id}\nPid:\t{thread}\nPPid:\t{parent}\n\
             TracerPid:\t0\nUid:\t{USER}\t{USER}\t{USER}\t{USER}\nGid:\t{USER}\t{USER}\t{USER}\t{USER}\n\
             VmSize:\t{kib:>8} kB\nThreads:\t{threads}\n"
        ))
    }

    fn maps(&self) -> String {
        let mut text = String::new();
        for (start, len, protection) in self.layout.mappings() {
            let letter = |bit: i32, letter| if protection & bit as u64 == 0 { '-' } else { letter };
            let (r, w) = (letter(libc::PROT_READ, 'r'), letter(libc::PROT_WRITE, 'w'));
            let x = letter(libc::PROT_EXEC, 'x');
            let end = start + len;
            // Writing to a string does not fail.
            let _ = writeln!(text, "{start:08x}-{end:08x} {r}{w}{x}p 00000000 00:00 0");
        }
        text
    }
}
