//! The host processes of a guest's processes: forks, executed programs, switches and ends.
//!
//! One of them runs at a time; all others wait in the stub, or in a call (`parked_call.rs`). The
//! sentry holds the rest of their state. A process made by `vfork` runs in its parent's host
//! process until it executes a program.
//!
//! A frozen process has no host process before it runs. So a copy of a guest with many processes
//! costs as much as one with a single process.
//!
//! Promises: when a guest process ends, so does its host process; after a reset all frozen
//! processes are in their frozen states, and no others exist. The registers in a subprocess are
//! those of a process that uses its memory: when the last borrower leaves, those of the owner
//! return.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use afresh_files::Node;
use afresh_sys::planted::{self, Bug};

use crate::exec_command::ExecCommand;
use crate::frozen_state::{FrozenKernel, FrozenMemory, FrozenState, IdleWait as Idle};
use crate::guest::{Guest, StopReason};
use crate::limits::Limits;
use crate::load;
use crate::platform::{
    Context, Continuation, MappedImage, PlatformError, Process, StubCommands, Trap,
};
use crate::sentry::{End, FIRST, ForkRequest, Kernel, Wait, WaitReason};
use crate::subprocess::Subprocess;

/// New programs that are started by forks of the zygote before a guest gets a blank process.
const PROGRAMS_BEFORE_BLANK: u32 = 2;

/// The processes that play others than the current one.
#[derive(Debug)]
pub(crate) struct ParkedSubprocesses {
    /// Owner of the memory in the current subprocess.
    memory: u32,
    /// Parked subprocesses, by the owners of their memory.
    bodies: BTreeMap<u32, Subprocess>,
    /// The frozen state of processes without a subprocess: they have not run since.
    origin: Option<(FrozenState, Limits)>,
    /// A process without memory that those of new programs are forked from. It has the filter, and
    /// has run no code of the guest.
    blank: Option<Process>,
    /// Processes that were made for new programs since the last reset.
    programs: u32,
}

/// Takes the registers of the current thread of the current process, if they are in the state.
fn take_context(state: &mut Kernel) -> Option<Context> {
    let threads = &mut state.processes.current.threads;
    let current = threads.current_id();
    threads.get_mut(current)?.context.take()
}

impl ParkedSubprocesses {
    /// None; those that were frozen are made when they run.
    pub(crate) fn new(origin: Option<(FrozenState, Limits)>) -> Self {
        Self { memory: FIRST, bodies: BTreeMap::new(), origin, blank: None, programs: 0 }
    }

    /// Those that have no body are like this from now on.
    pub(crate) fn set_origin(&mut self, standing: &FrozenState) {
        if let Some((origin, _)) = &mut self.origin {
            *origin = standing.clone();
        }
    }

    /// Ends each subprocess that shows memory of a state other than the one that resets return to.
    pub(crate) fn end_mixed(&mut self) {
        let Some((standing, _)) = &self.origin else { return self.bodies.clear() };
        self.bodies.retain(|memory, body| {
            standing.ground(*memory).is_some_and(|ground| body.shows_only(&ground))
        });
    }

    /// Pages that a reset copies back.
    pub(crate) fn write_set_len(&self) -> usize {
        self.bodies.values().map(Subprocess::write_set_len).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Subprocess> + '_ {
        self.bodies.values()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Subprocess> + '_ {
        self.bodies.values_mut()
    }

    /// Whether CPU times were in use in the state that resets return to.
    fn is_timed(&self) -> bool {
        self.origin.as_ref().is_some_and(|(origin, _)| origin.rest.state.processes.timed)
    }

    fn frozen(&self, memory: u32) -> Result<FrozenMemory, PlatformError> {
        let origin = self.origin.as_ref();
        origin.and_then(|(standing, _)| standing.ground(memory)).ok_or(PlatformError::Lost)
    }

