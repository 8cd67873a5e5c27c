//! Answers to calls inside the process of a guest: data that it gets before it runs, and changes
//! that the sentry takes over when it stops.
//!
//! [`Kernel`](crate::sentry::Kernel) has the state. The process has a copy of some answers while it
//! runs. Each event closes that copy first and takes over what calls have changed: offsets, and
//! which descriptors are closed. So the sentry serves a call, a fault or an interrupt after all
//! calls before it.
//!
//! The window has the bytes of the file that was opened last, if it is an unchanged host file that
//! fits. They count while the host has the same file, and no guest watches reads. A process that
//! causes no event is interrupted at intervals, so that it meets a change.
//!
//! Promises: a descriptor is answered for only while its file is as it was when the answers were
//! made, and each open description at one place of a process only. May break it: an event that is
//! served before [`Sentry::take_over`], and a program of the host that writes to a file through a
//! shared mapping, which may leave the times of the file as they are.

use std::collections::BTreeMap;

use afresh_files::{FileVersion, HostFile, Kind, Node};
use afresh_sys::planted::{self, Bug};

use crate::file_cache::FileCache;
use crate::platform::{
    ACTION_LEN, ACTIONS_LEN, ANSWERS_INSIDE, ATTRIBUTE_LEN, Answer, Call, DESCRIPTORS,
    DescriptorAnswers, Numbers, Process, STAT_LEN, WINDOW_LEN, calls,
};
use crate::sentry::Sentry;
use crate::sentry::abi;
use crate::sentry::attribute_prefetch::{AttributePrefetch, FileLookup};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::signals::UNTOUCHABLE;
use crate::sentry::result::SyscallControl;
use crate::window_charge::WindowCharge;

/// A descriptor that is answered for.
#[derive(Debug)]
struct AnsweredDescriptor {
    description: u64,
    node: Node,
    version: FileVersion,
    /// The owner in the answers, which depends on the user namespace of the process.
    owner: [u32; 2],
    /// The recorded owner of the file.
    recorded: Option<[u32; 2]>,
    answers: DescriptorAnswers,
    /// The host file whose bytes are in the window.
    shown: Option<HostFile>,
    /// Whether the process has these answers.
    is_given: bool,
}

impl AnsweredDescriptor {
    /// Has calls for the bytes of the file reach the sentry.
    fn close_window(&mut self) {
        if self.shown.take().is_some() {
            self.answers.window = 0;
            self.is_given = false;
        }
    }
}

/// A descriptor that may be answered for.
#[derive(Clone, Copy, Debug)]
struct UsedDescriptor {
    number: u32,
    /// Whether it was opened just now.
    is_new: bool,
}

/// The answers that a process has.
#[derive(Debug, Default)]
pub(crate) struct InsideAnswers {
    /// Whether it may answer calls.
    open: bool,
    numbers: Numbers,
    /// Actions for signals, by their numbers.
    actions: BTreeMap<u64, [u8; ACTION_LEN]>,
    descriptors: [Option<AnsweredDescriptor>; DESCRIPTORS],
    /// Places at which the process has answers.
    given: [bool; DESCRIPTORS],
    /// A descriptor that was used, and may be again.
    used: Option<UsedDescriptor>,
    /// Whether the last call was one for the action of a signal, which others follow.
    used_action: bool,
    prefetch: AttributePrefetch,
    /// The lookup that the last call made, if others may follow.
    lookup: Option<FileLookup>,
    /// The charge for the window.
    window: WindowCharge,
}

impl InsideAnswers {
    /// Whether the process has bytes of a file. The host may change that file without an event.
    pub(crate) fn shows_contents(&self) -> bool {
        self.descriptors.iter().flatten().any(|known| known.shown.is_some())
    }

    /// Removes all of them.
    pub(crate) fn forget(&mut self, process: &mut Process) {
        if !self.actions.is_empty() {
            process.answer_actions(&[0; ACTIONS_LEN]);
        }
        // The memory of the window stays.
        let window = std::mem::take(&mut self.window);
        *self = Self { window, ..Self::default() };
        process.forget_answers();
    }
}

impl Sentry {
    /// Notes the descriptor of a call that was answered with `control`.
    pub(crate) fn note_call(
        &mut self,
        inside: &mut InsideAnswers,
        call: &Call,
        control: &SyscallControl,
    ) {
        inside.used_action = call.number == libc::SYS_rt_sigaction;
        // The process answers no other call that looks up a file.
        let is_answered = call.number == libc::SYS_newfstatat;
        inside.lookup = self.lookup.take().filter(|_| is_answered);
        let SyscallControl::Value(value) = *control else { return };
        let is_error = value as i64 <= -1;
        inside.used = match call.number {
            calls::SYS_open | libc::SYS_openat if !is_error => {
                Some(UsedDescriptor { number: value as u32, is_new: true })
            }
            libc::SYS_read | libc::SYS_lseek | libc::SYS_fstat if !is_error => {
                Some(UsedDescriptor { number: call.args[0] as u32, is_new: false })
            }
            _ => None,
        };
    }

