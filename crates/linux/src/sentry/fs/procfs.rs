//! Files of `/proc` about the guest's processes, as of the moment when they are opened.
//!
//! Promises: all of it is the guest's own. The arguments of a program are shown as they were at its
//! start; writing to its own memory does not change them.

use rustix::time::ClockId;
use std::fmt::Write;

use crate::resource_numbers;
use crate::sentry::Sentry;
use crate::sentry::fs::machine_files::sizes;
use crate::sentry::fs::mounts::{FileSystem, mount_info_text, mounts_text};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::identity::{RELEASE, VERSION};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::kernel::user_namespaces::Credentials;
use crate::sentry::tty::terminals::FIRST_DEVICE;

/// Files of `/proc` itself that are made when they are opened.
pub(in crate::sentry) const OWN_FILES: [&str; 6] =
    ["key-users", "keys", "loadavg", "stat", "uptime", "version"];
/// Files of a process, and whether there is one of a process that has ended.
pub(in crate::sentry) const FILES: [(&str, bool); 30] = [
    ("auxv", false),
    ("cgroup", false),
    ("cmdline", true),
    ("comm", true),
    ("coredump_filter", false),
    ("environ", false),
    ("gid_map", false),
    ("io", false),
    ("limits", false),
    ("loginuid", false),
    ("maps", false),
    ("mem", false),
    ("mountinfo", false),
    ("mounts", false),
    ("oom_score", false),
    ("oom_score_adj", false),
    ("pagemap", false),
    ("personality", false),
    ("sched", false),
    ("schedstat", false),
    ("sessionid", false),
    ("setgroups", false),
    ("smaps", false),
    ("smaps_rollup", false),
    ("stat", true),
    ("statm", false),
    ("status", true),
    ("timerslack_ns", false),
    ("uid_map", false),
    ("wchan", false),
];
/// The limits of a process in `/proc`: name, number and unit.
const LIMITS: [(&str, u32, &str); 16] = [
    ("cpu time", resource_numbers::RLIMIT_CPU, "seconds"),
    ("file size", resource_numbers::RLIMIT_FSIZE, "bytes"),
    ("data size", resource_numbers::RLIMIT_DATA, "bytes"),
    ("stack size", resource_numbers::RLIMIT_STACK, "bytes"),
    ("core file size", resource_numbers::RLIMIT_CORE, "bytes"),
    ("resident set", resource_numbers::RLIMIT_RSS, "bytes"),
    ("processes", resource_numbers::RLIMIT_NPROC, "processes"),
    ("open files", resource_numbers::RLIMIT_NOFILE, "files"),
    ("locked memory", resource_numbers::RLIMIT_MEMLOCK, "bytes"),
    ("address space", resource_numbers::RLIMIT_AS, "bytes"),
    ("file locks", resource_numbers::RLIMIT_LOCKS, "locks"),
    ("pending signals", resource_numbers::RLIMIT_SIGPENDING, "signals"),
    ("msgqueue size", resource_numbers::RLIMIT_MSGQUEUE, "bytes"),
    ("nice priority", resource_numbers::RLIMIT_NICE, ""),
    ("realtime priority", resource_numbers::RLIMIT_RTPRIO, ""),
    ("realtime timeout", resource_numbers::RLIMIT_RTTIME, "us"),
];
/// Nanoseconds of a tick, the unit of CPU time.
const TICK: u64 = 10_000_000;
/// Files of a process that say the same of each.
const CONSTANT: [(&str, &str); 6] = [
    ("cgroup", "0::/\n"),
    (
        "io",
        "rchar: 0\nwchar: 0\nsyscr: 0\nsyscw: 0\nread_bytes: 0\nwrite_bytes: 0\n\
         cancelled_write_bytes: 0\n",
    ),
    ("loginuid", "4294967295"),
    ("oom_score", "0\n"),
    ("sessionid", "4294967295"),
    ("wchan", "0"),
];