    fn make(&self, memory: u32) -> Result<Subprocess, PlatformError> {
        let limits = self.origin.as_ref().map(|(_, limits)| limits.clone()).unwrap_or_default();
        Subprocess::new_process(&self.frozen(memory)?, &limits, None)
    }

    /// A process without memory, for a new program.
    fn start(&mut self) -> Result<Process, PlatformError> {
        if let Some(blank) = &mut self.blank {
            match blank.fork() {
                Ok(process) => return Ok(process),
                Err(_) => self.blank = None,
            }
        }
        let process = Process::new(None, None)?;
        self.programs += 1;
        if self.programs >= PROGRAMS_BEFORE_BLANK {
            self.blank = Process::new(None, None).ok();
        }
        Ok(process)
    }

    /// Resets or ends every subprocess. One that fails is made anew when it runs.
    fn bring_back(
        &mut self,
        mut back: impl FnMut(&mut Subprocess, &FrozenMemory) -> Result<(), PlatformError>,
    ) {
        (self.blank, self.programs) = (None, 0);
        let Some((standing, _)) = &self.origin else { return self.bodies.clear() };
        self.bodies.retain(|memory, body| {
            let ground = standing.ground(*memory).filter(|_| body.is_watched());
            ground.is_some_and(|ground| back(body, &ground).is_ok())
        });
    }
}

impl Guest {
    /// Makes the subprocess with `memory` the current one.
    fn swap_body(&mut self, memory: u32) -> Result<(), PlatformError> {
        if self.others.memory == memory {
            return Ok(());
        }
        let body = match self.others.bodies.remove(&memory) {
            Some(body) => body,
            None => self.others.make(memory)?,
        };
        self.body.process.bill();
        let left = std::mem::replace(&mut self.body, body);
        let whose = std::mem::replace(&mut self.others.memory, memory);
        self.others.bodies.insert(whose, left);
        self.body.ran = true;
        self.body.process.follow();
        self.set_clock();
        Ok(())
    }

    /// Shows the current process the clocks of the guest.
    pub(crate) fn set_clock(&mut self) {
        self.body.process.set_clock(self.sentry.streams.clock.offsets());
    }

    /// Freezes all of it, while it waits for the caller as in `wait`. With `moves` it stands on
    /// that from then on.
    pub(crate) fn freeze(&mut self, wait: Idle, moves: bool) -> Result<FrozenState, PlatformError> {
        self.sentry.publish_all()?;
        let live = self.sentry.shared.nodes();
        let mut state = Arc::clone(&self.sentry.state);
        if state.has_lines() {
            // The restored state has none of these connections.
            Arc::make_mut(&mut state).cut_lines();
        }
        let mut grounds = Vec::new();
        for (memory, layout) in state.memories() {
            let body = match memory == self.others.memory {
                true => Some(&mut self.body),
                false => self.others.bodies.get_mut(&memory),
            };
            grounds.push(match body {
                Some(body) => body.freeze(memory, layout, &live, moves)?,
                None => self.others.frozen(memory)?.without_shares(layout, &live),
            });
        }
        let standing = FrozenState::new(grounds, state, wait, self.sentry.streams.clock.stop());
        if moves {
            self.others.set_origin(&standing);
            // Made anew from the frozen state, they are watched.
            self.others.bodies.retain(|_, body| body.is_watched());
        }
        Ok(standing)
    }

    /// Makes the first process the current one, resets all others to the frozen state, and ends the
    /// rest. The remaining orders reset the first.
    pub(crate) fn restore(&mut self, rest: &FrozenKernel) -> Result<StubCommands, PlatformError> {
        self.go_home()?;
        self.restore_shared(&rest.state, &rest.live)?;
        let timed = self.others.is_timed();
        self.others.bring_back(|body, ground| match body.base.as_ref() {
            Some(base) if base.same(ground) && !body.ran => Ok(()),
            Some(_) if planted::is(Bug::Family) => Ok(()),
            Some(base) if base.same(ground) => {
                let orders = body.restore()?;
                body.process.execute(&orders, Continuation::Ask)?;
                body.process.forget_spent(timed);
                Ok(())
            }
            _ => Err(PlatformError::Lost),
        });
        self.body.process.forget_spent(timed);
        self.body.restore()
    }