    /// Gives the process answers, before it runs.
    pub(crate) fn give_answers(&self, inside: &mut InsideAnswers, process: &mut Process) {
        if !self.contents.shows_twins {
            return self.give_next(inside, process);
        }
        self.renew_descriptors(inside);
        self.add_used(inside, process);
        let InsideAnswers { descriptors, given, .. } = inside;
        for (place, (known, given)) in descriptors.iter_mut().zip(given).enumerate() {
            let is_new = known.as_ref().is_some_and(|known| !known.is_given);
            if is_new || *given && known.is_none() {
                process.answer_descriptor(place, known.as_ref().map(|known| &known.answers));
            }
            *given = known.is_some();
            if let Some(known) = known {
                known.is_given = true;
            }
        }
        let numbers = self.numbers();
        if inside.numbers != numbers || !inside.open {
            process.answer_numbers(&numbers);
        }
        (inside.numbers, inside.open) = (numbers, true);
        self.give_actions(inside, process);
    }

    /// Gives a process whose text is not changed answers to calls as its last one.
    fn give_next(&self, inside: &mut InsideAnswers, process: &mut Process) {
        if !ANSWERS_INSIDE {
            return;
        }
        if std::mem::take(&mut inside.used_action) {
            self.give_actions(inside, process);
            process.open_answers(&[]);
            inside.open = true;
        } else if let Some(lookup) = inside.lookup.take() {
            let answers = self.attributes_behind(&lookup, &mut inside.prefetch);
            let most = self.state.layout.limit() / FileCache::SHARE;
            let bytes = (answers.len() * ATTRIBUTE_LEN) as u64;
            if !answers.is_empty() && self.contents.charge_window(&mut inside.window, bytes, most) {
                process.open_answers(&answers);
                inside.open = true;
            }
        }
    }

    /// Gives the process the actions for signals.
    fn give_actions(&self, inside: &mut InsideAnswers, process: &mut Process) {
        let actions = &self.state.current().handlers;
        if inside.actions == *actions {
            return;
        }
        let mut bytes = [0; ACTIONS_LEN];
        let (table, _) = bytes.as_chunks_mut::<ACTION_LEN>();
        for (signal, action) in actions {
            if let Some(entry) = table.get_mut((*signal as usize).wrapping_sub(1)) {
                *entry = *action;
            }
        }
        process.answer_actions(&bytes);
        inside.actions.clone_from(actions);
    }

    /// Takes over the effects of calls that were answered inside, while the process stands still.
    pub(crate) fn take_over(&mut self, inside: &mut InsideAnswers, process: &mut Process) {
        if !std::mem::take(&mut inside.open) {
            return;
        }
        process.close_answers();
        inside.prefetch.taken = process.attributes_taken(inside.prefetch.count());
        let effects = process.take_effects();
        for (known, offset) in inside.descriptors.iter_mut().zip(effects.offsets) {
            let (Some(known), Some(offset)) = (known, offset) else { continue };
            if offset == known.answers.offset || planted::is(Bug::InsideOffset) {
                continue;
            }
            let description = self.change().table.description_mut(known.description);
            if let Some(FileObject::File(open)) = description.map(|found| &mut found.open) {
                open.offset = offset;
            }
        }
        self.set_actions(&effects.actions);
        for place in effects.closed {
            if !planted::is(Bug::InsideOffset)
                && let Some(known) = inside.descriptors[place].take()
            {
                // It is the same descriptor as when the answers were given.
                let _ = self.sys_close(known.answers.number.into());
            }
        }
    }

    /// Sets the actions for signals, as calls of the guest have.
    fn set_actions(&mut self, actions: &[(u64, [u8; ACTION_LEN])]) {
        for (signal, action) in actions {
            if UNTOUCHABLE & 1 << (signal - 1) == 0 && !planted::is(Bug::InsideOffset) {
                self.set_action(*signal, *action);
            }
        }
    }