impl Kernel {
    /// The content of a file of `/proc` itself.
    pub(in crate::sentry) fn root_file(&self, name: &[u8]) -> Option<Vec<u8>> {
        let text = match name {
            b"loadavg" => {
                let all = self.processes.threads().count();
                let last = self.processes.numbers().into_iter().max().unwrap_or_default();
                format!("0.00 0.00 0.00 1/{all} {last}\n")
            }
            b"version" => format!("Linux version {RELEASE} (afresh) {VERSION}\n"),
            b"mounts" => mounts_text(),
            b"key-users" => self.key_users(),
            _ => return None,
        };
        Some(text.into_bytes())
    }

    /// The work of the only processor since the start. The guest's time is part of its idle time.
    fn processor_lines(&self, since: u64) -> String {
        let (rest, begun) = (since / TICK, now().seconds - (since / 1_000_000_000) as i64);
        let times = format!("0 0 0 {rest} 0 0 0 0 0 0");
        let runs = self.processes.infos().count();
        format!(
            "cpu  {times}\ncpu0 {times}\nintr 0\nctxt 0\nbtime {begun}\nprocesses {runs}\n\
             procs_running 1\nprocs_blocked 0\n"
        )
    }

    /// The content of a file of a process, or of one of its threads.
    pub(in crate::sentry) fn contents_of(
        &self,
        id: u32,
        thread: u32,
        name: &[u8],
    ) -> Option<Vec<u8>> {
        let info = self.processes.info(id);
        match name {
            b"stat" => self.stat_line(id, thread),
            b"status" => self.status(id, thread),
            b"comm" => Some(self.thread_name(id, thread)? + "\n"),
            b"smaps_rollup" => self.rollup(info?.memory),
            b"auxv" => return Some(info?.strings.vector().to_vec()),
            b"sched" => info.map(|info| {
                let name = self.thread_name(id, thread).unwrap_or_default();
                let spent = info.spent as f64 / 1e6;
                format!("{name} ({thread}, #threads: 1)\nse.sum_exec_runtime : {spent:.6}\n")
            }),
            b"personality" => info.map(|info| format!("{:08x}\n", info.traits.persona)),
            b"timerslack_ns" => info.map(|info| format!("{}\n", info.traits.slack)),
            b"limits" => info.map(|_| self.limits(id)),
            b"statm" => {
                let pages = self.memory_of(id)? / crate::sentry::PAGE;
                Some(format!("{pages} {pages} 0 0 0 {pages} 0\n"))
            }
            b"mountinfo" => info.map(|_| mount_info_text()),
            b"mounts" => info.map(|_| mounts_text()),
            b"cmdline" => {
                return Some(info.map_or_else(Vec::new, |info| info.strings.args().to_vec()));
            }
            b"environ" => return Some(info?.strings.env().to_vec()),
            b"schedstat" => info.map(|info| format!("{} 0 0\n", info.spent)),
            name => {
                let found = CONSTANT.iter().find(|(known, _)| known.as_bytes() == name);
                info.and(found).map(|(_, text)| (*text).to_owned())
            }
        }
        .map(String::into_bytes)
    }

    /// The `fdinfo` of a descriptor.
    pub(in crate::sentry) fn info(&self, id: u32, number: u32) -> Option<Vec<u8>> {
        let description = self.open_of(id, number)?;
        let (at, flags) = (description.offset(), description.status_flags());
        let inode = match &description.open {
            FileObject::File(open) | FileObject::Device(_, open) => {
                self.tree.inode_number(open.node)
            }
            _ => 1,
        };
        let mount = self.file_system_of(&description.open).mount_id(false);
        let mut text = format!("pos:\t{at}\nflags:\t0{flags:o}\nmnt_id:\t{mount}\nino:\t{inode}\n");
        // Writing to a string does not fail, here and below.
        if let FileObject::Process(meant) = description.open {
            let known = self.processes.lives(meant) || self.processes.is_ended(meant);
            let number = if known { i64::from(meant) } else { -1 };
            let _ = writeln!(text, "Pid:\t{number}\nNSpid:\t{number}");
        }
        if let FileObject::Watches(watches) = &description.open {
            for (node, watch) in &watches.list {
                let (number, inode, mask) =
                    (watch.number, self.tree.inode_number(*node), watch.mask);
                let device = FileSystem::of(&self.tree, *node).device();
                let _ = writeln!(
                    text,
                    "inotify wd:{number} ino:{inode:x} sdev:{device:x} mask:{mask:x} ignored_mask:0 "
                );
            }
        }
        Some(text.into_bytes())
    }