    /// Switches to `to`, with all its parts.
    pub(crate) fn move_to(&mut self, to: &FrozenState) -> Result<(), PlatformError> {
        let first = to.ground(FIRST).filter(|_| self.body.is_watched());
        let Some(first) = first else { return Err(PlatformError::Lost) };
        self.go_home()?;
        self.restore_shared(&to.rest.state, &to.rest.live)?;
        self.others.set_origin(to);
        self.others.bring_back(|body, ground| match body.base.as_ref() {
            Some(base) if base.same(ground) && !body.ran => Ok(()),
            _ => {
                body.move_to(ground)?;
                body.process.forget_spent(to.rest.state.processes.timed);
                Ok(())
            }
        });
        self.body.process.forget_spent(to.rest.state.processes.timed);
        self.body.move_to(&first)
    }

    /// Makes the first process the current one. Its state will be replaced by the reset.
    fn go_home(&mut self) -> Result<(), PlatformError> {
        if self.sentry.state.processes.current_id() != FIRST {
            self.sentry.change().switch_to(FIRST);
        }
        self.swap_body(FIRST)
    }

    /// Makes the mappings of live files in the current process, which waits for commands.
    pub(crate) fn attach(&mut self) -> Result<(), PlatformError> {
        self.sentry.unattached = false;
        let wanted = self.sentry.live_mappings(&self.sentry.state.layout);
        self.body.attach(wanted)
    }

    /// Brings shared memory to `state`, in which the files `live` are live, and prepares all
    /// processes for it: before they are reset.
    fn restore_shared(
        &mut self,
        state: &Kernel,
        live: &BTreeSet<Node>,
    ) -> Result<(), PlatformError> {
        self.sentry.shared.restore(&state.tree, live)?;
        for (memory, layout) in state.memories() {
            let wanted = self.sentry.live_mappings(layout);
            let body = match memory == self.others.memory {
                true => Some(&mut self.body),
                false => self.others.bodies.get_mut(&memory),
            };
            body.into_iter().for_each(|body| body.disturb_strays(&wanted));
        }
        Ok(())
    }

    /// Makes `id` the current process of the guest, with its subprocess and registers.
    pub(crate) fn switch_to(&mut self, id: u32) -> Result<(), PlatformError> {
        let processes = &self.sentry.state.processes;
        if processes.current_id() == id
            && self.body.holds == id
            && self.others.memory == processes.current.info.memory
        {
            return Ok(());
        }
        self.note_spent();
        self.sentry.change().switch_to(id);
        let memory = self.sentry.state.current().info.memory;
        if self.others.memory != memory {
            self.swap_body(memory)?;
            self.attach()?;
        }
        let held = std::mem::replace(&mut self.body.holds, id);
        if held == id {
            return Ok(());
        }
        self.body.unpark()?;
        let state = self.sentry.change();
        // Only users of the memory have registers in it.
        if state.processes.info(held).is_some_and(|info| info.memory == memory) {
            let context = self.body.process.context();
            state.with(held, |state| {
                let current = state.processes.current.threads.current_id();
                if let Some(thread) = state.processes.current.threads.get_mut(current) {
                    thread.context = Some(context);
                }
            });
        }
        if let Some(context) = take_context(state) {
            self.body.process.set_context(&context);
        }
        Ok(())
    }

    /// Puts the registers of the owner of the memory back into the current subprocess: its user has
    /// ended, or is about to run another program in another subprocess.
    fn hand_back(&mut self) {
        let owner = self.others.memory;
        if self.body.holds == owner || !self.sentry.state.processes.lives(owner) {
            return;
        }
        if let Some(context) = self.sentry.change().with(owner, take_context) {
            self.body.process.set_context(&context);
        }
        self.body.holds = owner;
    }