    /// Drops descriptors that are not what they were, and brings the others up to date.
    fn renew_descriptors(&self, inside: &mut InsideAnswers) {
        let table = &self.state.table;
        for known in &mut inside.descriptors {
            let Some(present) = known else { continue };
            let number = u64::from(present.answers.number);
            let open = table.get(number).ok().map(|found| &found.open);
            let same = table.id(number) == Ok(present.description)
                && present.owner == self.state.seen_owner(present.recorded)
                && self.state.tree.is_version(present.node, &present.version)
                && !self.state.shares.contains(&present.node);
            match open {
                Some(FileObject::File(open)) if same && open.node == present.node => {
                    if present.answers.offset != open.offset {
                        present.answers.offset = open.offset;
                        present.is_given = false;
                    }
                    let is_shown = present.shown.is_none()
                        || !self.state.is_watched()
                            && self.state.tree.host_file(present.node) == present.shown;
                    if !is_shown {
                        present.close_window();
                    }
                }
                _ => *known = None,
            }
        }
    }

    /// Answers for the descriptor that was used last, if its file can be answered for.
    fn add_used(&self, inside: &mut InsideAnswers, process: &mut Process) {
        let Some(UsedDescriptor { number, is_new }) = inside.used.take() else { return };
        let place = number as usize % DESCRIPTORS;
        let table = &self.state.table;
        let Ok(description) = table.id(number.into()) else { return };
        let is_known = |known: &AnsweredDescriptor| known.description == description;
        if inside.descriptors.iter().flatten().any(is_known) {
            // Two places would have two offsets.
            return;
        }
        let Some(mut known) = self.answered(number, description) else { return };
        let most = self.state.layout.limit() / FileCache::SHARE;
        if is_new
            && let Some((file, bytes)) = self.contents_of(known.node)
            && self.contents.charge_window(&mut inside.window, bytes.len() as u64, most)
        {
            inside.descriptors.iter_mut().flatten().for_each(AnsweredDescriptor::close_window);
            process.show_contents(&bytes);
            known.answers.window = bytes.len() as u64;
            known.shown = Some(file);
        }
        inside.descriptors[place] = Some(known);
    }

    /// The bytes of an unchanged host file for the window, if they fit and may be read there.
    fn contents_of(&self, node: Node) -> Option<(HostFile, Vec<u8>)> {
        let tree = &self.state.tree;
        let file = tree.host_file(node).filter(HostFile::is_settled)?;
        if self.state.is_watched() || file.size() == 0 || file.size() > WINDOW_LEN as u64 {
            return None;
        }
        let mut bytes = vec![0; file.size() as usize];
        let read = tree.read(node, 0, &mut bytes).ok()?;
        // A change during the read has changed the times by its end.
        (read == bytes.len() && tree.host_file(node) == Some(file)).then_some((file, bytes))
    }

    /// The answers for a descriptor of a plain file that is only read.
    fn answered(&self, number: u32, id: u64) -> Option<AnsweredDescriptor> {
        let description = self.state.table.get(number.into()).ok()?;
        let FileObject::File(open) = &description.open else { return None };
        let node = open.node;
        let reads = description.reads() && !description.writes();
        if !reads || self.state.shares.contains(&node) {
            return None;
        }
        let version = self.state.tree.version(node).ok()?;
        if self.state.tree.stat(node).ok()?.kind != Kind::File
            || !self.state.tree.is_version(node, &version)
        {
            return None;
        }
        let attributes = self.attributes_of(id, description).ok()?;
        let recorded = attributes.owner;
        let owner = self.state.seen_owner(recorded);
        let stat: [u8; STAT_LEN] = abi::stat(&attributes, owner).try_into().ok()?;
        let answers = DescriptorAnswers {
            number,
            offset: open.offset,
            size: attributes.size,
            stat,
            window: 0,
        };
        Some(AnsweredDescriptor {
            description: id,
            node,
            version,
            owner,
            recorded,
            answers,
            shown: None,
            is_given: false,
        })
    }

    /// The numbers of the current process and thread.
    fn numbers(&self) -> Numbers {
        let (state, process) = (&self.state, self.state.current());
        let ids = state.real_and_effective().map(|both| both.map(u64::from));
        let [[user, effective_user], [group, effective_group]] = ids;
        let mut numbers = Numbers::default();
        for (answer, number) in [
            (Answer::Open, 1),
            (Answer::Process, state.processes.current_id().into()),
            (Answer::Thread, process.threads.current_id().into()),
            (Answer::Parent, process.info.parent.into()),
            (Answer::User, user),
            (Answer::EffectiveUser, effective_user),
            (Answer::Group, group),
            (Answer::EffectiveGroup, effective_group),
            (Answer::ProcessGroup, process.info.group.into()),
            (Answer::Blocked, process.threads.current().blocked),
        ] {
            numbers[answer as usize] = number;
        }
        numbers
    }
}