    fn limits(&self, id: u32) -> String {
        let mut text =
            format!("{:<26}{:<21}{:<21}{:<10}\n", "Limit", "Soft Limit", "Hard Limit", "Units");
        let word = |limit: u64| match limit {
            u64::MAX => "unlimited".to_owned(),
            limit => limit.to_string(),
        };
        for (name, number, unit) in LIMITS {
            let (soft, hard) = self.limit_of(id, number).unwrap_or((u64::MAX, u64::MAX));
            let (soft, hard) = (word(soft), word(hard));
            let _ = writeln!(text, "Max {name:<22}{soft:<21}{hard:<21}{unit:<10}");
        }
        text
    }

    /// Bytes that a process has mapped.
    fn memory_of(&self, id: u32) -> Option<u64> {
        Some(self.layout_of(self.processes.info(id)?.memory)?.bytes())
    }

    pub(in crate::sentry) fn thread_name(&self, id: u32, thread: u32) -> Option<String> {
        let name = self.processes.get(id)?.threads.get(thread)?.name;
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(name).into_owned())
    }

    /// Whether a thread runs (or could), sleeps, or has ended, as a letter.
    fn letter(&self, id: u32, thread: u32) -> Option<char> {
        match self.processes.get(id) {
            Some(process) if process.info.stopped.is_some() => Some('T'),
            Some(_) if self.processes.tracing.is_stopped(thread) => Some('t'),
            Some(process) => {
                let found = process.threads.get(thread)?;
                let waits = found.wait.is_some() && !process.wakes(found);
                Some(if waits { 'S' } else { 'R' })
            }
            None => self.processes.is_ended(id).then_some('Z'),
        }
    }

    /// Parent, group and session.
    fn relations(&self, id: u32) -> (u32, u32, u32) {
        let info = self.processes.info(id);
        let ended = (self.processes.current_id(), id, id);
        info.map_or(ended, |info| (info.parent, info.group, info.session))
    }

    fn stat_line(&self, id: u32, thread: u32) -> Option<String> {
        let letter = self.letter(id, thread)?;
        let name = self.thread_name(id, thread).unwrap_or_default();
        let (parent, group, session) = self.relations(id);
        let process = self.processes.get(id);
        let info = process.map(|process| &process.info);
        let threads = process.map_or(1, |process| process.threads.len());
        let memory = self.memory_of(id).unwrap_or_default();
        let terminal = info.and_then(|info| self.terminals.of_session(info.session));
        let foreground = terminal.and_then(|id| self.terminals.get(id)).map(|t| i64::from(t.group));
        let device = terminal.map_or(0, |id| FIRST_DEVICE + u64::from(id));
        let foreground = foreground.unwrap_or(-1);
        // Pages that may be resident, and CPU time of the process and its children.
        let resident = memory / crate::sentry::PAGE;
        let zeros = " 0".repeat(28);
        let (spent, children) =
            info.map_or((0, 0), |info| (info.spent / TICK, info.children / TICK));
        let [system, theirs] = self.system_times.of(id).map(|time| time / TICK);
        let nice = info.map_or(0, |info| i32::from(info.traits.nice));
        let priority = 20 + nice;
        Some(format!(
            "{thread} ({name}) {letter} {parent} {group} {session} {device} {foreground} 0 0 0 0 0 {spent} {system} {children} {theirs} {priority} {nice} {threads} 0 0 {memory} {resident}{zeros}\n"
        ))
    }

    fn status(&self, id: u32, thread: u32) -> Option<String> {
        let letter = self.letter(id, thread)?;
        let name = self.thread_name(id, thread).unwrap_or_default();
        let word = match letter {
            'S' => "sleeping",
            'Z' => "zombie",
            'T' => "stopped",
            't' => "tracing stop",
            _ => "running",
        };
        let (parent, ..) = self.relations(id);
        let process = self.processes.get(id);
        let threads = process.map_or(1, |process| process.threads.len());
        let state = process.and_then(|process| process.threads.get(thread));
        let (pending, blocked) =
            state.map_or((0, 0), |thread| (thread.pending.set(), thread.blocked));
        let (shared, [ignored, caught], umask) = process
            .map(|process| (process.pending.set(), process.action_sets(), process.umask))
            .unwrap_or_default();
        let none = 0;
        let tracer = self.processes.tracing.get(thread).map_or(0, |trace| trace.tracer);
        let kib = self.memory_of(id).unwrap_or_default() >> 10;
        let stack = (crate::sentry::STACK_LEN >> 10).min(kib);
        let locked_down = process.map_or(0, |process| u8::from(process.info.traits.unprivileged));
        let (_, group, session) = self.relations(id);
        let slots = self.descriptors_of(id).map(|(number, ..)| number + 1).max().unwrap_or(0);
        let slots = slots.next_multiple_of(64);
        let ids = self.seen_ids(id);
        let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>();
        let [users, members] = [&ids.user, &ids.group].map(|all| list(all).join("\t"));
        let groups = list(&ids.groups).join(" ");
        let memory = process.and_then(|process| self.layout_of(process.info.memory));
        let locked = memory.map_or(0, |layout| layout.locked_bytes() >> 10);
        let Credentials { namespace, effective, permitted, inheritable, .. } =
            self.namespaces.of(id);
        let bounding = self.bounding_set(namespace);
        Some(format!(
            "Name:\t{name}\nUmask:\t{umask:04o}\nState:\t{letter} ({word})\nTgid:\t{id}\nNgid:\t0\nPid:\t{thread}\nPPid:\t{parent}\n\
             TracerPid:\t{tracer}\nUid:\t{users}\nGid:\t{members}\n\
             FDSize:\t{slots}\nGroups:\t{groups}\nNStgid:\t{id}\nNSpid:\t{thread}\nNSpgid:\t{group}\nNSsid:\t{session}\n\
             VmPeak:\t{kib:>8} kB\nVmSize:\t{kib:>8} kB\nVmLck:\t{locked:>8} kB\nVmPin:\t{none:>8} kB\nVmHWM:\t{kib:>8} kB\nVmRSS:\t{kib:>8} kB\n\
             RssAnon:\t{kib:>8} kB\nRssFile:\t{none:>8} kB\nRssShmem:\t{none:>8} kB\nVmData:\t{kib:>8} kB\nVmStk:\t{stack:>8} kB\n\
             VmExe:\t{none:>8} kB\nVmLib:\t{none:>8} kB\nVmPTE:\t{none:>8} kB\nVmSwap:\t{none:>8} kB\n\
             CoreDumping:\t0\nTHP_enabled:\t0\nThreads:\t{threads}\nSigQ:\t0/128\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n\
             CapInh:\t{inheritable:016x}\nCapPrm:\t{permitted:016x}\nCapEff:\t{effective:016x}\nCapBnd:\t{bounding:016x}\nCapAmb:\t{none:016x}\n\
             NoNewPrivs:\t{locked_down}\nSeccomp:\t0\nSpeculation_Store_Bypass:\tvulnerable\n\
             Cpus_allowed:\t1\nCpus_allowed_list:\t0\nMems_allowed:\t1\nMems_allowed_list:\t0\n\
             voluntary_ctxt_switches:\t0\nnonvoluntary_ctxt_switches:\t0\n"
        ))
    }

    /// The sizes of all mappings of a memory together.
    fn rollup(&self, memory: u32) -> Option<String> {
        let layout = self.layout_of(memory)?;
        let (first, last) = (layout.all().next()?.0, layout.all().last()?.0);
        let line = format!(
            "{:08x}-{:08x} ---p 00000000 00:00 0{:>27}\n",
            first.start, last.end, "[rollup]"
        );
        // It has no flags, and no size of pages, but readers look for names.
        Some(line + &sizes(layout.bytes(), layout.bytes(), layout.locked_bytes(), false, ""))
    }
}

impl Sentry {
    /// `/proc/stat` or `/proc/uptime`.
    pub(in crate::sentry) fn clock_text(&self, is_stat: bool) -> String {
        let since = self.streams.clock.read(ClockId::Boottime);
        let seconds = since as f64 / 1e9;
        match is_stat {
            true => self.state.processor_lines(since),
            false => format!("{seconds:.2} {seconds:.2}\n"),
        }
    }
}