    /// Counts CPU time for the process that ran until now, where such times are in use.
    fn note_spent(&mut self) {
        let held = self.body.holds;
        if self.sentry.state.processes.timed && self.sentry.state.processes.lives(held) {
            let spent = self.body.process.take_spent();
            let served = std::mem::take(&mut self.sentry.served);
            self.sentry.change().with(held, |state| {
                state.spend(spent);
                state.spend_system(served);
            });
        }
    }

    /// Makes the first process the current one again, before the caller looks.
    pub(crate) fn come_home(&mut self) -> Result<(), PlatformError> {
        self.switch_to(FIRST)
    }

    /// Marks the mutexes of all threads of the current process, which ends or runs another program.
    /// The guest chooses their number, so its time may be up before the last.
    fn mark_mutexes(&mut self, deadline: Instant) -> Result<Option<StopReason>, PlatformError> {
        for list in self.sentry.robust_lists() {
            if let Some(halt) = self.halt(deadline) {
                return Ok(Some(halt));
            }
            self.sentry.mark_robust_list(&mut self.body.process, list)?;
        }
        Ok(None)
    }

    /// Ends the current process, which is not the first, and the users of its memory, unless the
    /// guest has to stop before.
    fn end_process(
        &mut self,
        end: End,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let id = self.sentry.state.processes.current_id();
        self.end_borrowers();
        if let Some(halt) = self.mark_mutexes(deadline)? {
            return Ok(Some(halt));
        }
        self.sentry.publish_lasting()?;
        let served = std::mem::take(&mut self.sentry.served);
        let state = self.sentry.change();
        state.spend_system(served);
        let memory = state.processes.current.info.memory;
        // Its parent may query the times, even if no process has so far.
        if memory == id {
            state.spend(self.body.process.take_spent());
        }
        state.end_process(end);
        self.sentry.prune_shared()?;
        self.sentry.resumed = None;
        if memory == id {
            // Another process first, then this one can end.
            let heir = self.sentry.state.current().info.memory;
            self.swap_body(heir)?;
            self.others.bodies.remove(&id);
            self.attach()?;
        } else {
            self.hand_back();
        }
        Ok(None)
    }

    /// Ends the users of the memory of the current process, which is about to end.
    fn end_borrowers(&mut self) {
        let own = self.sentry.state.processes.current_id();
        for id in self.sentry.state.processes.borrowers() {
            let state = self.sentry.change();
            state.switch_to(id);
            state.end_process(End::Signal(libc::SIGKILL));
            state.switch_to(own);
        }
    }

    /// Makes the process that the sentry has noted. Its parent continues or waits.
    pub(crate) fn fork(&mut self, fork: ForkRequest) -> Result<(), PlatformError> {
        if fork.copies {
            match self.copy() {
                Ok(process) => self.adopt(fork, process)?,
                // No room for a further process on this host.
                Err(PlatformError::Missing { .. } | PlatformError::Kernel { .. }) => {
                    let state = self.sentry.change();
                    state.undo_child(fork.id);
                    if let Some(number) = fork.descriptor {
                        let gone = state.table.close(number).unwrap_or_default();
                        state.forget(gone);
                    }
                    self.body.process.set_result(-i64::from(libc::EAGAIN));
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        if fork.waits {
            // The call is repeated then.
            let wait = Wait::new(WaitReason::Borrower(fork.id), None);
            self.sentry.change().current_mut().threads.current_mut().wait = Some(wait);
            self.sentry.stop_if_due();
        } else {
            self.body.process.set_result(fork.id.into());
        }
        Ok(())
    }

    /// Has a copy of the current process play the child.
    fn adopt(&mut self, fork: ForkRequest, mut process: Process) -> Result<(), PlatformError> {
        if let Some(at) = fork.child_tid_at {
            let _ = process.write(at, &fork.id.to_le_bytes())?;
        }
        let context = self.sentry.change().with(fork.id, take_context);
        if let Some(context) = context {
            process.set_context(&context);
        }
        let mut body = self.body.forked(process, fork.id);
        let attached = body.attach(self.sentry.live_mappings(&self.sentry.state.layout));
        self.others.bodies.insert(fork.id, body);
        attached
    }

    /// Forks the current process. Missing content of its image comes first.
    fn copy(&mut self) -> Result<Process, PlatformError> {
        if let Some(base) = &self.body.base {
            MappedImage::new(&base.image)?;
        }
        self.body.process.look_for_content();
        self.body.process.fork()
    }

    /// Runs another program in the current process. Says how that ended, if it could not be carried
    /// through; the call returns an error where nothing has happened yet.
    pub(crate) fn exec(
        &mut self,
        command: ExecCommand,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let found = command.find(&self.sentry.state);
        let loadable = match found {
            Ok(loadable) => loadable,
            Err(errno) => {
                self.body.process.set_result(-i64::from(errno.raw_os_error()));
                return self.go_on();
            }
        };
        self.end_borrowers();
        if let Some(halt) = self.mark_mutexes(deadline)? {
            return Ok(Some(halt));
        }
        self.sentry.publish_lasting()?;
        let own = self.sentry.state.processes.current_id();
        let thread = self.sentry.state.current().threads.current_id();
        let borrows = self.sentry.state.current().info.memory != own;
        if borrows {
            let process = match self.others.start() {
                Ok(process) => process,
                // A new process that has ended takes nothing of the guest along.
                Err(
                    PlatformError::Missing { .. }
                    | PlatformError::Kernel { .. }
                    | PlatformError::Ended(_),
                ) => {
                    self.body.process.set_result(-i64::from(libc::EAGAIN));
                    return self.go_on();
                }
                Err(error) => return Err(error),
            };
            self.hand_back();
            self.others.bodies.insert(own, Subprocess::new(process, own));
            self.sentry.change().reset_for_exec(loadable.identity());
            self.swap_body(own)?;
            // The slice was measured in CPU time of another process.
            self.begin_slice();
        } else {
            let state = self.sentry.change();
            state.reset_for_exec(loadable.identity());
            let change = state.layout.clear();
            state.drop_unshared();
            self.sentry.prune_shared()?;
            self.enact(change, Continuation::Ask)?;
            // The next program may be another user's.
            self.body.inside.forget(&mut self.body.process);
            // Nothing of the last program's is in the new one's registers.
            self.body.process.forget_frame();
            self.body.process.bases = Default::default();
        }
        self.sentry.note_traced_exec(thread);
        match load::place(self, &loadable, deadline) {
            Ok(halt) => Ok(halt),
            Err(crate::error::WarmError::Platform(error)) => Err(error),
            // The old program is unmapped, and the new one does not fit.
            Err(_) => Ok(Some(StopReason::End(End::Signal(libc::SIGKILL), Trap::Stub))),
        }
    }

    /// The end of a process ends the guest only if it is the first: others run then.
    pub(crate) fn outlive(
        &mut self,
        halt: Option<StopReason>,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let halt = match halt {
            Some(StopReason::End(end @ (End::Exit(_) | End::Signal(_)), _))
                if self.sentry.state.processes.current_id() != FIRST =>
            {
                match self.end_process(end, deadline)? {
                    None => return self.take_turns(deadline),
                    halt => halt,
                }
            }
            halt => halt,
        };
        let Some(halt) = halt else { return Ok(None) };
        let unparked = self.unpark_all();
        // A process that the host has ended is in no state that is kept.
        if !matches!(halt, StopReason::End(..)) {
            unparked?;
        }
        Ok(Some(halt))
    }
}
